"""Measures what `step()` takes the host, and how late updates on the CPU make it, for whom the device may wait."""

from __future__ import annotations

from collections import deque

from dos.step.pace import Typical
from perfmodel.workload import NO_TIMES, HostTimes

REMEMBERED = 5
"""Backwards of which the lower quartile counts: what else holds up the host makes some longer, and none shorter."""
LEAST, SHORTEST_S = 0.2, 5e-3
"""The least part of a backward that updates must run beside, and the least that it lasts, for it to tell anything."""
MOST = 0.9
"""The most of the time beside updates that the host is late by."""
TOLERANCE = 0.1
"""The share by which a backward is longer that counts as late, and by which compute differs that is another batch's."""
NOTABLE = 0.02
"""The share by which the figure falls, or not at all: noise has few plans made."""
SPREAD = 0.5
"""The share by which what the host takes moves between reviews: other threads hold it up as they like."""


class LateHost:
    """The part of compute for which the host is busy with issuing it, by backwards in which the CPU updates.

    Beside an update all that the host does takes `HardwareProfile.slowdown` times as long, so that backward may become
    longer. One that does not shows only how large the part is at most. No such backward counts as compute: the next
    plan would leave more beside it.

    share: see `Workload.host_share`; 0 until it is known.
    """

    def __init__(self) -> None:
        self.share = self._alone_s = 0.0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._late = Typical()

    def add(self, lasted_s: float, beside_s: float, alone_s: float, slowdown: float) -> None:
        """Add a backward. beside_s: of it, in which the CPU updated. alone_s: how long one without updates lasts."""
        if abs(alone_s - self._alone_s) > TOLERANCE * self._alone_s:  # of another batch, or not known before
            self.share, self._alone_s = 0.0, alone_s
            self._recent.clear()
            self._late = Typical()
        if alone_s < SHORTEST_S or beside_s < LEAST * lasted_s:
            return
        late_s = min(max(0.0, lasted_s - alone_s), MOST * beside_s)
        share = beside_s / (beside_s - late_s) / slowdown
        self._recent.append(share)
        if share * slowdown > 1 + TOLERANCE:
            self._late.add(share)
        if len(self._recent) < REMEMBERED:
            return
        share = sorted(self._recent)[REMEMBERED // 4]
        if share * slowdown <= 1 + TOLERANCE:
            if share < (1 - NOTABLE) * self.share:
                self.share = share
        else:
            self.share = self._late.seconds


class StepTimes:
    """Seconds in which the host issues a step, by recent ones, as if no update on the CPU ran beside it.

    times: see `Workload.host`; 0 until they are known: the first steps compile kernels.
    """

    def __init__(self) -> None:
        self.times = NO_TIMES
        self._found = [Typical(SPREAD, place=2) for _ in NO_TIMES]

    def add(self, slowdown: float, *took: tuple[float, int]) -> None:
        """Add a step. slowdown: of the host. took: for each field, seconds and for how many of what that counts."""
        for found, (seconds, count) in zip(self._found, took, strict=True):
            if count:
                found.add(seconds / count / slowdown)
        self.times = HostTimes(*(each.seconds if each.count >= REMEMBERED else 0.0 for each in self._found))
