"""What orders threads: jobs, their results, monitors, starts and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
from torch.utils._python_dispatch import _push_mode

from dos.kernels.update import Arrivals as PlainArrivals
from dos.kernels.update import Order as Plain
from dos.step import turns
from tests.support.races.checker import OURS, Checker, Mode, here
from tests.support.races.names import places_now
from tests.support.races.shadow import Clock


class Arrivals:
    """Who takes comes behind all who have handed over, and who waits for all behind what has ended."""

    def __init__(self, query: int) -> None:
        self._arrivals = PlainArrivals(query)
        self._clock: Clock = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrivals, name)

    def give(self, *arguments: Any) -> None:
        self._send()
        self._arrivals.give(*arguments)

    def end(self) -> None:
        self._send()
        self._arrivals.end()

    def take(self) -> tuple[int, int]:
        found = self._arrivals.take()
        self._receive()
        return found

    def wait(self, seconds: float) -> bool:
        ended = self._arrivals.wait(seconds)
        self._receive()
        return ended

    def _receive(self) -> None:
        if Checker.active is not None:
            Checker.active.this.receive(self._clock)

    def _send(self) -> None:
        if Checker.active is not None:
            merged = dict(Checker.active.this.send())
            for number, time in self._clock.items():
                merged[number] = max(time, merged.get(number, 0))
            self._clock = merged


class Order:
    """Who enters comes behind all who have left."""

    def __init__(self) -> None:
        self._order = Plain()
        self._clock: Clock = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def enter(self, place: int) -> None:
        self._order.enter(place)
        if Checker.active is not None:
            Checker.active.this.receive(self._clock)

    def leave(self, place: int) -> None:
        self.enter(place)
        if Checker.active is not None:
            self._clock = Checker.active.this.send()
        self._order.leave(place)


def watch_thread() -> None:
    """Let operations of torch in this thread be told of, for good; not by `with`, which sets flags of the process."""
    if not here.watched:
        here.watched = True
        _push_mode(Mode())


def patch_threads(patch: pytest.MonkeyPatch) -> None:
    """What orders threads."""
    set_result, set_exception = Future.set_result, Future.set_exception
    result, exception, submit = Future.result, Future.exception, ThreadPoolExecutor.submit
    start, join = threading.Thread.start, threading.Thread.join

    def answering(plain: Callable[..., None]) -> Callable[..., None]:
        def answer(self: Any, answer: Any) -> None:
            if Checker.active is not None:
                self.__dict__.setdefault("_clock", Checker.active.this.send())
            plain(self, answer)

        return answer

    def waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, timeout: float | None = None) -> Any:
            try:
                return plain(self, timeout)
            finally:
                if Checker.active is not None:
                    Checker.active.receive(getattr(self, "_clock", None))

        return wait

    def submitting(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        checker = Checker.active
        if checker is None:
            return submit(self, function, *args, **kwargs)
        actor = checker.of(self)
        number = next(checker.numbers)
        checker.jobs = max(checker.jobs, number)
        sent, places, what = checker.this.send(), places_now(), here.what
        if here.sends is not None:
            checker._unused[number] = []
            checker._sent[number] = [each for each in map(checker.range_of, here.sends) if each is not None]

        def run() -> Any:
            if Checker.active is not checker:
                return function(*args, **kwargs)
            watch_thread()
            here.checker, here.actor, here.ours = checker, actor, actor.name.startswith(OURS)
            here.job, here.what, here.places = number, what, places
            actor.receive(sent)
            return function(*args, **kwargs)

        future = submit(self, run)
        future._number = number  # type: ignore[attr-defined]
        return future

    def starting(self: Any) -> None:
        checker = Checker.active
        if checker is not None and not self.name.startswith(OURS):
            sent, run = checker.this.send(), self.run

            def running() -> None:
                if Checker.active is not checker:
                    return run()
                checker.this.receive(sent)
                watch_thread()
                try:
                    run()
                finally:
                    self._clock = checker.this.send()

            self.run = running
        start(self)

    def joining(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if Checker.active is not None and not self.is_alive():
            Checker.active.receive(getattr(self, "_clock", None))

    patch.setattr(Future, "set_result", answering(set_result))
    patch.setattr(Future, "set_exception", answering(set_exception))
    patch.setattr(Future, "result", waiting(result))
    patch.setattr(Future, "exception", waiting(exception))
    patch.setattr(ThreadPoolExecutor, "submit", submitting)
    patch.setattr(threading.Thread, "start", starting)
    patch.setattr(threading.Thread, "join", joining)
    patch.setattr(turns, "Arrivals", Arrivals)
    patch.setattr(turns, "Order", Order)
