"""What keeps a step whole: one thread at a time, and changes that either end or are known not to have."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Guard:
    """Of one optimizer.

    lock: held by whoever calls the optimizer; hooks may come from several threads at once.
    failed: whether work that changes parameters or state has failed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed = False
        self._changing = False

    @property
    def broken(self) -> bool:
        """Whether a change failed or did not come to its end, so that parameters and state do not match."""
        return self.failed or self._changing

    def check(self) -> None:
        """Raise RuntimeError if a change did not come to its end."""
        if self.broken:
            raise RuntimeError(
                "an earlier step failed part way, so parameters and state do not match; "
                "load a checkpoint into the model and into a new optimizer"
            )

    @contextmanager
    def change(self) -> Iterator[None]:
        """Surrounds what must happen wholly. If it is left by an exception, `broken` stays."""
        before, self._changing = self._changing, True
        yield
        self._changing = before


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect when the body is over, not within it.

    Where a program handles SIGINT in its own way, and in threads other than the main one, which Ctrl-C does not reach,
    nothing is changed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
