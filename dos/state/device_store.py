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
    """The room of a resident subgroup, and its state there. nbytes: as plans count it, without alignment."""

    buffer: Tensor
    state: State
    nbytes: int


class DeviceStore:
    """State in device memory, and slots through which it passes. A failed allocation is an answer, not an error.

    resident: state that stays here, by subgroup. empty: of these, the rooms to which no state was copied yet, and which
        no update has written. slots: staging buffers of equal size.
    denied: the bytes of state here when an allocation failed unexpectedly in this step; None if none has.
    nbytes: of residents and slots together. resident_bytes: of the state of residents, as plans count it. Both may be
        read on any thread.
    """

    def __init__(self, device: Device) -> None:
        self.resident: dict[Subgroup, Resident] = {}
        self.empty: set[Subgroup] = set()
        self.slots: list[Tensor] = []
        self.denied: int | None = None
        self.device = device
        self.nbytes = 0
        self.resident_bytes = 0
        self._in_slots: dict[Subgroup, State] = {}
        """State that passes through a slot, by subgroup."""
        self._expected = False
        self._logged = False

    def expect_denials(self, expected: bool) -> None:
        """Begin a step. expected: whether failed allocations are expected in it, and so not stored in `denied`."""
        self._expected, self.denied = expected, None

    def has(self, subgroup: Subgroup) -> bool:
        # Without a call of `has_room`: each step asks for each subgroup.
        return subgroup not in self.empty and (subgroup in self.resident or subgroup.arena.tier is Tier.DEVICE)

    def has_room(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup has room here, to which its state may have yet to come."""
        return subgroup in self.resident or subgroup.arena.tier is Tier.DEVICE

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Allocate room for the state of these, where they have none, until memory runs out; return the subgroups left.

        A failed allocation is expensive: the caching allocator first returns all its unused memory to the device, and
        waits for it.
        """
        wanted = [subgroup for subgroup in subgroups if not self.has_room(subgroup)]
        for place, subgroup in enumerate(wanted):
            buffer = self._allocate(subgroup.state.carved_bytes)
            if buffer is None:
                return wanted[place:]
            room = Resident(buffer, subgroup.state.carve(buffer), subgroup.load().state_bytes)
            self.resident[subgroup] = room
            self.empty.add(subgroup)
            self.nbytes += buffer.nbytes
            self.resident_bytes += room.nbytes
        return []

    def drop(self, subgroup: Subgroup) -> None:
        """Drop a resident subgroup's room. Its state must be at home, and no transfer in flight may use the room."""
        room = self.resident.pop(subgroup)
        self.empty.discard(subgroup)
        self.nbytes -= room.buffer.nbytes
        self.resident_bytes -= room.nbytes
        self.device.free(room.buffer)

    def drop_empty(self) -> None:
        for subgroup in [*self.empty]:
            self.drop(subgroup)

    def fetch(self, subgroup: Subgroup) -> State:
        """Return the subgroup's state in its room, or in the slot that it occupies."""
        if subgroup.arena.tier is Tier.DEVICE:
            return subgroup.state
        return self.resident[subgroup].state if subgroup in self.resident else self._in_slots[subgroup]

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        self.empty.discard(subgroup)
        copies = state_copies(self.fetch(subgroup), source)
        return self.device.copy(Op.PREFETCH, number, [*copies, *further], after)

    def occupy(self, subgroup: Subgroup, slot: int) -> None:
        """Let the subgroup's state pass through this slot, until slots are released."""
        self._in_slots[subgroup] = subgroup.state.carve(self.slots[slot])

    def gradient_part(self, subgroup: Subgroup, slot: int) -> Tensor:
        """Return the part of a slot that the subgroup's state does not take."""
        return self.slots[slot][0 if self.has_room(subgroup) else subgroup.state.carved_bytes :]

    def get_slots(self, count: int, nbytes: int) -> None:
        """Allocate up to `count` slots of `nbytes`, fewer if memory runs out."""
        for _ in range(count):
            slot = self._allocate(nbytes)
            if slot is None:
                break
            self.slots.append(slot)
            self.nbytes += slot.nbytes

    def release_slots(self) -> None:
        """Release the slots. No transfer in flight may use them."""
        self._in_slots = {}
        while self.slots:
            slot = self.slots.pop()
            self.nbytes -= slot.nbytes
            self.device.free(slot)

    def _allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self.device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            level = logging.DEBUG if self._logged or self._expected else logging.WARNING
            if not self._expected:
                self._logged, self.denied = True, self.nbytes
            # As text: a handler that stores log records would keep the error alive, and by its frames this store.
            logger.log(level, "no device memory for optimizer state, updating on the host instead: %s", str(error))
            return None
