"""What samples miss of a peak, as the allocator's counter of its highest level shows it."""

from __future__ import annotations

from typing import NamedTuple

from perfmodel import Op


class _Peak(NamedTuple):
    """left: bytes beside it, without state's. missed: bytes by which samples showed more. held: by state meanwhile."""

    left: int
    missed: int
    held: int


class MissedPeaks:
    """Corrects the low marks of an iteration's phases by peaks that no sample has seen.

    The counter shows a peak only if no earlier one was as high. So a peak that was shown counts in later iterations
    too, as much below their samples as it was then, until state holds so much more that the same peak would be shown
    again, and it is not.
    """

    def __init__(self) -> None:
        self._known: dict[Op, _Peak] = {}
        self._shown: dict[Op, tuple[int, int]] = {}
        self._held: dict[Op, int] = {}

    def sample(self, phase: Op, held: int) -> None:
        """held: bytes of state when a sample was taken."""
        self._held[phase] = min(held, self._held.get(phase, held))

    def show(self, phase: Op, left: int, held: int) -> None:
        """The counter shows a peak: what it left, without the `held` bytes of state."""
        self._shown[phase] = min((left, held), self._shown.get(phase, (left, held)))

    def corrected(self, marks: dict[Op, int]) -> dict[Op, int]:
        """The low marks of this iteration. marks: by samples alone."""
        return {phase: self._corrected(phase, mark) for phase, mark in marks.items()}

    def _corrected(self, phase: Op, mark: int) -> int:
        if phase in self._shown:
            return min(mark, self._shown[phase][0])
        known = self._known.get(phase)
        return mark if known is None else max(mark - known.missed, min(mark, known.left))

    def end_iteration(self, marks: dict[Op, int], tolerance: int) -> None:
        """marks: by samples alone. tolerance: bytes by which peaks of one kind differ."""
        for phase, mark in marks.items():
            if phase in self._shown:
                left, held = self._shown[phase]
                self._known[phase] = _Peak(left, max(0, mark - left), held)
            elif phase in self._known and self._held.get(phase, 0) > self._known[phase].held + tolerance:
                del self._known[phase]
        self._shown, self._held = {}, {}
