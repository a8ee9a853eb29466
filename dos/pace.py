"""How long the compute lasts beside which the optimizer's transfers may run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dos.devices import Device, Mark


class Pace:
    """For how long an iteration computes while the optimizer's transfers can run beside it.

    All of it is told by the device: the host issues a backward pass in a fraction of the time that it lasts. Marks are
    read when the device has come to them, and nothing waits for that.

    forward_s: from the end of step() to backward, without the waits for parameters.
    backward_s: from the first gradient that leaves early to step(); 0 if none does.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._forward, self._backward = _Typical(), _Typical()
        self._unread: deque[tuple[_Typical, _Stretch]] = deque()
        self._first_gradient: Mark | None = None
        self._waits: list[_Wait] = []
        self._returned: tuple[Mark, int] | None = None

    @property
    def forward_s(self) -> float:
        return self._forward.seconds

    @property
    def backward_s(self) -> float:
        return self._backward.seconds

    @property
    def exposed_s(self) -> float:
        """For how long the caller's work has stood still for the optimizer since the last step began."""
        return sum(wait.seconds_so_far() for wait in self._waits)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Surrounds what may hold the caller up: the host, or the work that it queues from then on."""
        before = self._device.mark()
        yield
        self._waits.append(_Wait(before, self._device.mark()))

    def backward_begins(self) -> None:
        """The first gradient of an iteration is there."""
        if self._returned is not None:
            then, waited_before = self._returned
            self._add(self._forward, _Stretch(then, self._device.mark(), self._waits[waited_before:]))

    def gradients_leave(self) -> None:
        """Some gradients start on their way."""
        if self._first_gradient is None:
            self._first_gradient = self._device.mark()

    def step(self, *, early: bool | None) -> None:
        """Backward is over. early: whether gradients that left before still hold; None: there were none to leave."""
        now = self._device.mark()
        if early is not None:
            first = self._first_gradient if early and self._first_gradient is not None else now
            self._add(self._backward, _Stretch(first, now, ()))
        self._waits = []

    def end_iteration(self) -> None:
        """step() returns."""
        self._first_gradient = None
        self._returned = self._device.mark(), len(self._waits)

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


class _Wait(NamedTuple):
    """The caller's work was held up between these, if the device had come to the first before the second was queued."""

    before: Mark
    after: Mark

    def seconds_so_far(self) -> float:
        before, after = self.before.at(), self.after.at()
        if before is None:
            return 0.0  # the device still has work of before
        return max(0.0, (time.perf_counter() if after is None else after) - before)


class _Stretch(NamedTuple):
    """A stretch of the caller's work, with waits in it that do not count."""

    start: Mark
    end: Mark
    waits: Sequence[_Wait]

    def seconds(self) -> float | None:
        """None: the device is not through."""
        if any(mark.at() is None for mark in (self.start, self.end, *(mark for wait in self.waits for mark in wait))):
            return None
        whole = _Wait(self.start, self.end).seconds_so_far()
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
