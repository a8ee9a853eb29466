"""Measures how long compute lasts with which the optimizer's transfers may overlap."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dos.devices import Mark
from dos.step.iteration import Iteration


class Pace:
    """Durations of an iteration's compute with which the optimizer's transfers can overlap.

    Times are the device's, because the host issues a backward pass in a fraction of the time that it lasts. Marks are
    read once the device has reached them, without a wait.

    forward: from the end of step() to backward, without the waits for parameters.
    backward: from the first gradient that is sent early to step(); 0 if none is.
    both: from the end of step() to its next call, whether gradients are sent early or not.
    All are without the waits for weights, and for saved tensors where the plan decides how many move.
    """

    def __init__(self) -> None:
        self.forward, self.backward, self.both = _Typical(), _Typical(), _Typical()
        self._waits: Sequence[tuple[Mark, Mark]] = ()
        """The waits in forward."""
        self._unread: deque[tuple[_Typical, _Stretch]] = deque()

    def backward_begins(
        self, iteration: Iteration, before: Iteration | None, stalls: Sequence[tuple[Mark, Mark]] = ()
    ) -> None:
        """Add the forward that ended with the first gradient.

        before: the iteration before, for whose step the caller may have waited. stalls: waits for saved tensors.
        """
        if before is not None and iteration.forward is not None and iteration.backward is not None:
            self._waits = (*before.waits[iteration.earlier :], *stalls)
            self._add(self.forward, _Stretch(iteration.forward, iteration.backward, self._waits))

    def step(self, iteration: Iteration, *, early: bool | None, stalls: Sequence[tuple[Mark, Mark]] = ()) -> None:
        """Add the backward that ended with the call of step().

        early: whether gradients that were sent early are still valid; None: the plan sends none.
        stalls: waits for saved tensors since backward began.
        """
        if early is not None and iteration.step is not None:
            departure = iteration.first_departure
            first = departure if early and departure is not None else iteration.step
            self._add(self.backward, _Stretch(first, iteration.step, stalls))
        if iteration.forward is not None and iteration.step is not None:
            self._add(self.both, _Stretch(iteration.forward, iteration.step, (*self._waits, *stalls)))
        self._waits = ()

    def read(self) -> None:
        """Read the stretches whose end the device has reached."""
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
    waits: Sequence[tuple[Mark, Mark]]

    def seconds(self) -> float | None:
        """Return the length without the waits, in seconds; None if the device has not reached all marks."""
        times = []
        for mark in (self.start, self.end, *itertools.chain.from_iterable(self.waits)):
            seconds = mark.at()
            if seconds is None:
                return None  # the device reaches later marks later
            times.append(seconds)
        start, end, *waits = times
        waited = (min(after, end) - max(before, start) for before, after in zip(waits[::2], waits[1::2], strict=True))
        return max(0.0, end - start - sum(max(0.0, seconds) for seconds in waited))


class _Typical:
    """The median of recent durations.

    Once there are REMEMBERED of them it moves by more than TOLERANCE or not at all, so that noise changes no plan.
    """

    REMEMBERED = 5
    TOLERANCE = 0.25

    def __init__(self) -> None:
        self.seconds = 0.0
        self._recent: deque[float] = deque(maxlen=self.REMEMBERED)

    def add(self, seconds: float) -> None:
        begins = len(self._recent) < self.REMEMBERED  # the first ones compile kernels, and it would stay near them
        self._recent.append(seconds)
        median = statistics.median(self._recent)
        if begins or abs(median - self.seconds) > self.TOLERANCE * self.seconds:
            self.seconds = median
