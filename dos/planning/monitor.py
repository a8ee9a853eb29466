"""How much device memory state may use, by samples at little cost and the user's budget."""

from __future__ import annotations

import math
import numbers
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dos.devices import Device
from dos.guard import exclusive, renewed
from dos.planning.forecast import Forecast, Room
from dos.planning.reading import MemoryReader
from perfmodel import Op, SubgroupLoad

Budget = int | float | Callable[[], int] | None
"""The type of `memory_budget`: bytes, a share of the device's memory (a float), or a function giving bytes."""

SHARE_OF_TIME = 1e-3
"""Sampling may take this share of the time."""
SHARE_AT_FIRST = 0.1
"""The same in the first iteration: nothing is known of its peak, which would be missed between two rare samples."""
SPARE_TO_GROW = 0.25
"""Share of a subgroup's state that must be free beyond it before more state becomes resident."""
SHORT = 1 / 4
"""Share of the device's memory below which it runs short, as long as nothing is known of an iteration's peak.

What an operation needs beside saved tensors, and the next block's weights, must fit into it.
"""
NEAR = 0.1
"""Share of the device's memory below which state counts as about to leave where memory falls."""
TOO_LITTLE = f"because {1 + SPARE_TO_GROW:g} subgroups must be free before another one stays"
BUDGET = "by memory_budget="


class MemoryMonitor:
    """Samples one device's memory and says how much of it optimizer state may use.

    held: bytes that optimizer state has on the device now, less those of saved tensors that the plan has let leave, so
        that what is said to be free is so while all of them stay; called from several threads.
    budget: see `Budget`; a function replaces what is measured, a number caps it.
    interval_s: seconds between samples by a thread of its own; None for samples at the calls of `sample` alone.
    reading: the last one. forecast: what samples say of the next iteration.
    withheld: of the memory that was free or state's own when limits were last asked for, the bytes that state may not
        use at the peak of the iteration, with the reasons. Empty if there is room for all state.
    room: by which those were.
    grows_short: whether there was less then than in the iteration before, so that state may soon have to leave.
    """

    def __init__(
        self,
        device: Device,
        held: Callable[[], int],
        budget: Budget = None,
        interval_s: float | None = None,
    ) -> None:
        self._held = held
        self._budget = budget
        self._reader = MemoryReader(device)
        self.forecast = Forecast()
        self._phase = Op.FORWARD
        self._late = False
        self._seen = False
        self._last = Op.FORWARD, 0
        """The phase since the last sample, and the bytes that state had then."""
        self._sampled_at, self._due = 0.0, -math.inf
        self._took: deque[float] = deque(maxlen=9)
        self.renew()
        self._resident: int | None = None
        self._offered: int | None = None
        self._peak: int | None = None
        self._peak_before: int | None = None
        self.grows_short = False
        self.room = Room(0, 0)
        self.withheld: tuple[tuple[int, str], ...] = ()
        self.reading = self._reader.read()
        renewed.add(self)
        if interval_s is not None:
            _start_thread(self, interval_s)

    def renew(self) -> None:
        """Have another lock; in a forked child, a thread that does not exist there may have held the last."""
        self._lock = threading.RLock()

    def enter(self, phase: Op) -> None:
        """The iteration has come to this phase: one of FORWARD, BACKWARD, UPDATE. Takes a sample."""
        self._phase, self._late = phase, False
        self.sample(always=True)

    @exclusive
    def spare_in_backward(self) -> int:
        """Bytes that state may take beyond what it holds until backward ends, by what its second half has left before.

        To be asked in that half alone: what is sampled from then on counts as of it.
        """
        began, self._late = not self._late, True
        self.sample(always=began)
        return max(0, self.forecast.late_room() - self._held())

    def runs_short(self) -> bool:
        """Whether less than SHORT of the device is free now."""
        self.sample(always=True)
        memory = self.reading.memory
        return memory.free < SHORT * memory.total

    def sample(self, always: bool = False) -> None:
        """Take a sample, unless the last is so recent that sampling would take more than its share of time."""
        # Without the lock, for it is asked at each of many gradients.
        if always or time.perf_counter() >= self._due:
            self._sample()

    @exclusive
    def _sample(self) -> None:
        start = time.perf_counter()
        held = self._held()  # before the rest: what is freed in between is then missed, not counted twice
        self.reading = self._reader.read()
        memory, lowest = self.reading.memory, self.reading.lowest
        phase, before = self._last
        if lowest is not None and phase is not Op.UPDATE:
            # Not in the update, where most is of state itself. State that came or went in between counts as away.
            self.forecast.peaked(phase, lowest, min(before, held), others=self.reading.others)
        self._last = self._phase, held
        self.forecast.sample(self._phase, memory.free, held, memory.total, others=self.reading.others, late=self._late)
        self._sampled_at = time.perf_counter()
        self._took.append(self._sampled_at - start)
        self._due_next()

    def _due_next(self) -> None:
        # The median: a sample during which another thread had the interpreter says nothing of its cost.
        share = SHARE_OF_TIME if self._seen else SHARE_AT_FIRST
        self._due = self._sampled_at + statistics.median(self._took) / share

    @exclusive
    def end_iteration(self) -> None:
        """The step has been issued: what comes now is the next iteration's forward."""
        self.sample(always=True)
        self.forecast.end_iteration()
        if self._offered is not None:
            self._resident, self._offered = self._offered, None
        self._peak_before = self._peak
        self._phase, self._late, self._seen = Op.FORWARD, False, True
        self._last = Op.FORWARD, self._last[1]
        self._due_next()

    @exclusive
    def ran_out(self, held: int) -> None:
        """The user's own code ran out of memory, and `held` bytes of state have been taken off the device."""
        self.forecast.ran_out(held)
        self._resident = 0

    def limits(
        self, loads: Sequence[SubgroupLoad], *, update_overlaps_forward: bool, beside: int = 0, weights: int = 0
    ) -> dict[str, Any]:
        """The fields of a workload that say how much memory these subgroups may use, in whole ones against noise.

        More becomes resident than in the last iteration only if SPARE_TO_GROW of a subgroup is left over.
        update_overlaps_forward: whether slots are still in use at the next peak. beside: bytes that updates on the
        device need beyond state. weights: bytes of those that stream or may, which share the room.
        """
        self.room = room = self._room()
        update = room.update - beside
        peak = min(update, room.resident - beside if update_overlaps_forward else room.resident)
        sizes = [load.state_bytes for load in loads]
        state, slot = sum(sizes) + weights, max(1, *sizes)

        def whole(nbytes: float) -> int:
            return state if nbytes >= state else max(0, int(nbytes)) // slot * slot

        resident = whole(peak)
        if self._resident is not None and resident > self._resident:
            resident = max(self._resident, whole(peak - SPARE_TO_GROW * slot))
        self._offered = resident
        falls, self._peak = self._peak_before is not None and peak < self._peak_before, peak
        self.grows_short = falls and peak - resident < NEAR * self.reading.memory.total
        limits = (
            (room.resident + room.margin, room.why),
            (room.resident, "as a margin"),
            (peak, "for offloaded gradients on their way to the device"),
            (resident, TOO_LITTLE),
        )
        free = self.reading.memory.free + self._held()
        self.withheld = _withheld(free, limits) if resident < state else ()
        beyond = 0 if update_overlaps_forward else int(update - resident) // slot * slot
        return {"peak_free_bytes": resident, "shared_free_bytes": resident + max(0, beyond)}

    @exclusive
    def _room(self) -> Room:
        if callable(self._budget):
            nbytes = _checked(self._budget())
            return Room(nbytes, nbytes, BUDGET, more=0)
        room = self.forecast.room()
        if self._budget is None:
            return room
        share = isinstance(self._budget, float)
        limit = int(self._budget * self.reading.memory.total) if share else int(self._budget)
        if limit < room.resident:
            return Room(limit, min(room.update, limit), BUDGET, more=0)
        update = min(room.update, limit)
        return room._replace(update=update, more=update - room.resident)


def _withheld(free: int, limits: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """How much of what is free each limit in turn takes away, where it does."""
    found = []
    for limit, why in limits:
        if limit < free:
            found.append((free - max(limit, 0), why))
            free = max(limit, 0)
    return tuple(found)


def _checked(nbytes: object) -> int:
    """The memory budget that a user's function gave. Raises TypeError or ValueError if it is no number of bytes."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, numbers.Real):
        raise TypeError(f"memory_budget: the function must give bytes as an int, found {nbytes!r}")
    if not 0 <= float(nbytes) < math.inf:
        raise ValueError(f"memory_budget: the function must give 0 or more bytes, found {nbytes}")
    return int(float(nbytes))


def _start_thread(monitor: MemoryMonitor, interval_s: float) -> None:
    """Sample until the monitor is collected."""
    reference = weakref.ref(monitor)

    def sample() -> None:
        while True:
            time.sleep(interval_s)
            alive = reference()
            if alive is None:
                return
            alive.sample()
            # Or this thread would keep the monitor while it sleeps.
            del alive

    threading.Thread(target=sample, name="dos-memory", daemon=True).start()
