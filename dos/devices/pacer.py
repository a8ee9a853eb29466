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
"""Busy lanes with the host DRAM bytes/s each would cause alone -> their speeds as fractions of those alone."""

_DONE_S = 1e-6
"""Work below this many seconds counts as done; waits are not more exact than that."""


@dataclass(eq=False)
class _Ticket:
    """A place in a lane's queue."""

    urgent: bool


class Pacer:
    """Serves one piece of work per lane at a time, first come first served; lanes slow each other by `speeds`.

    Urgent work does not wait for other work: what the lane has begun of that goes on afterwards.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._changed = threading.Condition()
        self._queues: dict[Lane, deque[_Ticket]] = {lane: deque() for lane in Lane}
        self._remaining: dict[Lane, float] = {}
        self._demands: dict[Lane, float] = {}
        self._interrupted: dict[Lane, tuple[float, float]] = {}
        """What remains of the work that urgent work interrupted, and what it demands."""
        self._speed: Mapping[Lane, float] = {}
        self._advanced = 0.0

    @contextmanager
    def serve(self, lane: Lane, alone_s: float, traffic: float = 0.0, *, urgent: bool = False) -> Iterator[float]:
        """Occupy the lane while the body runs, and for at least as long as work of `alone_s` seconds takes on it.

        alone_s: seconds that the work takes when no other lane is busy. traffic: bytes that it moves through host DRAM.
        Gives the time.perf_counter() of its start.
        """
        ticket = _Ticket(urgent)
        start = self._enter(lane, ticket, alone_s, traffic / alone_s if alone_s > 0 else 0.0)
        try:
            yield start
        finally:
            self._leave(lane, ticket)

    def _enter(self, lane: Lane, ticket: _Ticket, alone_s: float, demand: float) -> float:
        with self._changed:
            queue = self._queues[lane]
            queue.insert(sum(other.urgent for other in queue) if ticket.urgent else len(queue), ticket)
            while queue[0] is not ticket:
                self._changed.wait()
            self._advance()
            if lane in self._remaining:
                self._interrupted[lane] = self._remaining[lane], self._demands[lane]
            self._remaining[lane], self._demands[lane] = alone_s, demand
            self._share()
            return self._advanced

    def _leave(self, lane: Lane, ticket: _Ticket) -> None:
        with self._changed:
            queue = self._queues[lane]
            self._advance()
            while queue[0] is not ticket or self._remaining[lane] > _DONE_S:
                self._changed.wait(self._remaining[lane] / self._speed[lane] if queue[0] is ticket else None)
                self._advance()
            del self._remaining[lane], self._demands[lane]
            queue.popleft()
            if lane in self._interrupted and not queue[0].urgent:
                self._remaining[lane], self._demands[lane] = self._interrupted.pop(lane)
            self._share()

    def _advance(self) -> None:
        """Account for the time since the last call at the speeds that held."""
        now = time.perf_counter()
        for lane, left in self._remaining.items():
            self._remaining[lane] = max(0.0, left - (now - self._advanced) * self._speed[lane])
        self._advanced = now

    def _share(self) -> None:
        """The set of busy lanes changed: new speeds, and everybody looks at the clock again."""
        self._speed = self._speeds(self._demands)
        self._changed.notify_all()
