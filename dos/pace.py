"""How long the compute lasts beside which the optimizer's transfers may run."""

from __future__ import annotations

import statistics
import time
from collections import deque


class Pace:
    """For how long an iteration computes while the optimizer's transfers can run beside it.

    forward_s: from the return of step() to backward, without the waits for parameters.
    backward_s: from the first gradient that leaves early to step(); 0 if none does.
    """

    def __init__(self) -> None:
        self._forward, self._backward = _Typical(), _Typical()
        self._first_gradient: float | None = None
        self._returned: tuple[float, float] | None = None

    @property
    def forward_s(self) -> float:
        return self._forward.seconds

    @property
    def backward_s(self) -> float:
        return self._backward.seconds

    def backward_begins(self, waited_s: float) -> None:
        """The first gradient of an iteration is there. waited_s: for the optimizer since the last step began."""
        if self._returned is not None:
            then, waited_before = self._returned
            self._forward.add(max(0.0, time.perf_counter() - then - (waited_s - waited_before)))

    def gradients_leave(self) -> None:
        """Some gradients start on their way."""
        if self._first_gradient is None:
            self._first_gradient = time.perf_counter()

    def step(self, *, early: bool) -> None:
        """Backward is over. early: whether gradients that left before still hold."""
        first = self._first_gradient
        self._backward.add(time.perf_counter() - first if early and first is not None else 0.0)

    def end_iteration(self, waited_s: float) -> None:
        """step() returns, having waited for so long."""
        self._first_gradient = None
        self._returned = time.perf_counter(), waited_s


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
