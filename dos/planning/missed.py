"""The part of an iteration's peak that samples miss, by the allocator's counter of its highest level."""

from __future__ import annotations

from typing import NamedTuple


class _Peak(NamedTuple):
    """left: bytes beside it, without state's. missed: bytes by which samples showed more. held: by state meanwhile."""

    left: int
    missed: int
    held: int


class MissedPeaks:
    """Corrects the low mark of forward and backward by a peak that no sample has seen.

    The counter shows a peak only if no earlier one was as high. So a peak that was shown counts in later iterations
    too, as much below their samples as it was then, until state holds so much more that the same peak would be shown
    again, and it is not.
    """

    def __init__(self) -> None:
        self._known: _Peak | None = None
        self._shown: tuple[int, int] | None = None
        self._held: int | None = None

    def sample(self, held: int) -> None:
        """held: bytes of state when a sample of forward or backward was taken."""
        self._held = held if self._held is None else min(held, self._held)

    def show(self, left: int, held: int) -> None:
        """The counter shows a peak of forward or backward: what it left, without the `held` bytes of state."""
        self._shown = (left, held) if self._shown is None else min((left, held), self._shown)

    def corrected(self, mark: int) -> int:
        """The low mark of this iteration. mark: by samples alone."""
        if self._shown is not None:
            return min(mark, self._shown[0])
        return mark if self._known is None else max(mark - self._known.missed, min(mark, self._known.left))

    def end_iteration(self, mark: int, tolerance: int) -> None:
        """mark: by samples alone. tolerance: bytes by which peaks of one kind differ."""
        if self._shown is not None:
            left, held = self._shown
            self._known = _Peak(left, max(0, mark - left), held)
        elif self._known is not None and self._held is not None and self._held > self._known.held + tolerance:
            self._known = None
        self._shown = self._held = None
