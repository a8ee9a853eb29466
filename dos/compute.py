"""When forward and backward ran, as far as the optimizer sees: for the trace, nothing depends on it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from dos.devices import Device, Job
from perfmodel import Lane, Op, Span

Iteration = list[tuple[Op, float, Sequence[Job]]]
"""What began in it, when the caller came there, and what it had queued on the device by then."""


class Compute:
    """Forward from the return of step() to the first gradient, and backward from there to step().

    Forward has in it what the caller does besides, such as loading data, and backward all
    micro-batches after the first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Iteration = []
        self._now: Iteration = []

    @property
    def iteration(self) -> Iteration:
        """The running one; its end, and that of the forward after it, are added when they come."""
        return self._now

    def backward_begins(self) -> None:
        """The first gradient of an iteration is there."""
        begin = Op.BACKWARD, time.perf_counter(), self._device.fence()
        if self._last and self._last[-1][0] is Op.FORWARD:
            self._last.append(begin)
        self._now.append(begin)

    def forward_begins(self) -> None:
        """step() returns."""
        begin = Op.FORWARD, time.perf_counter(), self._device.fence()
        self._now.append(begin)
        self._last, self._now = self._now, [begin]


def spans(iteration: Iteration, step: float) -> tuple[Span, ...]:
    """Forward, backward and the next forward, in seconds since `step`.

    step: on the clock of time.perf_counter. A forward of which no gradient's hook told the end is left
    out. Waits for the device to come to the last of them.
    """
    begun = [(op, max([at, *(job.wait().end for job in queued)]) - step) for op, at, queued in iteration]
    found = []
    for (op, start), (following, end) in itertools.pairwise(begun):
        if op is Op.BACKWARD:
            found.append(Span(Lane.GPU, op, None, start, max(start, min(end, 0.0))))
        elif following is Op.BACKWARD:
            found.append(Span(Lane.GPU, op, None, start, end))
    return tuple(found)
