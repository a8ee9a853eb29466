"""Guards one optimizer: threads, phases, Ctrl-C, forks, the interpreter's exit; and how the package warns."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of numbers, which takes microseconds
import contextlib
import enum
import functools
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.thread import (
    ThreadPoolExecutor,  # registers its exit handler before ours, so it runs after ours
)
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

_SIGINT = int(signal.SIGINT)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Phase(enum.Enum):
    """Where one optimizer is in its iteration. What is in flight is the ledger's: a queued step runs in any phase."""

    IDLE = "no gradient has been reported since the last step"
    BACKWARD = "backward has reported gradients for the step to come"
    PREPARED = "a step was checked and its memory reserved, and no parameter and no state has changed"
    COMMITTING = "parameters, state or records are changing"
    BROKEN = "a change failed part way, so parameters and state do not match"


UNBROKEN = (Phase.IDLE, Phase.BACKWARD, Phase.PREPARED)  # an exception may give a prepared step up
ANY = (*UNBROKEN, Phase.BROKEN)
ENTRIES: dict[str, tuple[Phase, ...]] = {}
"""The phases that each entry point accepts, by its name; docs/architecture.md shows them as a table."""


Method = Callable[Concatenate[Any, _P], _T]


def entry(*accepted: Phase) -> Callable[[Method[_P, _T]], Method[_P, _T]]:
    """Decorate an entry point of a session: `exclusive`, and called in one of these phases only."""

    def decorate(method: Method[_P, _T]) -> Method[_P, _T]:
        ENTRIES[method.__name__.strip("_")] = accepted
        return _holding(method, accepted)

    return decorate


def exclusive(method: Method[_P, _T]) -> Method[_P, _T]:
    """Of an object with a `_lock`: its methods that are exclusive run in one thread at a time, and wholly.

    If Ctrl-C came meanwhile, they raise KeyboardInterrupt at their end: it could leave Python's own locks, those of
    futures too, locked for ever, and end a change part way. The second Ctrl-C takes effect at once, for what hangs.
    Where a program handles SIGINT in its own way, and in threads other than the main one, which Ctrl-C does not reach,
    nothing is done about it.
    In torch.inference_mode, too, they make ordinary tensors: other threads could not write to those of that mode.
    """
    return _holding(method, ())


def _holding(method: Method[_P, _T], accepted: tuple[Phase, ...]) -> Method[_P, _T]:
    @functools.wraps(method)
    def holding(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return holding(self, *args, **kwargs)
        main = threading.current_thread() is threading.main_thread()
        if not main or _signal.getsignal(_SIGINT) is not signal.default_int_handler:
            with self._lock:
                _check(self, method, accepted)
                return method(self, *args, **kwargs)
        came = False

        def remember(number: int, frame: FrameType | None) -> None:
            nonlocal came
            again, came = came, True
            if again:
                signal.default_int_handler(number, frame)

        _signal.signal(_SIGINT, remember)
        try:
            with self._lock:
                _check(self, method, accepted)
                result = method(self, *args, **kwargs)
        finally:
            _signal.signal(_SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
        return result

    return holding


def _check(session: Any, method: Callable[..., Any], accepted: tuple[Phase, ...]) -> None:
    """Raise RuntimeError for a session that is broken, where the method does not accept that."""
    if accepted and session.guard.phase not in accepted:
        if Phase.BROKEN not in accepted:
            session.guard.check()
        assert session.guard.broken, f"{method.__name__} was called in phase {session.guard.phase.name}"


_LOAD = "build the optimizer anew, and load saved state of the model and of the optimizer"


class Guard:
    """Of one optimizer.

    lock: held by the thread that calls the optimizer; hooks may come from several threads at once.
    phase: of the optimizer; its session sets it.
    steps: that have begun to change parameters; complete: those of them that are known to have ended as they should.
    working: what has threads of its own. `drain` returns when nothing of that is in flight, before a fork; `after_fork`
        renews the threads in the child; `finish` returns when all has ended, before the interpreter does.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.phase = Phase.IDLE
        self.steps = self.complete = 0
        self.working: weakref.WeakSet[Any] = weakref.WeakSet()
        _guards.add(self)

    @property
    def broken(self) -> bool:
        """Whether an exception ended a change, or an update failed, so that parameters and state do not match.

        COMMITTING is such a phase where no change is running.
        """
        return self.phase in (Phase.BROKEN, Phase.COMMITTING)

    def check(self) -> None:
        """Raise RuntimeError if a change did not come to its end."""
        if self.broken:
            raise RuntimeError(
                f"the optimizer is in an undefined state: step {self.complete} was the last complete one, and a change "
                f"after it failed part way; {_LOAD}"
            )

    def failure(self, error: BaseException) -> RuntimeError:
        """The error to raise for one in the middle of a step; from now on the phase is BROKEN."""
        self.phase = Phase.BROKEN
        cause = str(error) or type(error).__name__  # such as MemoryError, which says nothing
        return RuntimeError(
            f"the optimizer step failed part way ({cause}), and step {self.complete} was the last complete one; {_LOAD}"
        )

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Surround a change that must happen wholly, in a call that is `exclusive`. If it raises, all is `broken`."""
        before, self.phase = self.phase, Phase.COMMITTING
        yield  # without a handler: an exception leaves the phase, by which the next call knows
        if self.phase is Phase.COMMITTING:  # a lane that failed meanwhile has set BROKEN
            self.phase = before


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
renewed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Further objects with threads or locks of their own; a forked child, which inherits none, calls `renew` of each."""
_forking = threading.RLock()
_held: list[Guard] = []
"""The guards whose lock the thread has that forks."""


def _before_fork() -> None:
    """Wait until no thread is in a call, and nothing is in flight.

    Else a child, such as a data loader's worker, could have parameters of a step that is half done, which no thread
    there completes, and locks that no thread there releases.
    """
    # Two threads that fork at once would each hold locks of optimizers for which the other waits.
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
    """The objects with threads of their own, of all optimizers."""
    return [each for guard in list(_guards) for each in list(guard.working)]


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


_ended = threading.Event()


def main_thread_ended() -> bool:
    """Whether the main thread has ended, after which executors start no more work; other threads may run on."""
    return _ended.is_set()


def on_own_thread() -> bool:
    """Whether this runs on one of our threads, which would wait for itself."""
    return threading.current_thread().name.startswith("dos-")


def submit(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> Future[_T]:
    """Run the work on a thread; at once where threads take no more, as in atexit handlers: what they had has ended.

    Raises what the work raises only in that case.
    """
    if not main_thread_ended():
        return thread.submit(work)
    done: Future[_T] = Future()
    done.set_result(work())
    return done


def _finish_all() -> None:
    # First: hooks on other threads look at it, and submit nothing behind what is waited for below.
    _ended.set()
    for each in all_working():
        each.finish()


# Work in flight ends before executors shut down at the interpreter's exit. Handlers run in the reverse order of their
# registration, and the import of concurrent.futures.thread above has registered theirs.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]

_FOLDERS = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))


def warn(message: str) -> None:
    """Warn, as of the innermost line that is neither this package's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
