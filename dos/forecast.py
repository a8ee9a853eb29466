"""How much device memory optimizer state may use: low-water marks, and what they say of the next iteration."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from perfmodel import Op

REMEMBERED = 4
"""Iterations over which a low-water mark counts; memory that came free is trusted after as many."""
REMEMBERED_AFTER_FAILURE = 100
"""Iterations over which one counts from which the user's own code ran out of memory."""
MARGIN = 0.02
"""Share of the device's memory that is left alone."""


class Room(NamedTuple):
    """Bytes of device memory for optimizer state.

    resident: at the peak of the iteration. update: while updating; residents and slots share it.
    """

    resident: int
    update: int


class Forecast:
    """What was free in each phase of recent iterations, and what that leaves for optimizer state in the next one.

    All is measured as what optimizer state could have used: free bytes, and what it held itself.

    - The lowest mark of the last REMEMBERED iterations counts, so memory that came free is used some iterations later.
    - A low mark in the update now, less what an iteration usually takes beyond its update, counts at once: what a
      neighbour has taken is given back before the next peak. So does the next low of marks that fall steadily.
    - The margin is MARGIN of the device, and more while memory runs short: a neighbour that waits for more takes all
      that is free, so nearly nothing free means that it wants more. Each such iteration doubles the margin; each with
      all of MARGIN free, so that nobody waits for memory, halves what was added.
    - Where an allocation fails although the figures have room for it (they lie, or what is free is in pieces), what did
      fit is the most for REMEMBERED iterations, and for twice as many each time that trying again fails.
    """

    def __init__(self) -> None:
        self._marks: deque[dict[Op, int]] = deque(maxlen=REMEMBERED)
        self._now: dict[Op, int] = {}
        self._falls: deque[int] = deque(maxlen=REMEMBERED)
        self._backward: _Fall | None = None
        self._late: _Fall | None = None
        self._total = 0
        self._extra = 0
        self._least_free: int | None = None
        self._held = 0
        self._failed_at: int | None = None
        self._fits: tuple[int, int] | None = None
        self._patience = REMEMBERED
        self._lasting: tuple[int, int] | None = None
        self._watch_for_lasting = False

    @property
    def margin(self) -> int:
        """Bytes that are left alone now."""
        return int(MARGIN * self._total) + self._extra

    def sample(self, phase: Op, free: int, held: int, total: int, *, late: bool = False) -> None:
        """free: bytes, as measured in this phase. held: bytes of the device's `total` that optimizer state had.

        late: whether this is the second half of backward.
        """
        self._total = total
        if phase is Op.BACKWARD:
            self._backward = _Fall.of(self._backward, free + held)
        if late:
            self._late = _Fall.of(self._late, free + held)
        self._now[phase] = min(free + held, self._now.get(phase, free + held))
        if self._least_free is None or free < self._least_free:
            self._least_free, self._held = free, held

    def allocation_failed(self, held: int) -> None:
        """An allocation for which there was room by these figures has failed beside `held` bytes of state."""
        self._failed_at = held

    def ran_out(self, held: int) -> None:
        """The user's own code ran out of memory beside `held` bytes of state: what this iteration shows lasts long.

        If it happens again at once, no sample sees the peak, so state may have half of what was too much.
        """
        mark, iterations = self._lasting or (self._total, 0)
        if iterations <= REMEMBERED_AFTER_FAILURE - REMEMBERED:
            mark = self._total
        elif held:
            mark = min(mark, held // 2 + self.margin)
        self._lasting = mark, REMEMBERED_AFTER_FAILURE
        self._watch_for_lasting = True

    def end_iteration(self) -> None:
        """What is sampled from now on belongs to the next iteration."""
        short = self._least_free is not None and self._held > 0 and 2 * self._least_free < MARGIN * self._total
        if short:
            self._extra = min(max(2 * self._extra, int(MARGIN * self._total)), self._total)
        elif self._extra and (self._least_free or 0) >= MARGIN * self._total:
            self._extra = self._extra // 2 if self._extra > 0.1 * MARGIN * self._total else 0
        self._remember_what_fits()
        if self._now:
            if self._watch_for_lasting and self._lasting is not None:
                self._lasting = min(_peak(self._now), self._lasting[0]), REMEMBERED_AFTER_FAILURE
            self._marks.append(self._now)
        fall = self._late or self._backward
        if fall is not None:
            self._falls.append(fall.first - fall.lowest)
        if self._lasting is not None:
            mark, iterations = self._lasting
            self._lasting = (mark, iterations - 1) if iterations > 1 else None
        self._now, self._backward, self._late = {}, None, None
        self._least_free, self._failed_at, self._watch_for_lasting = None, None, False

    def room(self) -> Room:
        """What optimizer state may use in the next update and at the next peak; nothing before the first sample."""
        marks = [m for m in (*self._marks, self._now) if m]
        if not marks:
            return Room(0, 0)
        peaks = [_peak(m) for m in marks]
        windows = [m[Op.UPDATE] for m in marks if Op.UPDATE in m]
        resident = min(peaks)
        if windows:
            # Not the most: an iteration in which a neighbour left or came says nothing of what an iteration needs.
            swing = statistics.median_high(m[Op.UPDATE] - _peak(m) for m in marks if Op.UPDATE in m)
            resident = min(resident, windows[-1] - max(0, swing))
        if len(peaks) >= 4:
            falls = [earlier - later for earlier, later in zip(peaks[-4:], peaks[-3:], strict=False)]
            resident = min(resident, peaks[-1] - max(0, min(falls)))
        if self._lasting is not None:
            resident = min(resident, self._lasting[0])
        update = max(resident, min(windows, default=resident))
        most = self._total if self._fits is None else self._fits[0]
        return Room(*(min(max(0, mark - self.margin), most) for mark in (resident, update)))

    def late_room(self) -> int:
        """What optimizer state may use until backward ends, from what its second half has left so far.

        That half is expected to take as much more as it did at most in recent iterations; where only whole backwards
        were seen, as those did. Nothing as long as it is remembered that the user's own code ran out of memory.
        """
        if self._late is None or not self._falls or self._lasting is not None:
            return 0
        return max(0, min(self._late.lowest, self._late.first - max(self._falls)) - self.margin)

    def _remember_what_fits(self) -> None:
        if self._failed_at is not None:
            self._fits = self._failed_at, self._patience
            self._patience = min(2 * self._patience, REMEMBERED_AFTER_FAILURE)
        elif self._fits is not None:
            nbytes, iterations = self._fits
            self._fits = (nbytes, iterations - 1) if iterations > 1 else None
        else:
            self._patience = max(self._patience - 1, REMEMBERED)


class _Fall(NamedTuple):
    """What was free, in bytes, when a phase began, and at the least since."""

    first: int
    lowest: int

    @classmethod
    def of(cls, before: _Fall | None, nbytes: int) -> _Fall:
        return cls(nbytes, nbytes) if before is None else cls(before.first, min(before.lowest, nbytes))


def _peak(marks: dict[Op, int]) -> int:
    """The low-water mark of forward and backward; of the update where nothing else was sampled."""
    return min([marks[phase] for phase in (Op.FORWARD, Op.BACKWARD) if phase in marks] or marks.values())
