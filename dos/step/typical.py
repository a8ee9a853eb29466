"""A figure that is measured again and again, and that plans follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


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
