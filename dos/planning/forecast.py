"""How much device memory optimizer state may use: low-water marks, and what they say of the next iteration."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dos.planning.missed import MissedPeaks
from perfmodel import Op

REMEMBERED = 4
"""Iterations over which a low-water mark counts; memory that this process freed is trusted after as many."""
RESTLESS = 12
"""Iterations over which it counts how much others took from one to the next."""
CAUTION = 1 / 3
"""Share of the most that others took at a time that is left to them where they have just given back."""
GROWTH = 1.5
"""By which more is given back with each iteration in which another process may be waiting for memory."""
REMEMBERED_AFTER_FAILURE = 100
"""Iterations over which one counts from which the user's own code ran out of memory."""
MARGIN = 0.02
"""Share of the device's memory that is left alone."""


class Room(NamedTuple):
    """Bytes of device memory for optimizer state.

    resident: at the peak of the iteration. update: while updating; residents and slots share it.
    why: for what it is no more at the peak. margin: bytes that are left alone besides.
    short: what is missing at the peak even without state, if all saved tensors stay.
    more: what state may use beyond, if saved tensors leave: no more than is free while updating, when none is saved.
    """

    resident: int
    update: int
    why: str = ""
    margin: int = 0
    short: int = 0
    more: float = math.inf


class Forecast:
    """The memory that was free in each phase of recent iterations, and the share of it that state may use in the next.

    Two things are measured: what this process leaves beside its state, and what others hold. Room is the least of what
    these rules allow, less the margin:

    - This process needs again what it needed at most in the last REMEMBERED iterations.
    - Others hold what they hold now. Where they held more in the last REMEMBERED iterations they may want it back: a
      CAUTION of the most that they took from one iteration to the next is left to them. Who never took is trusted.
    - A low mark in the update now, less what an iteration usually takes beyond its update, counts at once: what has
      been taken is given back before the next peak.
    - Marks that fall steadily fall on.
    - A peak between two samples counts as the allocator's counter shows it (`MissedPeaks`).
    - What the user's own code ran out of is remembered for REMEMBERED_AFTER_FAILURE iterations.
    - Where an allocation fails although the figures have room for it (they lie, or what is free is in pieces), what did
      fit is the most for REMEMBERED iterations, and for twice as many each time that trying again fails.

    The margin is MARGIN of the device, and more while memory runs short: a neighbour that waits for more takes all
    that is free, so nearly nothing free means that it wants more. Each such iteration adds GROWTH times as much as the
    one before; the first with all of MARGIN free, so that no process waits, takes all of that away.
    """

    def __init__(self) -> None:
        self._marks: deque[dict[Op, int]] = deque(maxlen=REMEMBERED)
        self._sampled: dict[Op, int] = {}
        self._missed = MissedPeaks()
        self._others: deque[int] = deque(maxlen=RESTLESS)
        self._others_now: int | None = None
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
        self._again = False

    @property
    def margin(self) -> int:
        """Bytes that are left alone now."""
        return int(MARGIN * self._total) + self._given_back()

    @property
    def ran_out_lately(self) -> bool:
        """Whether it is remembered that the user's own code ran out of memory.

        Then no state comes to stay before the peak of an iteration is over.
        """
        return self._lasting is not None

    @property
    def ran_out_again(self) -> bool:
        """Whether it is remembered that it did so at once after what was to prevent it."""
        return self._lasting is not None and self._again

    def sample(self, phase: Op, free: int, held: int, total: int, *, others: int = 0, late: bool = False) -> None:
        """free: bytes, as measured in this phase. held: bytes of the device's `total` that optimizer state had.

        others: bytes that other processes had; 0 if that is not known, and all that is not free counts as this one's.
        late: whether this is the second half of backward.
        """
        self._total = total
        self._others_now = max(others, self._others_now or 0)
        if phase is Op.BACKWARD:
            self._backward = _Fall.of(self._backward, free + held)
        if late:
            self._late = _Fall.of(self._late, free + held)
        left = free + held + others
        self._sampled[phase] = min(left, self._sampled.get(phase, left))
        if phase is not Op.UPDATE:
            self._missed.sample(held)
        if self._least_free is None or free < self._least_free:
            self._least_free, self._held = free, held

    def peaked(self, phase: Op, free: int, held: int, *, others: int = 0) -> None:
        """Memory was free, by the allocator's counter, at a peak of forward or backward between two samples.

        The rest as for `sample`.
        """
        if self._backward is not None and phase is Op.BACKWARD:
            self._backward = _Fall.of(self._backward, free + held)
        self._missed.show(free + held + others, held)

    @property
    def _now(self) -> dict[Op, int]:
        """The low marks of this iteration."""
        if not self._sampled:
            return {}
        mark = _peak(self._sampled)
        peak = self._missed.corrected(mark)
        return self._sampled if peak == mark else {**self._sampled, Op.FORWARD: peak}

    def allocation_failed(self, held: int) -> None:
        """An allocation for which there was room by these figures has failed beside `held` bytes of state."""
        self._failed_at = held if self._failed_at is None else min(held, self._failed_at)

    def ran_out(self, held: int) -> None:
        """The user's own code ran out of memory beside `held` bytes of state: what this iteration shows lasts long.

        If it happens again at once, no sample sees the peak, so state may have half of what was too much.
        """
        mark, iterations = self._lasting or (self._total, 0)
        self._again = self.ran_out_again
        # The last failure is some iterations past: that this one came does not mean that too little was done about
        # that.
        if iterations <= REMEMBERED_AFTER_FAILURE - REMEMBERED:
            mark = self._total
        elif held:
            mark, self._again = min(mark, held // 2 + self.margin), True
        self._lasting = mark, REMEMBERED_AFTER_FAILURE
        self._watch_for_lasting = True

    def end_iteration(self) -> None:
        """Samples from now on belong to the next iteration."""
        self._extra = self._given_back()
        self._remember_what_fits()
        now = self._now
        if now:
            if self._watch_for_lasting and self._lasting is not None:
                self._lasting = (
                    min(_peak(now) - (self._others_now or 0), self._lasting[0]),
                    REMEMBERED_AFTER_FAILURE,
                )
            self._marks.append(now)
            self._missed.end_iteration(_peak(self._sampled), int(MARGIN * self._total))
            self._others.append(self._others_now or 0)
        fall = self._late or self._backward
        if fall is not None:
            self._falls.append(fall.first - fall.lowest)
        if self._lasting is not None:
            mark, iterations = self._lasting
            self._lasting = (mark, iterations - 1) if iterations > 1 else None
        self._sampled, self._others_now, self._backward, self._late = {}, None, None, None
        self._least_free, self._failed_at, self._watch_for_lasting = None, None, False

    def room(self) -> Room:
        """The memory that state may use in the next update and at the next peak; nothing before the first sample."""
        marks = [m for m in (*self._marks, self._now) if m]
        if not marks:
            return Room(0, 0)
        updates = [m[Op.UPDATE] for m in marks if Op.UPDATE in m]
        levels = [*self._others, *([] if self._others_now is None else [self._others_now])]
        resident, why = min(self._limits(marks, updates, levels))
        update = max(resident, min(updates) - _expected(levels) if updates else resident)
        fits = None if self._fits is None else self._fits[0]
        most = min(self._total if known is None else known for known in (fits, self._failed_at))
        if most < resident - self.margin:
            why = "because an allocation failed lately"
        short = max(0, self.margin - resident)
        resident, update = (min(max(0, mark - self.margin), most) for mark in (resident, update))
        return Room(resident, update, why, self.margin, short, update - resident)

    def _limits(
        self, marks: Sequence[dict[Op, int]], updates: Sequence[int], levels: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """The bytes that each rule leaves for state at the next peak, and why no more."""
        peaks = [_peak(m) for m in marks]
        others = bool(levels) and _expected(levels) > levels[-1]
        beside = "for the peak of an iteration" + (" and what other processes may take back" if others else "")
        yield min(peaks) - _expected(levels), beside
        if updates:
            # Not the most: an iteration in which a neighbour left or came says nothing of what an iteration needs.
            swing = statistics.median_high(m[Op.UPDATE] - _peak(m) for m in marks if Op.UPDATE in m)
            yield updates[-1] - max(0, swing) - _expected(levels), beside
        # One of them is shorter after an exception. Where memory is given back, marks fall by that.
        if min(len(peaks), len(levels)) >= 4 and not self._given_back():
            left = [peak - level for peak, level in zip(peaks[-4:], levels[-4:], strict=True)]
            fall = min(earlier - later for earlier, later in itertools.pairwise(left))
            yield left[-1] - max(0, fall), "because free memory falls in each iteration" if fall > 0 else beside
        if self._lasting is not None:
            yield self._lasting[0], "because training ran out of memory lately"

    def late_room(self) -> int:
        """The bytes that state may use until backward ends, by what its second half has left so far.

        That half is expected to take as much more as it did at most in recent iterations; where only whole backwards
        were seen, as those did. Nothing as long as it is remembered that the user's own code ran out of memory.
        """
        if self._late is None or not self._falls or self._lasting is not None:
            return 0
        return max(0, min(self._late.lowest, self._late.first - max(self._falls)) - self.margin)

    def _given_back(self) -> int:
        """The bytes that are added to the margin, by the least that was free in this iteration."""
        if self._least_free is None:
            return self._extra
        # Without state here there is nothing to give back to a neighbour that waits.
        if self._held > 0 and 2 * self._least_free < MARGIN * self._total:
            return min(max(int(GROWTH * self._extra), int(MARGIN * self._total)), self._total)
        return 0 if self._least_free >= MARGIN * self._total else self._extra

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
    """Bytes that were free when a phase began, and at the least since."""

    first: int
    lowest: int

    @classmethod
    def of(cls, before: _Fall | None, nbytes: int) -> _Fall:
        return cls(nbytes, nbytes) if before is None else cls(before.first, min(before.lowest, nbytes))


def _expected(levels: Sequence[int]) -> int:
    """The bytes that others will hold, by the most that they held in each of recent iterations."""
    if not levels:
        return 0
    taken = max((later - earlier for earlier, later in itertools.pairwise(levels)), default=0)
    return min(max(levels[-REMEMBERED:]), levels[-1] + int(CAUTION * max(0, taken)))


def _peak(marks: dict[Op, int]) -> int:
    """The low-water mark of forward and backward; of the update where nothing else was sampled."""
    return min([marks[phase] for phase in (Op.FORWARD, Op.BACKWARD) if phase in marks] or marks.values())
