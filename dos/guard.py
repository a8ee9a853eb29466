"""One thread at a time in an optimizer, and steps that end whole or break it for good."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of numbers, which takes microseconds
import contextlib
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

_SIGINT = int(signal.SIGINT)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def exclusive(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Of an object with a `_lock`: its methods that are exclusive run in one thread at a time, and wholly.

    They raise KeyboardInterrupt at their end if Ctrl-C came meanwhile; the second Ctrl-C takes effect at once. Python's
    own locks, those of futures too, can be left locked by an interruption: later calls that wait for the same transfer,
    such as to save a checkpoint after Ctrl-C, would then wait for ever.
    Where a program handles SIGINT in its own way, and in threads other than the main one, which Ctrl-C does not reach,
    nothing is done about it.
    In torch.inference_mode, too, they make ordinary tensors: other threads could not write to those of that mode.
    """

    @functools.wraps(method)
    def holding(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return holding(self, *args, **kwargs)
        # With the lock on one line: an exception that a debugger raises between lines would come before its release.
        main = threading.current_thread() is threading.main_thread()
        if not main or _signal.getsignal(_SIGINT) is not signal.default_int_handler:
            with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701
        came, code = False, sys._getframe().f_code

        def remember(number: int, frame: FrameType | None) -> None:
            nonlocal came
            again, came = came, True
            while frame is not None and frame.f_code is not code:
                frame = frame.f_back
            if again or frame is None:  # without a frame all of this is over, but the handler was not taken back
                signal.default_int_handler(number, frame)

        _signal.signal(_SIGINT, remember)
        try:
            with self._lock: result = method(self, *args, **kwargs)  # fmt: skip  # noqa: E701
        finally:
            _signal.signal(_SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
        return result

    return holding


class Guard:
    """Of one optimizer.

    lock: held by the thread that calls the optimizer; hooks may come from several threads at once.
    failed: whether work that changes parameters or state has failed.
    working: what has threads of its own. `drain` returns when nothing of that is in flight, before a fork; `after_fork`
        renews the threads in the child; `finish` returns when all has ended, before the interpreter does.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failed = False
        self.working: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changing = False
        _guards.add(self)

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

    def failure(self, error: BaseException) -> RuntimeError:
        """What is raised for an error in the middle of a step; from now on all is `broken`."""
        self.failed = True
        cause = str(error) or type(error).__name__  # such as MemoryError, which says nothing
        return RuntimeError(f"the optimizer step failed part way ({cause}); restore a checkpoint before going on")

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Surrounds what must happen wholly, in a call that is `exclusive`; if it raises, all is `broken`."""
        before, self._changing = self._changing, True
        yield
        self._changing = before


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
renewed: weakref.WeakSet[Any] = weakref.WeakSet()
"""What else has threads or locks of its own: its `renew` is called in a forked child, which does not inherit them."""
_forking = threading.RLock()
_held: list[Guard] = []
"""Those whose lock the thread has that forks."""


def _before_fork() -> None:
    """Wait until no thread is in a call, and nothing is in flight.

    Else a child, such as a data loader's worker, could have parameters of a step that is half done, which no thread
    there completes, and locks that no thread there releases.
    """
    _forking.acquire()
    for guard in list(_guards):
        guard.lock.acquire()
        _held.append(guard)
    for each in all_working():
        each.drain()


def _after_fork() -> None:
    while _held:
        _held.pop().lock.release()
    _forking.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for each in all_working():
        each.after_fork()
    for each in list(renewed):
        each.renew()


def all_working() -> list[Any]:
    """What has threads of its own, of all optimizers."""
    return [each for guard in list(_guards) for each in list(guard.working)]


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
