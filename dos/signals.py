"""Holds the program's handlers of signals back while a call of ours runs in the main thread."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of numbers, which takes microseconds
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_INT = int(signal.SIGINT)
_COMMON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD")
_ALL = tuple(sorted(map(int, signal.valid_signals())))

Handler = Callable[[int, FrameType | None], Any]


class _Held:
    """The signals that the main thread's outermost call holds back.

    inside: whether such a call runs. came: the signals that came meanwhile, in order, each once, with the program's
    handler and the frame of the first. numbers: the signals whose handlers are looked at in each call. replaced: those
    whose handlers are ours now. ended: how many such calls have ended.
    """

    def __init__(self) -> None:
        self.inside = False
        self.ended = 0
        self.came: dict[int, tuple[Handler, FrameType | None]] = {}
        self.numbers = tuple(int(getattr(signal, name)) for name in _COMMON)
        self.replaced: set[int] = set()


held = _Held()


class Thread(threading.local):
    """Facts of the present thread.

    main: whether handlers run on it. ours: whether this package has started it. within: whether it has a lock of an
    object of ours that is no optimizer, such as a device.
    """

    def __init__(self) -> None:
        present = _present_thread()
        self.main = present is threading.main_thread()
        self.ours = present.name.startswith("dos-")
        self.within = False


def _present_thread() -> threading.Thread:
    """Return the present thread, also while it starts, when a callback of gc may run that waits for its starter."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    # `threading.current_thread` would make another object for a thread that is not yet listed.
    found = frame.f_locals.get("self")
    return found if isinstance(found, threading.Thread) else threading.current_thread()


thread = Thread()


class _Later:
    """A handler in the place of the program's: within a call it remembers the signal, elsewhere it calls that."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C takes effect at once, in case the call hangs.
        if not held.inside or (number == _INT and number in held.came):
            self.handler(number, frame)
        else:
            held.came.setdefault(number, (self.handler, frame))


def hold() -> None:
    """Begin the outermost call of the main thread."""
    ended = -1
    # A handler that runs before `inside` is set may make calls of its own, whose ends put the program's handlers back.
    while ended != held.ended:
        ended, held.inside = held.ended, False
        _replace()
        held.inside = True


def _replace() -> None:
    for number in held.numbers:
        handler = _signal.getsignal(number)
        if type(handler) is not _Later and callable(handler):  # neither the system's nor one made in C
            held.replaced.add(number)
            _signal.signal(number, _Later(handler))


def look_at_all() -> None:
    """Hold rarely used signals back, too, from now on. It takes 5 us."""
    if held.inside and thread.main:
        held.numbers += tuple(n for n in _ALL if n not in held.numbers and callable(_signal.getsignal(n)))
        _replace()


def let_go(*, restore: bool) -> None:
    """End the outermost call: run the program's handlers of the signals that came. Raises what they raise.

    restore: put the program's handlers back; else they are called through ours until a call puts them back.
    """
    held.ended += 1
    try:
        for number in tuple(held.replaced) if restore else ():
            handler = _signal.getsignal(number)
            if type(handler) is _Later:  # user code may have set another one within the call
                _signal.signal(number, handler.handler)
            held.replaced.discard(number)
    finally:
        if held.came:
            _deliver()


def _deliver() -> None:
    for number in held.came:
        handler, frame = held.came.pop(number)
        try:
            handler(number, frame)
        finally:
            _deliver()  # a handler that raises hides no other signal
        return


def _after_fork_in_child() -> None:
    if not thread.main:  # the thread that forks is the child's only one, and no call of the parent's main thread ends
        thread.main, held.inside = True, False
        held.came.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
