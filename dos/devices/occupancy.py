"""What others take of an emulated device's memory: constant or scripted."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Occupancy = int | Callable[[], int]
"""Bytes, always the same or as they are at the call."""


@dataclass(frozen=True)
class Script:
    """Bytes that follow a script.

    points: (position, bytes) in order of position; each holds until the next.
    position: where the script is, in the unit of the points: seconds, iterations, whatever the caller counts.
    period: begin again after so much; None: the last point holds for ever.

    Raises ValueError for no point, points out of order, or bytes below 0.
    """

    points: Sequence[tuple[float, int]]
    position: Callable[[], float]
    period: float | None = None

    def __post_init__(self) -> None:
        positions = [at for at, _ in self.points]
        if not positions or positions != sorted(positions):
            raise ValueError(f"a script needs points in order of position, found positions {positions}")
        if min(nbytes for _, nbytes in self.points) < 0:
            raise ValueError("a script's bytes must be 0 or more")

    def __call__(self) -> int:
        """Bytes now."""
        at = self.position()
        if self.period is not None:
            at %= self.period
        return self.points[max(0, bisect.bisect_right(self.points, at, key=lambda point: point[0]) - 1)][1]
