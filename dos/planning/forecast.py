"""How much device memory optimizer state may use: low-water marks, and the forecast from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perfmodel import Op

REMEMBERED = 4
"""The number of iterations for which a low-water mark counts; memory that this process releases is used after them."""
RESTLESS = 12
"""The number of iterations in which the increases of other processes' memory count."""
CAUTION = 1 / 3
"""The share of other processes' largest increase that is left to them where they have just released memory."""
GROWTH = 1.5
"""The growth of the reserve with each iteration in which another process may be waiting for memory."""
REMEMBERED_AFTER_FAILURE = 100
"""The number of iterations for which an iteration counts in which user code ran out of memory."""
MARGIN = 0.02
"""The share of the device's memory that state leaves free."""


class Room(NamedTuple):
    """Bytes of device memory for optimizer state.

    resident: at the peak of the iteration. update: while updating; residents and slots share it.
    why: the use for which `resident` is no larger. margin: bytes that are left free besides.
    short: bytes that are missing at the peak even without state, if all saved tensors stay.
    more: bytes that state may use in addition if saved tensors move: only as many as are free while updating, when
        no tensors are saved.
    """

    resident: int
    update: int
    why: str = ""
    margin: int = 0
    short: int = 0
    more: float = math.inf


class Forecast:
    """The memory that was free in each phase of recent iterations, and the share of it that state may use in the next.

    Two quantities are measured: the memory that this process leaves beside its state, and the memory of other
    processes. The room is the least that these rules allow, less the margin:

    - This process needs as much as it needed at most in the last REMEMBERED iterations.
    - Other processes need their present memory. Where they had more in the last REMEMBERED iterations they may want it
      back: CAUTION times their largest increase from one iteration to the next is left to them. To processes that never
      took more, nothing is left.
    - A low mark in the present update, less the memory that an iteration usually takes beyond its update, counts at
      once, so that state is moved before the next peak.
    - Marks that fall steadily are expected to fall again.
    - A peak between two samples counts if the allocator's counter shows it (`MissedPeaks`).
    - A mark at which user code ran out of memory counts for REMEMBERED_AFTER_FAILURE iterations.
    - Where an allocation fails although the figures have room for it (they are wrong, or free memory is fragmented),
      the bytes that did fit are the limit for REMEMBERED iterations, and twice as long after each further failure.

    The margin is MARGIN of the device, and a reserve while memory runs short: a neighbour that waits for memory takes
    all that is free, so almost no free memory means that it waits. Each such iteration multiplies the reserve by
    GROWTH; the first iteration with all of MARGIN free, in which no process waits, sets it to 0.
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
        self._late_left: int | None = None
        """The least that the second half of this backward has left, as marks count it."""
        self._gains: deque[int] = deque(maxlen=REMEMBERED)
        """By how much recent second halves have left more than the peak, of backwards in which they were sampled."""
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
        """Bytes that state leaves free now."""
        return int(MARGIN * self._total) + self._given_back()

    @property
    def ran_out_again(self) -> bool:
        """Whether user code ran out of memory again at once, although state had been given less."""
        return self._lasting is not None and self._again

    def sample(self, phase: Op, free: int, held: int, total: int, *, others: int = 0, late: bool = False) -> None:
        """Add a sample.

        free: bytes, as measured in this phase. held: bytes of the device's `total` that optimizer state had.
        others: bytes of other processes; 0 if they are not known, and count as this process's.
        late: whether this is the second half of backward.
        """
        self._total = total
        self._others_now = max(others, self._others_now or 0)
        if phase is Op.BACKWARD:
            self._backward = _Fall.of(self._backward, free + held)
        left = free + held + others
        if late:
            self._late = _Fall.of(self._late, free + held)
            self._late_left = left if self._late_left is None else min(left, self._late_left)
        self._sampled[phase] = min(left, self._sampled.get(phase, left))
        if phase is not Op.UPDATE:
            self._missed.sample(held)
        if self._least_free is None or free < self._least_free:
            self._least_free, self._held = free, held

    def peaked(self, phase: Op, free: int, held: int, *, others: int = 0) -> None:
        """Add a peak of forward or backward between two samples, by the allocator's counter.

        Arguments: see `sample`.
        """
        if self._backward is not None and phase is Op.BACKWARD:
            self._backward = _Fall.of(self._backward, free + held)
        self._missed.add_peak(free + held + others, held)

    @property
    def _now(self) -> dict[Op, int]:
        """The low marks of this iteration."""
        if not self._sampled:
            return {}
        mark = _peak(self._sampled)
        peak = self._missed.corrected(mark)
        return self._sampled if peak == mark else {**self._sampled, Op.FORWARD: peak}

    def allocation_failed(self, held: int) -> None:
        """Note that an allocation has failed beside `held` bytes of state, for which these figures had room."""
        self._failed_at = held if self._failed_at is None else min(held, self._failed_at)

    def ran_out(self, held: int) -> None:
        """Note that user code ran out of memory beside `held` bytes of state: the marks of this iteration last long.

        If it happens again at once, no sample sees the peak, so that state gets half of `held`.
        """
        mark, iterations = self._lasting or (self._total, 0)
        self._again = self.ran_out_again
        # After several iterations without a failure, a new one does not mean that state got too much after the last.
        if iterations <= REMEMBERED_AFTER_FAILURE - REMEMBERED:
            mark = self._total
        elif held:
            mark, self._again = min(mark, held // 2 + self.margin), True
        self._lasting = mark, REMEMBERED_AFTER_FAILURE
        self._watch_for_lasting = True

    def end_iteration(self) -> None:
        """End the iteration; samples from now on belong to the next one."""
        self._extra = self._given_back()
        self._remember_fitting()
        now = self._now
        if now:
            if self._watch_for_lasting and self._lasting is not None:
                self._lasting = (
                    min(_peak(now) - (self._others_now or 0), self._lasting[0]),
                    REMEMBERED_AFTER_FAILURE,
                )
            self._marks.append(now)
            if self._late_left is not None:
                self._gains.append(max(0, self._late_left - _peak(now)))
            self._missed.end_iteration(_peak(self._sampled), int(MARGIN * self._total))
            self._others.append(self._others_now or 0)
        fall = self._late or self._backward
        if fall is not None:
            self._falls.append(fall.first - fall.lowest)
        if self._lasting is not None:
            mark, iterations = self._lasting
            self._lasting = (mark, iterations - 1) if iterations > 1 else None
        self._sampled, self._others_now, self._backward, self._late, self._late_left = {}, None, None, None, None
        self._least_free, self._failed_at, self._watch_for_lasting = None, None, False

    def room(self) -> Room:
        """Return the memory that state may use in the next update and at the next peak; 0 before the first sample."""
        marks = [m for m in (*self._marks, self._now) if m]
        if not marks:
            return Room(0, 0)
        updates = [m[Op.UPDATE] for m in marks if Op.UPDATE in m]
        levels = [*self._others, *([] if self._others_now is None else [self._others_now])]
        resident, why = min(self._limits(marks, updates, levels))
        update = max(resident, min(updates) - _expected(levels) if updates else resident)
        fits = None if self._fits is None else self._fits[0]
        most = min([known for known in (fits, self._failed_at) if known is not None], default=self._total)
        margin = self.margin
        if most < resident - margin:
            why = "because an allocation failed lately"
        short = max(0, margin - resident)
        resident, update = min(max(0, resident - margin), most), min(max(0, update - margin), most)
        return Room(resident, update, why, margin, short, update - resident)

    def _limits(
        self, marks: Sequence[dict[Op, int]], updates: Sequence[int], levels: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Yield the bytes that each rule leaves for state at the next peak, and the reason."""
        peaks = [_peak(m) for m in marks]
        others = bool(levels) and _expected(levels) > levels[-1]
        usual = "for the peak of an iteration" + (" and what other processes may take back" if others else "")
        yield min(peaks) - _expected(levels), usual
        if updates:
            # Not the maximum: an iteration in which a neighbour began or ended does not show the need of an iteration.
            swing = statistics.median_high(m[Op.UPDATE] - _peak(m) for m in marks if Op.UPDATE in m)
            yield updates[-1] - max(0, swing) - _expected(levels), usual
        # One list is shorter after an exception. While the reserve grows, marks fall for that reason.
        if min(len(peaks), len(levels)) >= 4 and not self._given_back():
            left = [peak - level for peak, level in zip(peaks[-4:], levels[-4:], strict=True)]
            fall = min(earlier - later for earlier, later in itertools.pairwise(left))
            yield left[-1] - max(0, fall), "because free memory falls in each iteration" if fall > 0 else usual
        if self._lasting is not None:
            yield self._lasting[0], "because training ran out of memory lately"

    @property
    def half_freed(self) -> int | None:
        """Bytes by which the second half of backward leaves more than the peak of the iteration; None: not known."""
        return min(self._gains, default=None)

    def late_room(self) -> int:
        """Return the bytes that state may use until backward ends, by the memory that its second half has left so far.

        The second half is expected to take as much more as at most in recent iterations, or as whole backwards where
        only these were sampled. 0 if user code ran out of memory lately.
        """
        if self._late is None or not self._falls or self._lasting is not None:
            return 0
        return max(0, min(self._late.lowest, self._late.first - max(self._falls)) - self.margin)

    def _given_back(self) -> int:
        """Return the reserve beside the margin, by the least memory that was free in this iteration."""
        if self._least_free is None:
            return self._extra
        # Without state on the device nothing can be released for a neighbour that waits.
        if self._held > 0 and 2 * self._least_free < MARGIN * self._total:
            return min(max(int(GROWTH * self._extra), int(MARGIN * self._total)), self._total)
        return 0 if self._least_free >= MARGIN * self._total else self._extra

    def _remember_fitting(self) -> None:
        if self._failed_at is not None:
            self._fits = self._failed_at, self._patience
            self._patience = min(2 * self._patience, REMEMBERED_AFTER_FAILURE)
        elif self._fits is not None:
            nbytes, iterations = self._fits
            self._fits = (nbytes, iterations - 1) if iterations > 1 else None
        else:
            self._patience = max(self._patience - 1, REMEMBERED)


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
        self._counted: tuple[int, int] | None = None
        self._held: int | None = None

    def sample(self, held: int) -> None:
        """Note the bytes of state at a sample of forward or backward."""
        self._held = held if self._held is None else min(held, self._held)

    def add_peak(self, left: int, held: int) -> None:
        """Add a peak of the counter in forward or backward. left: free bytes at it, and the `held` bytes of state."""
        self._counted = (left, held) if self._counted is None else min((left, held), self._counted)

    def corrected(self, mark: int) -> int:
        """Return the low mark of this iteration. mark: by samples alone."""
        if self._counted is not None:
            return min(mark, self._counted[0])
        return mark if self._known is None else max(mark - self._known.missed, min(mark, self._known.left))

    def end_iteration(self, mark: int, tolerance: int) -> None:
        """End the iteration. mark: by samples alone. tolerance: bytes by which peaks of one kind differ."""
        if self._counted is not None:
            left, held = self._counted
            self._known = _Peak(left, max(0, mark - left), held)
        elif self._known is not None and self._held is not None and self._held > self._known.held + tolerance:
            self._known = None
        self._counted = self._held = None


class _Fall(NamedTuple):
    """Bytes that were free when a phase began, and the least since."""

    first: int
    lowest: int

    @classmethod
    def of(cls, before: _Fall | None, nbytes: int) -> _Fall:
        return cls(nbytes, nbytes) if before is None else cls(before.first, min(before.lowest, nbytes))


def _expected(levels: Sequence[int]) -> int:
    """Return the bytes that other processes will have, by the most that they had in each of recent iterations."""
    if not levels:
        return 0
    taken = max((later - earlier for earlier, later in itertools.pairwise(levels)), default=0)
    return min(max(levels[-REMEMBERED:]), levels[-1] + int(CAUTION * max(0, taken)))


def _peak(marks: dict[Op, int]) -> int:
    """Return the low-water mark of forward and backward; of the update where nothing else was sampled."""
    return min([marks[phase] for phase in (Op.FORWARD, Op.BACKWARD) if phase in marks] or marks.values())
