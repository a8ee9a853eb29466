"""Measures what `step()` takes the host, and how late updates on the CPU make it, for whom the device may wait."""

from __future__ import annotations

from collections import deque

from perfmodel import Placement, Plan
from perfmodel.workload import NO_TIMES, HostTimes

REMEMBERED = 5
"""Backwards of which the lower quartile counts: what else holds up the host makes some longer, and none shorter."""
LEAST, SHORTEST_S = 0.2, 5e-3
"""The least part of a backward that updates must run beside, and the least that it lasts, for it to tell anything."""
MOST = 0.9
"""The most of the time beside updates that the host is late by."""
TOLERANCE = 0.1
"""The share by which the figure moves, or not at all, so that noise changes no plan; and the compute that it is of."""
NOTABLE = 0.05
"""The share of compute by which the host is later than was known that is worth another plan: that takes it as long."""


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

    def add(self, lasted_s: float, beside_s: float, alone_s: float, slowdown: float) -> None:
        """Add a backward. beside_s: of it, in which the CPU updated. alone_s: how long one without updates lasts."""
        if abs(alone_s - self._alone_s) > TOLERANCE * self._alone_s:  # of another batch, or not known before
            self.share, self._alone_s = 0.0, alone_s
            self._recent.clear()
        if alone_s < SHORTEST_S or beside_s < LEAST * lasted_s:
            return
        late_s = min(max(0.0, lasted_s - alone_s), MOST * beside_s)
        self._recent.append(beside_s / (beside_s - late_s) / slowdown)
        if len(self._recent) < REMEMBERED:
            return
        share = sorted(self._recent)[REMEMBERED // 4]
        if share * slowdown <= 1 + TOLERANCE:
            self.share = min(self.share, share)
        elif abs(share - self.share) > TOLERANCE * self.share:
            self.share = share


class StepTimes:
    """Seconds in which the host issues a step, by recent ones, as if no update on the CPU ran beside it.

    times, share: see `Workload.host` and `Workload.host_share`; 0 until they are known.
    """

    def __init__(self) -> None:
        self.times, self.share = NO_TIMES, 0.0
        self._recent = [deque[float](maxlen=REMEMBERED) for _ in self.times]

    def add(self, slowdown: float, *took: tuple[float, int]) -> None:
        """Add a step. slowdown: of the host. took: for each field, seconds and for how many of what that counts."""
        for recent, (seconds, count) in zip(self._recent, took, strict=True):
            if count:
                recent.append(seconds / count / slowdown)

    def settle(self, plan: Plan, share: float, slowdown: float, beside_s: float, compute_s: float) -> None:
        """Let `times` and `share` be as found lately if that makes a difference: it makes another plan.

        plan: of the last step, of whose next forward the CPU updated in `beside_s`, with this slowdown of the host.
        share: as found. compute_s: seconds of forward and backward.
        """
        # Of fewer steps the first ones count, which compile kernels.
        found = HostTimes(
            *(
                sorted(recent)[REMEMBERED // 2] if len(recent) == REMEMBERED else known
                for known, recent in zip(self.times, self._recent, strict=True)
            )
        )
        counts = plan.placements.count(Placement.CPU), plan.placements.count(Placement.GPU_STREAMED)
        kept, believed = (1 / max(1.0, each * slowdown) for each in (share, self.share))
        differs_s = found.seconds(*counts) - self.times.seconds(*counts) + (believed - kept) * beside_s
        if abs(differs_s) > NOTABLE * compute_s:
            self.times, self.share = found, share
