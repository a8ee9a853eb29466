"""How much device memory state may use, by samples at little cost and the user's budget."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dos.arguments import given_bytes
from dos.devices import Device
from dos.guard import exclusive, renewed
from dos.planning.forecast import Forecast, Room
from dos.planning.reading import MemoryReader
from perfmodel import Op, SubgroupLoad

Budget = int | float | Callable[[], int] | None
"""The type of `memory_budget`: bytes, a share of the device's memory (a float), or a function that returns bytes."""

SHARE_OF_TIME = 1e-3
"""The share of time that sampling may take."""
SHARE_AT_FIRST = 0.1
"""The same in the first iteration, whose peak is not known: two rare samples would miss it."""
SPARE_TO_GROW = 0.25
"""The share of a subgroup's state that must be free in addition before more state becomes resident."""
SHORT = 1 / 4
"""The share of free device memory below which it runs short, as long as no peak is known.

The memory of an operation beside saved tensors, and the next block's weights, must fit into it.
"""
NEAR = 0.1
"""The share of free device memory below which state may soon have to move, if free memory falls."""
RECENT_S = 5e-3
"""Seconds for which a reading serves another sample, as of the last gradient for `step()`, whose first work waits."""
TOO_LITTLE = f"because {1 + SPARE_TO_GROW:g} subgroups must be free before another one stays"
BUDGET = "by memory_budget="


class MemoryMonitor:
    """Samples one device's memory and computes how much of it optimizer state may use.

    held: returns the bytes of optimizer state on the device, less the bytes of saved tensors that have moved by the
        plan, so that the forecast holds for an iteration in which all of them stay; called from several threads.
    budget: see `Budget`; a function replaces the measurements, a number limits them.
    reading: the last one. forecast: of the next iteration.
    withheld: of the memory that was free or state's own at the last call of `limits`, the bytes that state may not use
        at the peak of the iteration, with the reasons. Empty if there is room for all state.
    room: of the last call of `limits`.
    grows_short: whether the room was less than in the iteration before, so that state may soon have to move.
    due: the time.perf_counter() before which `sample` takes no sample that is not asked for `always`.
    """

    def __init__(self, device: Device, held: Callable[[], int], budget: Budget = None) -> None:
        self._device = device
        self._held = held
        self._budget = budget
        self._reader = MemoryReader(device)
        self.forecast = Forecast()
        self._phase = Op.FORWARD
        self._late = False
        self._seen = False
        self._last = Op.FORWARD, 0
        """The phase at the last sample, and the bytes that state had then."""
        self._sampled_at, self.due = 0.0, -math.inf
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

    def renew(self) -> None:
        """Make another lock: in a forked child, a thread that does not exist there may have the old one."""
        self._lock = threading.RLock()

    def enter(self, phase: Op) -> None:
        """Begin a phase of the iteration, one of FORWARD, BACKWARD, UPDATE, and take a sample."""
        self._phase, self._late = phase, False
        # Not on an emulated device, whose memory costs nothing to read, and changes at a given moment.
        recent = phase is Op.UPDATE and time.perf_counter() - self._sampled_at < RECENT_S
        if recent and self._device.queues:
            self._sample_again()
        else:
            self._sample()

    @exclusive
    def _sample_again(self) -> None:
        """Take a sample of this phase by the last reading."""
        memory, held = self.reading.memory, self._last[1]
        self._last = self._phase, held
        self.forecast.sample(self._phase, memory.free, held, memory.total, others=self.reading.others, late=self._late)

    @exclusive
    def spare_in_backward(self) -> int:
        """Return the bytes that state may take in addition until backward ends, by earlier second halves of backward.

        Call it only in the second half: later samples count as of it.
        """
        began, self._late = not self._late, True
        self.sample(always=began)
        return max(0, self.forecast.late_room() - self._held())

    def runs_short(self) -> bool:
        """Return whether less than SHORT of the device is free now."""
        self._sample()
        memory = self.reading.memory
        return memory.free < SHORT * memory.total

    def sample(self, always: bool = False) -> None:
        """Take a sample, unless the last one is so recent that sampling would take more than its share of time."""
        # Without the lock, because each gradient and each module of a forward calls this.
        if always or time.perf_counter() >= self.due:
            self._sample()

    @exclusive
    def _sample(self) -> None:
        start = time.perf_counter()
        held = self._held()  # first: memory that is released in between is then missed, and not counted twice
        self.reading = self._reader.read()
        memory, lowest = self.reading.memory, self.reading.lowest
        phase, before = self._last
        if lowest is not None and phase is not Op.UPDATE:
            # Not in the update, where most memory is state's own. State that moved in between counts as absent.
            self.forecast.peaked(phase, lowest, min(before, held), others=self.reading.others)
        self._last = self._phase, held
        self.forecast.sample(self._phase, memory.free, held, memory.total, others=self.reading.others, late=self._late)
        self._sampled_at = time.perf_counter()
        self._took.append(self._sampled_at - start)
        self._due_next()

    def _due_next(self) -> None:
        # The median, because a sample during which another thread had the interpreter does not show its cost.
        share = SHARE_OF_TIME if self._seen else SHARE_AT_FIRST
        self.due = self._sampled_at + statistics.median(self._took) / share

    @exclusive
    def end_iteration(self) -> None:
        """End the iteration, whose step was issued, and begin the next one's forward."""
        self._sample()
        self.forecast.end_iteration()
        if self._offered is not None:
            self._resident, self._offered = self._offered, None
        self._peak_before = self._peak
        self._phase, self._late, self._seen = Op.FORWARD, False, True
        self._last = Op.FORWARD, self._last[1]
        self._due_next()

    @exclusive
    def ran_out(self, held: int) -> None:
        """Note that user code ran out of memory, and `held` bytes of state were moved off the device."""
        self.forecast.ran_out(held)
        self._resident = 0

    def limits(
        self, loads: Sequence[SubgroupLoad], *, update_overlaps_forward: bool, passing: int = 0, weights: int = 0
    ) -> dict[str, Any]:
        """Return the fields of a workload that limit the memory of these subgroups, rounded to subgroups against noise.

        More state becomes resident than in the last iteration only if SPARE_TO_GROW of a subgroup is left over.
        update_overlaps_forward: whether slots are still in use at the next peak. passing: bytes that updates on the
        device need beside state. weights: bytes of weights that stream or may stream, which share the room.
        """
        self.room = room = self._room()
        update = room.update - passing
        peak = min(update, room.resident - passing if update_overlaps_forward else room.resident)
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
        found: dict[str, Any] = {"peak_free_bytes": resident, "shared_free_bytes": resident + max(0, beyond)}
        freed = self.forecast.half_freed
        if freed is not None:
            late = min(update, peak + freed)
            found["half_freed_bytes"] = max(0, int(late - resident) // slot * slot)
        return found

    @exclusive
    def _room(self) -> Room:
        if callable(self._budget):
            nbytes = given_bytes(self._budget(), "memory_budget")
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
    """Return how many of the free bytes each limit withholds after the ones before it, where it withholds any."""
    found = []
    for limit, why in limits:
        if limit < free:
            found.append((free - max(limit, 0), why))
            free = max(limit, 0)
    return tuple(found)
