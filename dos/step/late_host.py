"""Measures how late updates on the CPU make the host, on whose time compute on the device may wait."""

from __future__ import annotations

from collections import deque

REMEMBERED = 5
"""Backwards of which the lower quartile counts: what else holds up the host makes some longer, and none shorter."""
LEAST, SHORTEST_S = 0.2, 5e-3
"""The least part of a backward that updates must run beside, and the least that it lasts, for it to tell anything."""
TOLERANCE = 0.1
"""The share by which the figure moves, or not at all, so that noise changes no plan; and the compute that it is of."""


class LateHost:
    """The part of compute for which the host is busy with issuing it, by backwards in which the CPU updates.

    Beside an update all that the host does takes `HardwareProfile.slowdown` times as long, so that backward may become
    longer. One that does not shows only how large the part is at most. No such backward counts as compute: the next
    plan would leave more beside it.

    share: see `Workload.host_share`; 0 until it is known.
    """

    def __init__(self) -> None:
        self.share = self._alone_s = self._slowdown = 0.0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, lasted_s: float, beside_s: float, alone_s: float, slowdown: float) -> None:
        """Add a backward. beside_s: of it, in which the CPU updated. alone_s: how long one without updates lasts."""
        if abs(alone_s - self._alone_s) > TOLERANCE * self._alone_s:  # of another batch, or not known before
            self.share, self._alone_s = 0.0, alone_s
            self._recent.clear()
        if slowdown != self._slowdown:
            self._slowdown = slowdown
            self._recent.clear()
        if alone_s < SHORTEST_S or beside_s < LEAST * lasted_s:
            return
        late_s = min(max(0.0, lasted_s - alone_s), 0.9 * beside_s)
        self._recent.append(beside_s / (beside_s - late_s))
        if len(self._recent) < REMEMBERED:
            return
        longer = sorted(self._recent)[REMEMBERED // 4]
        share = longer / slowdown
        if longer <= 1 + TOLERANCE:
            self.share = min(self.share, share)
        elif abs(share - self.share) > TOLERANCE * self.share:
            self.share = share
