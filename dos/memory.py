"""How much device memory optimizer state may use: low-water marks of what was free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dos.devices import Device
from perfmodel import SubgroupLoad, Workload

REMEMBERED = 4
"""Iterations over which a low-water mark is kept."""
MARGIN = 0.02
"""Share of the device's memory that is left alone."""
SLOTS = 4
"""Staging slots that are worth keeping room for when not all state can be resident."""


class MemoryMonitor:
    """Remembers what was free at the peak of recent iterations, and in their update windows.

    All figures are bytes that optimizer state may use: what was free, plus what optimizer state itself held then,
    minus a margin.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._peak: deque[int] = deque(maxlen=REMEMBERED)
        self._update: deque[int] = deque(maxlen=REMEMBERED)

    def sample_peak(self, held: int) -> None:
        """At the start of backward, when activations take the most. held: bytes of ours."""
        self._peak.append(self._usable(held))

    def sample_update(self, held: int) -> None:
        """When the step's memory is allocated. held: bytes of ours."""
        self._update.append(self._usable(held))

    def workload(self, loads: Sequence[SubgroupLoad], held: int) -> Workload:
        """The work with the memory that there is for it, in whole slots, so that noise changes nothing.

        When not all state can be resident, some room is left for slots to stream the rest through.
        """
        now = self._usable(held)
        peak = min(self._peak, default=now)
        window = max(min(self._update, default=now), peak)
        slot = max((load.state_bytes for load in loads), default=0)
        state = sum(load.state_bytes for load in loads)
        if not slot:
            return Workload(tuple(loads))
        resident = min(peak, state)
        if resident < state:
            resident = max(0, min(resident, window - SLOTS * slot))
        resident = resident // slot * slot if resident < state else state
        return Workload(
            tuple(loads),
            peak_free_bytes=resident,
            update_free_bytes=max(0, window - resident) // slot * slot,
        )

    def _usable(self, held: int) -> int:
        free, total = self._device.memory()
        return max(0, int(free + held - MARGIN * total))
