"""What one forward saves: which of it leaves, and when it is saved and needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

from dos.activations.saved import Saved
from dos.devices import Mark
from perfmodel.workload import SavedTensors

WINDOW = 16
"""Of what a forward has saved, the part that may be on its way to the host, or back ahead of its use, at a time."""
MOST = 2 * WINDOW
"""Of such groups are plans made, two of which stay on the device."""


class Births:
    """What one forward saves, in order.

    saved: where it is, at the last place for what is saved again. sizes: in bytes.
    nbytes: of all. gone: that left. stayed: that was not to leave.
    ended: whether backward has begun to read it. leaves: whether what was saved last may leave.
    ranges: those saved, by storage, bytes of it, and version. leaving: those that the device has yet.
    marks: in the caller's work, if they are asked for: the begin of forward, and each birth; then forward's end.
    due: when backward needed it first, by its number among `sizes`.
    """

    def __init__(self, leaves: Callable[[Births], bool], *, timed: bool) -> None:
        self.saved: list[weakref.ref[Saved] | None] = []
        self.sizes: list[int] = []
        self.nbytes = 0
        self.gone = 0
        self.stayed = 0
        self.ended = False
        self.ranges: weakref.WeakValueDictionary[tuple[int, ...], Saved] = weakref.WeakValueDictionary()
        self.leaving: list[weakref.ref[Saved]] = []
        self.leaves = leaves
        self.timed = timed
        self.marks: list[Mark] = []
        self.due: dict[int, Mark] = {}

    def add(self, saved: Saved) -> None:
        """It is saved, perhaps again: backward needs it before all others so far."""
        if saved.place is None:
            saved.births, saved.number = self, len(self.sizes)
            self.sizes.append(saved.nbytes)
            self.nbytes += saved.nbytes
        else:
            self.saved[saved.place] = None
        saved.place = len(self.saved)
        self.saved.append(weakref.ref(saved))

    def before(self, saved: Saved | None = None) -> Iterator[Saved]:
        """Those that were saved before this one, or all, as far as they are needed yet, the last first."""
        for reference in reversed(self.saved[: None if saved is None else saved.place]):
            found = None if reference is None else reference()
            if found is not None:
                yield found

    @property
    def window(self) -> int:
        """Bytes that may be on their way at a time."""
        return self.nbytes // WINDOW

    @property
    def away(self) -> int:
        """Bytes that are not on the device."""
        return sum(saved.nbytes for saved in self.before() if saved.away)

    def groups(self) -> tuple[SavedTensors, ...]:
        """All of it in at most MOST groups; none if the device has not come to it all, or forward has not ended."""
        born, due = [mark.at() for mark in self.marks], {number: mark.at() for number, mark in self.due.items()}
        if None in born or None in due.values() or not due or len(born) != len(self.sizes) + 2:
            return ()
        born_at, due_at = _shares(born), dict(zip(due, _shares([*due.values()]), strict=True))
        found: list[SavedTensors] = []
        needed = nbytes = 0.0
        for number in reversed(range(len(self.sizes))):
            needed = max(needed, due_at.get(number, 0.0))
            if not found or nbytes * MOST >= self.nbytes:
                found.append(SavedTensors(0, born_at[number + 1], needed))
                nbytes = 0
            nbytes += self.sizes[number]
            found[-1] = found[-1]._replace(nbytes=int(nbytes))
        return tuple(reversed(found))


def _shares(times: Sequence[float | None]) -> list[float]:
    """Where they lie from the first to the last, from 0 to 1, in order."""
    known = [time for time in times if time is not None]
    first, last = min(known), max(known)
    return [(time - first) / (last - first) if last > first else 0.0 for time in known]
