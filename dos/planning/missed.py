"""The part of an iteration's peak that samples miss, by the allocator's counter of its highest level."""

from __future__ import annotations

from typing import NamedTuple


class _Peak(NamedTuple):
    """A peak. left: free bytes and state's bytes at it. missed: by how much samples had more. held: state's bytes."""

    left: int
    missed: int
    held: int


class MissedPeaks:
    """Corrects the low mark of forward and backward by a peak that no sample has seen.

    The counter reveals a peak only if no earlier one was as high. So a peak counts in later iterations, too, as much
    below their samples as it was then, until state takes so much more that the counter would reveal the same peak
    again, and does not.
    """

    def __init__(self) -> None:
        self._known: _Peak | None = None
        self._found: tuple[int, int] | None = None
        self._held: int | None = None

    def sample(self, held: int) -> None:
        """Note the bytes of state at a sample of forward or backward."""
        self._held = held if self._held is None else min(held, self._held)

    def add_peak(self, left: int, held: int) -> None:
        """Add a peak of the counter in forward or backward. left: free bytes at it, and the `held` bytes of state."""
        self._found = (left, held) if self._found is None else min((left, held), self._found)

    def corrected(self, mark: int) -> int:
        """Return the low mark of this iteration. mark: by samples alone."""
        if self._found is not None:
            return min(mark, self._found[0])
        return mark if self._known is None else max(mark - self._known.missed, min(mark, self._known.left))

    def end_iteration(self, mark: int, tolerance: int) -> None:
        """End the iteration. mark: by samples alone. tolerance: bytes by which peaks of one kind differ."""
        if self._found is not None:
            left, held = self._found
            self._known = _Peak(left, max(0, mark - left), held)
        elif self._known is not None and self._held is not None and self._held > self._known.held + tolerance:
            self._known = None
        self._found = self._held = None
