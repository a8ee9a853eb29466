"""Measures how long compute lasts with which the optimizer's transfers may overlap."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from dos.devices import Mark
from dos.devices.base import Moment
from dos.step.iteration import Iteration

FIRST_CLEAN = 2
"""Steps before the first forward with nothing beside it: the very first ones compile kernels."""
AGAIN, LAST = 16, 1024
"""Steps until the next such forward; twice as many each time, up to the last number."""
CLEANS = 3
"""The number of these forwards that are remembered."""


class Pace:
    """Durations of an iteration's compute with which the optimizer's transfers can overlap.

    Times are the device's, because the host issues a backward pass in a fraction of the time that it lasts. Marks are
    read once the device has reached them, without a wait.

    forward: from the end of step() to backward, without the waits for parameters.
    backward: from the first gradient that is sent early to step(); 0 if none is.
    ahead: from when the host begins to issue the step until the device has ended backward: 0 if that is sooner.
    rest: from the first gradient to step(), further micro-batches included, whether gradients are sent early or not.
    updated: from the first gradient of a backward in which updates run until step() has returned, however late the host
        is; what is issued there keeps it, and a device that has waited for it is idle during step().
    All are without the waits for weights, and for saved tensors where the plan decides how many move.
    late_s: the seconds for which the device waited for the host in the last forward: by which that lasted longer than
        `forward`.

    A device that queues work waits for the host where that is late: after it has waited for an update, or is slowed by
    the threads that move state. The plan decides for how long, so that such a forward must not count as compute: the
    next plan would leave more work beside it. Hence a forward counts as no longer than one with nothing beside it
    (`wants_clean`), nor than the backward behind it. A backward in which updates run counts as no longer than by its
    forward, as those of an iteration with nothing beside either (`holds`) are to one another, or than the backward of
    that one. Predictions go by `updated`.

    holds: whether the backward that runs should have no updates beside it.
    """

    def __init__(self, *, queues: bool = True) -> None:
        """queues: whether the device queues work, so that it may wait for the host."""
        self.forward, self.backward, self.rest, self.ahead = (Typical() for _ in range(4))
        self.updated = Typical(tolerance=0.0)  # no plan follows from it
        self.late_s = 0.0
        self._queues = queues
        self._last: _Forward | None = None
        """The forward before the backward that runs, once it was read."""
        self._cleans: deque[float] = deque(maxlen=CLEANS)
        """The last forwards with nothing beside them, of which the shortest counts: user code may evaluate in one."""
        self._backward_over_forward = self._clean_backward_s = 0.0
        """Of an iteration with nothing beside either; 0: not known."""
        self._until_step_s: float | None = None
        """From the first gradient to step() in the last backward, in which updates ran; None: none did."""
        self._clean_next = self._early = self.holds = False
        self._updating = 0
        """Backwards in which updates ran."""
        self._steps, self._due, self._between = 0, FIRST_CLEAN, AGAIN
        self._unread: deque[tuple[Callable[[float], None], _Stretch]] = deque()

    def backward_begins(
        self, iteration: Iteration, before: Iteration | None, stalls: Sequence[tuple[Mark, Mark]] = ()
    ) -> None:
        """Add the forward that ended with the first gradient.

        before: the iteration before, for whose step the caller may have waited. stalls: waits for saved tensors.
        """
        # Not later: where updates have released gradients for long, state takes the memory that all of them would need.
        self.holds = self._clean_next and not self._backward_over_forward and self._updating <= 1
        clean, self._clean_next = self._clean_next or not self._queues, False
        if before is not None and before.step is not None and iteration.forward is not None:
            self._add(self._step_returned, _Stretch(before.step, iteration.forward, ()))
        if before is not None and iteration.forward is not None and iteration.backward is not None:
            waits = (*before.waits[iteration.earlier :], *stalls)
            stretch = _Stretch(iteration.forward, iteration.backward, waits)
            self._add(lambda seconds: self._forward_lasted(_Forward(seconds, clean)), stretch)

    def step(
        self,
        iteration: Iteration,
        *,
        early: bool | None,
        stalls: Sequence[tuple[Mark, Mark]] = (),
        issued: float | None = None,
    ) -> None:
        """Add the backward that ended with the call of step().

        issued: when the host began to issue the step, by time.perf_counter; None: backward has issued it.
        early: whether gradients that were sent early are still valid; None: the plan sends none.
        stalls: waits for saved tensors since backward began.
        """
        self._steps += 1
        if self._queues and issued is not None and iteration.step is not None:
            ahead = _Stretch(Moment(issued), iteration.step, ())
            self._add(lambda seconds: self.ahead.add(seconds, self.rest.seconds / 2), ahead)
        if early is not None and iteration.step is not None:
            departure = iteration.first_departure
            first = departure if early and departure is not None else iteration.step
            # Steps before which no gradient was sent early, as the first ones are, say nothing of how long it lasts.
            lasted = self.backward.restart if early and not self._early else self.backward.add
            self._early = bool(early)
            self._add(lasted, _Stretch(first, iteration.step, stalls))
        if iteration.backward is not None and iteration.step is not None:
            updates = issued is None
            self._updating += updates
            stretch = _Stretch(iteration.backward, iteration.step, stalls)
            self._add(lambda seconds: self._rest_lasted(seconds, updates), stretch)

    def wants_clean(self) -> bool:
        """Return whether the next forward should run with nothing beside it; if so, it counts as such a forward.

        One of the first does, and others from time to time, ever more rarely.
        """
        if not self._queues or self._steps < self._due:
            return False
        self._clean_next = True
        if self._cleans:
            self._between = min(2 * self._between, LAST)
        self._due = self._steps + self._between
        return True

    def read(self) -> None:
        """Read the stretches whose end the device has reached."""
        while self._unread:
            lasted, stretch = self._unread[0]
            seconds = stretch.seconds()
            if seconds is None:
                return
            self._unread.popleft()
            lasted(seconds)

    def _add(self, lasted: Callable[[float], None], stretch: _Stretch) -> None:
        self._unread.append((lasted, stretch))
        self.read()

    def _forward_lasted(self, forward: _Forward) -> None:
        if not self._queues:
            self.forward.add(forward.seconds)
            return
        self._last = forward
        if forward.clean:
            self._cleans.append(forward.seconds)
            before, shortest = self.forward.seconds, min(self._cleans)
            lasting = len(self._cleans) == 1 or abs(shortest - before) > Typical.TOLERANCE * before
            (self.forward.restart if lasting else self.forward.add)(shortest)
            if abs(forward.seconds - before) > Typical.TOLERANCE * before:
                # The batch has changed, or user code did something else in this forward or the one before: see soon.
                self._between, self._due = AGAIN, min(self._due, self._steps + AGAIN)

    def _step_returned(self, seconds: float) -> None:
        """seconds: from the call of a step to its return, on the device."""
        if self._until_step_s is not None:
            self.updated.add(self._until_step_s + seconds)
        self._until_step_s = None

    @property
    def late_in_backward_s(self) -> float:
        """Seconds by which `updated` is longer than `rest`; below 0 where that is out of date."""
        return self.updated.seconds - self.rest.seconds if self.updated.known else 0.0

    def _rest_lasted(self, seconds: float, updates: bool) -> None:
        """updates: whether updates ran in it."""
        self._until_step_s = seconds if updates else None
        if updates and self._backward_over_forward:
            # The host may have stretched the one forward by which others are judged.
            most = max(self._backward_over_forward * self.forward.seconds, self._clean_backward_s)
            seconds = min(seconds, most)
        self.rest.add(seconds)
        forward, self._last = self._last, None
        if forward is None:
            return
        if self._queues and forward.clean and forward.seconds and not updates:
            if not self._backward_over_forward:
                self.rest.restart(seconds)
            self._backward_over_forward, self._clean_backward_s = seconds / forward.seconds, seconds
        if not forward.clean:
            self.forward.add(min(forward.seconds, min(self._cleans) if self._cleans else seconds))
        self.late_s = max(0.0, forward.seconds - self.forward.seconds)


class _Forward(NamedTuple):
    """A forward. clean: with nothing beside it."""

    seconds: float
    clean: bool


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
        found = end - start
        for before, after in zip(waits[::2], waits[1::2], strict=True):
            found -= max(0.0, min(after, end) - max(before, start))
        return max(0.0, found)


class Typical:
    """The lower quartile of durations: what holds up the host makes some longer, and none shorter.

    It is found anew at REVIEWS of them, from all that there are. Of the first ones, which compile kernels, it moves by
    more than EARLY; later, where that of the last REMEMBERED differs by more than a tolerance, it is that, and those
    before are forgotten. So noise has few plans made, and none after the last review.

    known: whether any was added. place: a quartile's, 4, or that of the median, 2.
    """

    REMEMBERED = 5
    REVIEWS = 5, 10, 20, 40
    TOLERANCE = 0.25
    EARLY = 0.05

    def __init__(self, tolerance: float = TOLERANCE, place: int = 4) -> None:
        self.seconds, self.known = 0.0, False
        self._tolerance, self._place = tolerance, place
        self._all = deque[float](maxlen=self.REVIEWS[-1])
        self.count = 0

    def add(self, seconds: float, reference: float = 0.0) -> None:
        """Add a duration. reference: a longer one, against which differences count, if not against its own."""
        self._all.append(seconds)
        self.known = True
        self.count += 1
        last = list(self._all)[-self.REMEMBERED :]
        if self.count > self.REMEMBERED and self._moves(last, self._tolerance * (reference or self.seconds)):
            self._all, self.count = deque(last, self.REVIEWS[-1]), self.REMEMBERED
        elif self.count < self.REMEMBERED:
            self._moves(self._all, self.EARLY * (reference or self.seconds))
        elif self.count in self.REVIEWS:
            self._moves(self._all, 0.0)

    def _moves(self, some: Collection[float], tolerance: float) -> bool:
        """Let the figure be that of some durations, if it differs by more than the tolerance; return whether it did."""
        found = sorted(some)[len(some) // self._place]
        differs = abs(found - self.seconds) > tolerance
        if differs:
            self.seconds = found
        return differs

    def restart(self, seconds: float) -> None:
        """Forget all durations but this one."""
        self._all.clear()
        self.count = 0
        self.add(seconds)
