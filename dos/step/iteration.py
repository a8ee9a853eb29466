"""The facts of one iteration, in one object that begins when a step returns and ends when the next one does."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dos.devices import Device, Job, Mark
from perfmodel import Lane, Op, Plan, Span, Workload


class Wait(NamedTuple):
    """A stretch in which the caller may have waited.

    It counts from when the device reached `before`; as 0 while the device has not reached it.
    """

    before: Mark
    after: Mark

    def seconds_so_far(self) -> float:
        """For how long, until now if it is not over."""
        before, after = self.before.at(), self.after.at()
        if before is None:
            return 0.0  # the device still has work of before
        return max(0.0, (time.perf_counter() if after is None else after) - before)


class Iteration:
    """A forward, all backward passes after it, and the step.

    forward: where the step before returned; backward: the first gradient; first_departure: the first that left for the
        host; step: the call of step(). All in the caller's work; None: it has not come there.
    gradients: how often backward has made one. travels: whether gradients change after its hooks.
    issued: the plan of the step. started: when `step()` prepared it, on the clock of time.perf_counter.
    alone: whether nothing else than the step's own work, all of which is measured, slows it down: the profile learns.
    workload: for which the last plan was made. withheld: see MemoryMonitor, at that time.
    waits: of the caller, for this iteration's step.
    saved: bytes of saved tensors that left in the last forward, and of all that may; None: they were not asked to.
    moves: transfers of saved tensors, which a step that has ended has read into `moved`.
    earlier: how many there were for the step before when that returned.
    following: the iteration after this one, once that has begun.
    """

    def __init__(self, device: Device, before: Iteration | None = None) -> None:
        self._device = device
        self.forward: Mark | None = None
        self.backward: Mark | None = None
        self.first_departure: Mark | None = None
        self.step: Mark | None = None
        self.started = 0.0
        self.gradients = 0
        self.travels = False
        self.issued: Plan | None = None
        self.alone = True
        self.workload: Workload | None = None
        self.withheld: tuple[tuple[int, str], ...] = ()
        self.waits: list[Wait] = []
        self.saved: tuple[int, int] | None = None
        self.moves: deque[Job] = deque()
        self.moved: tuple[Span, ...] = ()
        self.earlier = 0
        self.following: Iteration | None = None
        if before is not None:
            self.earlier = len(before.waits)
            self.forward = device.mark()
            if before.step is not None:  # skipped ones, of which there may be many, make no chain
                before.following = self

    @property
    def exposed_s(self) -> float:
        """For how long the caller's work has stood still for this iteration's step."""
        return sum(wait.seconds_so_far() for wait in self.waits)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Surrounds what may hold the caller up: the host, or the work that it queues from then on."""
        before = self._device.mark()
        yield
        self.waits.append(Wait(before, self._device.mark()))

    def read_moves(self) -> None:
        """See when saved tensors left and came back, which they have. The jobs go, with the memory that they hold.

        Those that failed are left out: backward has said so.
        """
        while self.moves:
            with contextlib.suppress(Exception):
                self.moved += (dataclasses.replace(self.moves.popleft().wait(), subgroup=None),)

    def spans(self, origin: float) -> tuple[Span, ...]:
        """Forward and backward, and the forward of the iteration that follows, in seconds since `origin`.

        origin: when the step began, on the clock of time.perf_counter.
        Forward has in it what the caller does besides, such as loading data, and backward all micro-batches after the
        first. Left out is that of which the device has not come to the end, or no gradient's hook told it.
        """
        after = None if self.following is None else self.following.forward
        ends = None if self.following is None else self.following.backward
        found = []
        for op, start, end in (
            (Op.FORWARD, self.forward, self.backward),
            (Op.BACKWARD, self.backward, self.step),
            (Op.FORWARD, after, ends),
        ):
            first, last = (None if mark is None else mark.at() for mark in (start, end))
            if first is not None and last is not None:
                # The host may call step() after the device has ended backward: by the mark alone a gap would lie before
                # the step.
                last = origin if op is Op.BACKWARD else last
                found.append(Span(Lane.GPU, op, None, first - origin, max(first, last) - origin))
        return tuple(found)
