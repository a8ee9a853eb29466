"""Guards one optimizer: threads, phases, Ctrl-C, forks, the interpreter's exit; and how the package warns."""

from __future__ import annotations

import enum
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.thread import (
    ThreadPoolExecutor,  # registers its exit handler before ours, so it runs after ours
)
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from dos.signals import held, hold, let_go, thread

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Phase(enum.Enum):
    """The phase of one optimizer's iteration. Transfers in flight are the ledger's: a queued step runs in any phase."""

    IDLE = "no gradient has been reported since the last step"
    BACKWARD = "backward has reported gradients for the step to come"
    PREPARED = "a step was checked and its memory reserved, and no parameter and no state has changed"
    COMMITTING = "parameters, state or records are changing"
    BROKEN = "a change failed part way, so parameters and state do not match"


UNBROKEN = (Phase.IDLE, Phase.BACKWARD, Phase.PREPARED)  # an exception before the commit ends a step in PREPARED
ANY = (*UNBROKEN, Phase.BROKEN)
ENTRIES: dict[str, tuple[Phase, ...]] = {}
"""The phases that each entry point accepts, by its name; docs/architecture.md shows them as a table."""


Method = Callable[Concatenate[Any, _P], _T]


class CallLock(type(threading.RLock())):  # type: ignore[misc]  # C's own: its `with` takes a tenth of a microsecond
    """The lock of one optimizer. entered: whether the thread that has it is in a call that no other may interrupt."""

    entered = False


def entry(*accepted: Phase, hook: bool = False, enters: bool = True) -> Callable[[Method[_P, _T]], Method[_P, _T]]:
    """Decorate an entry point of a session: `exclusive`, `entered`, and to be called in these phases only.

    hook: whether hooks call it, hundreds of times in each iteration. enters: False where it calls code of the user's
    modules, which calls hooks.
    """

    def decorate(method: Method[_P, _T]) -> Method[_P, _T]:
        ENTRIES[method.__name__.strip("_")] = accepted
        return _holding(method, accepted, guarded=True, enters=enters, restores=not hook)

    return decorate


def shell(method: Method[_P, _T]) -> Method[_P, _T]:
    """Decorate a method of the optimizer: `exclusive`; it calls entry points, and so may hooks of user code in it."""
    return _holding(method, guarded=True, restores=True)


def hook(method: Method[_P, _T]) -> Method[_P, _T]:
    """Decorate a hook that changes which memory parameters have: `exclusive` and `entered`."""
    return _holding(method, guarded=True, enters=True)


def outer_hook(method: Method[_P, _T]) -> Method[_P, _T]:
    """Decorate a hook of one optimizer that may call others: `exclusive`."""
    return _holding(method, guarded=True)


def exclusive(method: Method[_P, _T]) -> Method[_P, _T]:
    """Decorate a method of an object with a `_lock`: it runs in one thread at a time, and to its end.

    Handlers of signals that are written in Python (Ctrl-C's, which raises KeyboardInterrupt, those of SIGTERM, SIGUSR1,
    SIGALRM and others, which may save or raise) run when the outermost such method of the main thread ends: earlier
    they could leave locks of Python and of futures locked for ever, end a change part way, or find half of one. The
    second Ctrl-C takes effect at once, in case the method hangs. Python runs no handlers in other threads.
    The method makes ordinary tensors even in torch.inference_mode, whose tensors other threads could not write to.
    """
    return _holding(method)


def _holding(
    method: Method[_P, _T],
    accepted: tuple[Phase, ...] = (),
    *,
    guarded: bool = False,
    enters: bool = False,
    restores: bool = False,
) -> Method[_P, _T]:
    """Return the method as `exclusive`.

    guarded: whether the lock is an optimizer's, and the method raises RuntimeError within a call that has `entered` it.
    enters: whether this is such a call. restores: whether the program has its handlers back when it ends; hooks leave
    ours in their place, because exchanging one takes 1.5 us.
    """

    @functools.wraps(method)
    def holding(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return holding(self, *args, **kwargs)
        if guarded and (thread.ours or thread.within):
            raise _misplaced(method)  # the lock's owner, or what it waits for, may be waiting for this thread
        outermost = thread.main and not held.inside
        try:
            if outermost:
                hold()
            lock = self._lock
            with lock:
                if guarded and lock.entered:
                    raise _misplaced(method)
                if accepted and (self.guard.lost or self.guard.phase not in accepted):
                    _check(self, method, accepted)
                if not guarded:
                    before, thread.within = thread.within, True
                    try:
                        return method(self, *args, **kwargs)
                    finally:
                        thread.within = before
                if not enters:
                    return method(self, *args, **kwargs)
                try:
                    lock.entered = True
                    return method(self, *args, **kwargs)
                finally:
                    lock.entered = False
        finally:
            if outermost:
                # Here, where Python checks for no signal: an exception as a function is called would leave it set.
                held.inside = False
                let_go(restore=restores)

    return holding


def _misplaced(method: Callable[..., Any]) -> RuntimeError:
    return RuntimeError(
        f"{method.__name__.strip('_')} was called within another call of the same optimizer, by code that Python runs "
        "between two of its lines: a callback of gc, a finalizer, a trace function, the handler of a second Ctrl-C, or "
        "a function of memory_budget= or policy= that reads weights which stream; nothing was changed; let that code "
        "take a note, and use the optimizer and its model when the call has returned"
    )


def _check(session: Any, method: Callable[..., Any], accepted: tuple[Phase, ...]) -> None:
    """Raise RuntimeError for a session that is broken, where the method does not accept that."""
    if Phase.BROKEN not in accepted:
        session.guard.check()
    assert session.guard.broken, f"{method.__name__} was called in phase {session.guard.phase.name}"


_LOAD = "build the optimizer anew, and load saved state of the model and of the optimizer"


LOST = (
    "this process is a forked child, such as a data loader's worker, and does not have the {}: its parent has pinned "
    "that memory for a GPU, and pinned pages are not copied at a fork; read it in the parent, and give the child a "
    "copy that was made before the fork, as by .clone()"
)


class Guard:
    """The lock and the phase of one optimizer.

    lock: held by the thread that calls the optimizer; several threads may run hooks at once.
    phase: of the optimizer; its session sets it.
    lost: whether this process is a forked child that lacks memory of the optimizer; it is broken then.
    steps: the number of steps that have begun to change parameters; complete: of them, the number known to have
        succeeded.
    working: objects with threads of their own. `drain`, before a fork, returns when no work of theirs is in flight;
        `after_fork` renews the threads in the child; `finish` returns when the threads have ended, before the
        interpreter does.
    """

    def __init__(self) -> None:
        self.lock = CallLock()
        self.phase = Phase.IDLE
        self.lost = False
        self.steps = self.complete = 0
        self.working: weakref.WeakSet[Any] = weakref.WeakSet()
        _guards.add(self)

    @property
    def broken(self) -> bool:
        """Whether an exception ended a change, or an update failed, so that parameters and state do not match.

        COMMITTING is such a phase where no change is running.
        """
        return self.lost or self.phase in (Phase.BROKEN, Phase.COMMITTING)

    def check(self) -> None:
        """Raise RuntimeError if a change failed part way, or in a forked child that lacks memory."""
        if self.lost:
            raise RuntimeError(LOST.format("state of this optimizer"))
        if self.broken:
            raise RuntimeError(
                f"the optimizer is in an undefined state: step {self.complete} was the last complete one, and a change "
                f"after it failed part way; {_LOAD}"
            )

    def failure(self, error: BaseException) -> RuntimeError:
        """Return the error to raise for an error in the middle of a step; from now on the phase is BROKEN."""
        self.phase = Phase.BROKEN
        cause = str(error) or type(error).__name__  # MemoryError, for one, has no text
        return RuntimeError(
            f"the optimizer step failed part way ({cause}), and step {self.complete} was the last complete one; {_LOAD}"
        )

    def change(self) -> _Change:
        """Surround a change that must not end part way, in an `exclusive` call. If it raises, all is `broken`."""
        return _Change(self)


class _Change:
    """The context of a change; of its own class, because one of `contextlib` takes twice the calls."""

    __slots__ = ("_before", "_guard")

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._before, self._guard.phase = self._guard.phase, Phase.COMMITTING

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the phase stays, by which the next call knows; a lane that failed meanwhile has set BROKEN.
        if kind is None and self._guard.phase is Phase.COMMITTING:
            self._guard.phase = self._before


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
renewed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Further objects with threads or locks of their own; a forked child inherits no threads, and calls `renew` of each."""
_forking = threading.RLock()
_held: list[Guard] = []
"""The guards whose lock the forking thread has."""


def _before_fork() -> None:
    """Wait until no thread is in a call, and nothing is in flight.

    Else a child, such as a data loader's worker, could have parameters of half a step, which no thread of the child
    completes, and locks that no thread of the child releases.
    """
    # Two threads that fork at once would each hold locks of optimizers for which the other waits: a deadlock.
    _forking.acquire()
    for guard in list(_guards):
        guard.lock.acquire()
        _held.append(guard)
    # Not before the locks are taken: a call of another thread could begin work after the drain.
    for each in all_working():
        each.drain()


def _after_fork() -> None:
    while _held:
        _held.pop().lock.release()
    _forking.release()


def _after_fork_in_child() -> None:
    _after_fork()
    # Executors of the parent have no threads here: a job that is submitted to one would wait for ever.
    for each in all_working():
        each.after_fork()
    for each in list(renewed):
        each.renew()


def all_working() -> list[Any]:
    """Return the objects with threads of their own, of all optimizers."""
    return [each for guard in list(_guards) for each in list(guard.working)]


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


main_thread = SimpleNamespace(ended=False)
"""ended: whether the main thread has ended. Executors start no more work then; other threads may run on."""


def on_own_thread() -> bool:
    """Return whether this runs on one of our threads, which would wait for itself."""
    return thread.ours


def submit(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> Future[_T]:
    """Run the work on a thread, or here where threads take no more work, as in atexit handlers.

    Then their earlier work has ended, and the work's exception is raised here; else the future has it.
    """
    if not main_thread.ended:
        return thread.submit(work)
    done: Future[_T] = Future()
    done.set_result(work())
    return done


def _finish_all() -> None:
    # First, because hooks on other threads read it: they submit nothing behind the work that is waited for below.
    main_thread.ended = True
    # The interpreter unmaps memory after this, to which copies and updates in flight would still write.
    for each in all_working():
        each.finish()


# Work in flight ends before executors shut down at the interpreter's exit. Handlers run in the reverse order of their
# registration, and the import of concurrent.futures.thread above has registered the one of executors.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]

_FOLDERS = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))


def warn(message: str) -> None:
    """Warn, and name the innermost line that is neither this package's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
