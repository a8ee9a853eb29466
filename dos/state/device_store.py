"""State on the device: residents, and slots through which other state passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy, Device, Job
from dos.state.arena import State, state_copies
from dos.state.subgroup import Subgroup
from perfmodel import Op
from perfmodel.plan import Tier

logger = logging.getLogger(__name__)


class Resident(NamedTuple):
    """Room of a subgroup's own, and its state there. nbytes: as plans count it, without what alignment adds."""

    buffer: Tensor
    state: State
    nbytes: int


class DeviceStore:
    """State in device memory, and slots through which it passes. A failed allocation is an answer, not an error.

    resident: state that has come here to stay, by subgroup. slots: staging buffers of equal size.
    denied: bytes that were held when an allocation failed, if one has in this step that was not expected to.
    """

    def __init__(self, device: Device) -> None:
        self.resident: dict[Subgroup, Resident] = {}
        self.slots: list[Tensor] = []
        self.denied: int | None = None
        self.device = device
        self._passing: dict[Subgroup, State] = {}
        """State that passes through a slot, by subgroup."""
        self._expected = False
        self._logged = False

    @property
    def nbytes(self) -> int:
        """Of residents and slots together; may be read from any thread."""
        # Over copies, for the thread that samples memory asks while the caller's changes these.
        return sum(b.nbytes for b in (*(room.buffer for room in list(self.resident.values())), *list(self.slots)))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the state of residents, as plans count it."""
        return sum(room.nbytes for room in self.resident.values())

    def expect_denials(self, expected: bool) -> None:
        """A step begins; in one that expects denials, they say nothing about the device's memory."""
        self._expected, self.denied = expected, None

    def has(self, subgroup: Subgroup) -> bool:
        """Whether there is room here that is the subgroup's own."""
        return subgroup in self.resident or subgroup.arena.tier is Tier.DEVICE

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Make room for the state of these, uninitialised; from the first on for which there is no memory, those left.

        A failed attempt is expensive: the caching allocator first gives back all that it has, and waits for the device.
        """
        wanted = list(subgroups)
        for place, subgroup in enumerate(wanted):
            buffer = self._allocate(subgroup.state.carved_bytes)
            if buffer is None:
                return wanted[place:]
            self.resident[subgroup] = Resident(buffer, subgroup.state.carve(buffer), subgroup.load().state_bytes)
        return []

    def drop(self, subgroup: Subgroup) -> None:
        """Free a resident subgroup's memory. Its state has come home; nothing in flight may use it."""
        self.device.free(self.resident.pop(subgroup).buffer)

    def fetch(self, subgroup: Subgroup) -> State:
        """Where the subgroup's state is: in room of its own, or in the slot that it occupies."""
        if subgroup.arena.tier is Tier.DEVICE:
            return subgroup.state
        return self.resident[subgroup].state if subgroup in self.resident else self._passing[subgroup]

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        copies = state_copies(self.fetch(subgroup), source)
        return self.device.copy(Op.PREFETCH, number, [*copies, *beside], after)

    def occupy(self, subgroup: Subgroup, slot: int) -> None:
        """Have the subgroup's state pass through this slot, until slots are given back."""
        self._passing[subgroup] = subgroup.state.carve(self.slots[slot])

    def beside(self, subgroup: Subgroup, slot: int) -> Tensor:
        """The part of a slot that the subgroup's state does not take."""
        return self.slots[slot][0 if self.has(subgroup) else subgroup.state.carved_bytes :]

    def get_slots(self, count: int, nbytes: int) -> None:
        """Allocate up to `count` slots of `nbytes`, fewer if memory runs out."""
        for _ in range(count):
            slot = self._allocate(nbytes)
            if slot is None:
                break
            self.slots.append(slot)

    def free_slots(self) -> None:
        """Give the slots back. Nothing in flight may use them."""
        self._passing = {}
        while self.slots:
            self.device.free(self.slots.pop())

    def _allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self.device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            level = logging.DEBUG if self._logged or self._expected else logging.WARNING
            if not self._expected:
                self._logged, self.denied = True, self.nbytes
            # As text: with the error itself, a handler that keeps log records would keep this and all its memory.
            logger.log(level, "no device memory for optimizer state, updating on the host instead: %s", str(error))
            return None
