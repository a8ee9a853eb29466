"""The facts of one iteration, in one object that begins when a step returns and ends when the next one does."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dos.devices import Device, Job, Mark
from perfmodel import Lane, Op, Plan, Span, Workload


class Wait(NamedTuple):
    """A stretch in which the caller may have waited.

    It lasts from when the device reaches `before`; its length is 0 until then.
    """

    before: Mark
    after: Mark

    def so_far(self) -> tuple[float, float] | None:
        """Return its begin and end on the clock of time.perf_counter; the end is now if the device has not reached it.

        None if the device has not reached its begin, because of earlier work.
        """
        before, after = self.before.at(), self.after.at()
        return None if before is None else (before, time.perf_counter() if after is None else after)


class Iteration:
    """A forward, all backward passes after it, and the step.

    forward: marks the return of the step before; backward: the first gradient; first_departure: the first gradient that
        was sent to the host; step: the call of step(). Marks in the caller's work; None: it has not come there.
    gradients: the number of gradients that backward has written. left: of them, those that stay in `p.grad` until the
        step. several_ranks: whether other ranks may change them after its hooks.
    issued: the plan of the step. started: when `step()` prepared it, on the clock of time.perf_counter.
    began, first: when the step before returned, and when backward wrote the first gradient, likewise; 0: not known.
    blocked: from when to when the host waited for this iteration's step, likewise.
    alone: whether only the step's own work, all of which is measured, ran beside it, so that the profile can learn.
    workload: the one for which the last plan was made. withheld: see MemoryMonitor, at that time.
    waits: the caller's, for this iteration's step.
    saved: bytes of saved tensors that moved in the last forward, and of all that may move; None: not asked for.
    moves: transfers of saved tensors, until `read_moves` reads them into `moved`.
    earlier: the number of waits for the step before when that returned.
    following: the iteration after this one, once that has begun.
    """

    def __init__(self, device: Device, before: Iteration | None = None) -> None:
        self._device = device
        self.forward: Mark | None = None
        self.backward: Mark | None = None
        self.first_departure: Mark | None = None
        self.step: Mark | None = None
        self.began, self.first, self.started = time.perf_counter(), 0.0, 0.0
        self.blocked: list[tuple[float, float]] = []
        self.gradients = self.left = 0
        self.several_ranks = False
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
            if before.step is not None:  # skipped iterations, which may be many, must form no chain
                before.following = self

    @property
    def exposed_s(self) -> float:
        """Seconds for which the caller's work has waited for this iteration's step, and for weights that it fetched."""
        return self.waited_s(-math.inf, math.inf)

    def waited_s(self, since: float, until: float) -> float:
        """Return the part of `exposed_s` between two times on the clock of time.perf_counter.

        Waits that overlap, as where a wait for weights includes one for their update, count once.
        """
        found = 0.0
        for begin, end in sorted(each for wait in self.waits if (each := wait.so_far()) is not None):
            end = min(end, until)
            found += max(0.0, end - max(begin, since))
            since = max(since, end)
        return found

    def blocked_s(self, since: float, until: float) -> float:
        """Return the seconds for which the host was blocked, of waits that began between two times on that clock."""
        return sum(end - begin for begin, end in self.blocked if since <= begin < until)

    @contextmanager
    def held_up(self, since: Mark | None = None) -> Iterator[None]:
        """Surround a wait of the caller's thread, or of the work that it queues from then on.

        since: a mark behind which the caller has queued no work of its own; None: there is none.
        """
        before, began = since or self._device.mark(), time.perf_counter()
        yield
        self.blocked.append((began, time.perf_counter()))
        self.waits.append(Wait(before, self._device.mark()))

    def read_moves(self) -> None:
        """Read when saved tensors moved, and release the jobs with the memory to which they refer.

        All must have ended. Failed jobs are left out, because backward has raised their exceptions.
        """
        # Jobs are taken out one by one, because each refers to host memory of the pool, which may be resized after.
        while self.moves:
            with contextlib.suppress(Exception):
                self.moved += (dataclasses.replace(self.moves.popleft().wait(), subgroup=None),)

    def spans(self, origin: float) -> tuple[Span, ...]:
        """Return the spans of forward and backward, and of the next iteration's forward, in seconds since `origin`.

        origin: when the step began, on the clock of time.perf_counter.
        Forward includes other work of the caller, such as loading data, and backward all micro-batches after the first.
        A span is left out if the device has not reached its end, or no gradient's hook has marked it.
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
                # The host may call step() after the device has ended backward: until the step, lest a gap be shown.
                last = origin if op is Op.BACKWARD else last
                found.append(Span(Lane.GPU, op, None, first - origin, max(first, last) - origin))
        return tuple(found)
