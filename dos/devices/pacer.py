"""Makes work take the time it would take on other hardware: lanes that slow each other down, on the wall clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from perfmodel import Lane

Speeds = Callable[[Mapping[Lane, float]], Mapping[Lane, float]]
"""Busy lanes, with the host DRAM bytes/s that each would cause alone -> speeds as fractions of the speeds alone."""

_DONE_S = 1e-6
"""Work with less than this many seconds left counts as done, because waits are not more exact."""


@dataclass(eq=False)
class _Work:
    """A place in a lane's queue.

    remaining: seconds that it still takes when no other lane is busy. demand: bytes/s of host DRAM meanwhile.
    """

    remaining: float
    demand: float
    urgent: bool
    begun: bool = False


class Pacer:
    """Serves one piece of work per lane at a time, first come first served; lanes slow each other by `speeds`.

    Urgent work interrupts other work, which continues afterwards.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._lock = threading.Lock()
        # One for each lane: a thread that was woken for nothing would hold Python's lock up for the others.
        self._changed = {lane: threading.Condition(self._lock) for lane in Lane}
        self._queues: dict[Lane, deque[_Work]] = {lane: deque() for lane in Lane}
        self._speed: Mapping[Lane, float] = {}
        self._advanced = 0.0

    @contextmanager
    def serve(self, lane: Lane, alone_s: float, traffic: float = 0.0, *, urgent: bool = False) -> Iterator[float]:
        """Occupy the lane while the body runs, and for at least as long as work of `alone_s` seconds takes on it.

        alone_s: seconds that the work takes when no other lane is busy. traffic: bytes that it moves through host DRAM.
        Yields the time.perf_counter() of its start.
        """
        work = _Work(alone_s, traffic / alone_s if alone_s > 0 else 0.0, urgent)
        start = self._enter(lane, work)
        try:
            yield start
        finally:
            self._leave(lane, work)

    def _enter(self, lane: Lane, work: _Work) -> float:
        with self._lock:
            queue = self._queues[lane]
            self._advance()  # urgent work may take the place of the work that is being served
            queue.insert(sum(other.urgent for other in queue) if work.urgent else len(queue), work)
            while queue[0] is not work:
                self._changed[lane].wait()
            self._advance()
            work.begun = True
            self._share()
            return self._advanced

    def _leave(self, lane: Lane, work: _Work) -> None:
        with self._lock:
            queue = self._queues[lane]
            self._advance()
            # Urgent work may have taken the first place meanwhile, and this work continues after it.
            while queue[0] is not work or work.remaining > _DONE_S:
                self._changed[lane].wait(work.remaining / self._speed[lane] if queue[0] is work else None)
                self._advance()
            queue.popleft()
            self._changed[lane].notify_all()
            self._share()

    def _served(self) -> dict[Lane, _Work]:
        return {lane: queue[0] for lane, queue in self._queues.items() if queue and queue[0].begun}

    def _advance(self) -> None:
        """Account for the time since the last call at the speeds that held."""
        now = time.perf_counter()
        for lane, work in self._served().items():
            work.remaining = max(0.0, work.remaining - (now - self._advanced) * self._speed[lane])
        self._advanced = now

    def _share(self) -> None:
        """Compute the speeds of another set of busy lanes, and wake the threads whose work takes another time now."""
        before, self._speed = self._speed, self._speeds({lane: work.demand for lane, work in self._served().items()})
        for lane, speed in self._speed.items():
            if speed != before.get(lane):
                self._changed[lane].notify_all()
