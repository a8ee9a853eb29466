"""How long the compute lasts beside which the optimizer's transfers may run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dos.devices import Mark
from dos.step.iteration import Iteration, Wait


class Pace:
    """For how long an iteration computes while the optimizer's transfers can run beside it.

    All of it is told by the device: the host issues a backward pass in a fraction of the time that it lasts. Marks are
    read when the device has come to them, and nothing waits for that.

    forward_s: from the end of step() to backward, without the waits for parameters.
    backward_s: from the first gradient that leaves early to step(); 0 if none does.
    """

    def __init__(self) -> None:
        self._forward, self._backward = _Typical(), _Typical()
        self._unread: deque[tuple[_Typical, _Stretch]] = deque()

    @property
    def forward_s(self) -> float:
        return self._forward.seconds

    @property
    def backward_s(self) -> float:
        return self._backward.seconds

    def backward_begins(self, iteration: Iteration, before: Iteration | None) -> None:
        """The first gradient is there. before: the iteration before, for whose step the caller may have waited."""
        if before is not None and iteration.forward is not None and iteration.backward is not None:
            waits = before.waits[iteration.earlier :]
            self._add(self._forward, _Stretch(iteration.forward, iteration.backward, waits))

    def step(self, iteration: Iteration, *, early: bool | None) -> None:
        """Backward is over. early: whether gradients that left before still hold; None: there were none to leave."""
        if early is not None and iteration.step is not None:
            first = iteration.left if early and iteration.left is not None else iteration.step
            self._add(self._backward, _Stretch(first, iteration.step, ()))

    def read(self) -> None:
        """Learn from what the device has come to."""
        while self._unread:
            typical, stretch = self._unread[0]
            seconds = stretch.seconds()
            if seconds is None:
                return
            self._unread.popleft()
            typical.add(seconds)

    def _add(self, typical: _Typical, stretch: _Stretch) -> None:
        self._unread.append((typical, stretch))
        self.read()


class _Stretch(NamedTuple):
    """A stretch of the caller's work, with waits in it that do not count."""

    start: Mark
    end: Mark
    waits: Sequence[Wait]

    def seconds(self) -> float | None:
        """None: the device is not through."""
        if any(mark.at() is None for mark in (self.start, self.end, *(mark for wait in self.waits for mark in wait))):
            return None
        whole = Wait(self.start, self.end).seconds_so_far()
        return max(0.0, whole - sum(wait.seconds_so_far() for wait in self.waits))


class _Typical:
    """The median of recent durations; it moves by more than TOLERANCE or not at all, so that noise changes no plan."""

    REMEMBERED = 5
    TOLERANCE = 0.25

    def __init__(self) -> None:
        self.seconds = 0.0
        self._recent: deque[float] = deque(maxlen=self.REMEMBERED)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        median = statistics.median(self._recent)
        if abs(median - self.seconds) > self.TOLERANCE * self.seconds:
            self.seconds = median
