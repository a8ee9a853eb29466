"""State on the device: residents, and slots through which other state passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy, Device, Job
from dos.devices.base import Promise, has_ended
from dos.state.arena import State
from dos.state.subgroup import Subgroup
from perfmodel import Op
from perfmodel.lanes import Stream
from perfmodel.plan import Tier

logger = logging.getLogger(__name__)

SHORT = 1 / 4
"""The share of free device memory below which other processes may need what the allocator caches."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Device memory, and the jobs that use it.

    uses: the last one of each stream, because streams are in order, and each promise, which may never be issued.
    last: the last one, behind which all others have ended, or failed.
    """

    memory: Tensor
    uses: dict[Stream | Promise, Job] = field(default_factory=dict)
    last: Sequence[Job] = ()

    def __repr__(self) -> str:
        """Say which jobs use the memory, without a wait."""
        running = [key.name for key, job in self.uses.items() if isinstance(key, Stream) and not has_ended(job)]
        return f"<Buffer: {self.memory.nbytes} bytes, {'in use by ' + ', '.join(running) if running else 'not in use'}>"

    def use(self, stream: Stream, job: Job) -> None:
        """Note a job that reads or writes the memory."""
        self.uses[job if isinstance(job, Promise) else stream] = job
        self.last = (job,)

    def wait(self) -> None:
        """Block until no job uses the memory, which the allocator then gives to other code.

        Failures do not matter: who needs what was to be there waits for the job, too.
        """
        for job in self.uses.values():
            with suppress(Exception):
                job.wait()


class Resident(NamedTuple):
    """The room of a resident subgroup, and its state there. nbytes: as plans count it, without alignment."""

    buffer: Buffer
    state: State
    nbytes: int


class DeviceStore:
    """State in device memory, and slots through which it passes. A failed allocation is an answer, not an error.

    resident: rooms of state that stays here, by subgroup; one that no job uses is empty. slots: staging buffers of
        equal size.
    trims: whether state has moved off the device in a step, so that the allocator caches its memory.
    denied: the bytes of state here when an allocation failed unexpectedly in this step; None if none has.
    nbytes: of residents and slots together. resident_bytes: of the state of residents, as plans count it. Both may be
        read on any thread.
    """

    def __init__(self, device: Device) -> None:
        self.resident: dict[Subgroup, Resident] = {}
        self.slots: list[Buffer] = []
        self.denied: int | None = None
        self.trims = False
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
        room = self.resident.get(subgroup)
        return subgroup.arena.tier is Tier.DEVICE if room is None else bool(room.buffer.last)

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
            room = Resident(buffer, subgroup.state.carve(buffer.memory), subgroup.load().state_bytes)
            self.resident[subgroup] = room
            self.resident_bytes += room.nbytes
        return []

    def drop(self, subgroup: Subgroup) -> None:
        """Drop a resident subgroup's room, once no job uses it. Its state must be at home."""
        self.resident[subgroup].buffer.wait()  # before anything changes: Ctrl-C may end it
        room = self.resident.pop(subgroup)
        self.resident_bytes -= room.nbytes
        self._free(room.buffer)

    def drop_empty(self) -> None:
        for subgroup in [subgroup for subgroup, room in self.resident.items() if not room.buffer.last]:
            self.drop(subgroup)

    def fetch(self, subgroup: Subgroup) -> State:
        """Return the subgroup's state in its room, or in the slot that it occupies."""
        if subgroup.arena.tier is Tier.DEVICE:
            return subgroup.state
        return self.resident[subgroup].state if subgroup in self.resident else self._in_slots[subgroup]

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        copies = self.fetch(subgroup).moves(source, to_host=False)
        return self.device.copy(Op.PREFETCH, number, [*copies, *further] if further else copies, after)

    def occupy(self, subgroup: Subgroup, slot: int) -> None:
        """Let the subgroup's state pass through this slot, until slots are released."""
        self._in_slots[subgroup] = subgroup.in_slot(self.slots[slot].memory)

    @property
    def filled(self) -> dict[Subgroup, Job]:
        """Before a step: the subgroups that occupy slots, in the order of these, with their fetches."""
        return {subgroup: slot.last[0] for subgroup, slot in zip(self._in_slots, self.slots, strict=False) if slot.last}

    def use(self, stream: Stream, job: Job, subgroups: Iterable[Subgroup], slot: int | None) -> None:
        """Note a job that uses the rooms of these, those that have any, and a slot."""
        for subgroup in subgroups:
            if subgroup in self.resident:
                self.resident[subgroup].buffer.use(stream, job)
        if slot is not None:
            self.slots[slot].use(stream, job)

    def gradient_part(self, subgroup: Subgroup, slot: int) -> Tensor:
        """Return the part of a slot that the subgroup's state does not take."""
        return self.slots[slot].memory[0 if self.has_room(subgroup) else subgroup.state.carved_bytes :]

    def get_slots(self, count: int, nbytes: int) -> None:
        """Allocate up to `count` slots of `nbytes`, fewer if memory runs out."""
        for _ in range(count):
            slot = self._allocate(nbytes)
            if slot is None:
                break
            self.slots.append(slot)

    def release_slots(self) -> None:
        """Release the slots, once no job uses them. State that backward has fetched there is still at home."""
        while self.slots:
            self.slots[-1].wait()
            self._free(self.slots.pop())
        self._in_slots = {}

    def trim(self) -> None:
        """Return the memory of state that has moved off the device to other processes, if little else is free.

        Blocks until the device is idle, and so does every thread that queues work meanwhile: never call it in a hook,
        nor beside a step.
        """
        if self.trims:
            free, total = self.device.memory()
            if free < SHORT * total:
                self.trims = False
                self.device.trim()

    def _free(self, buffer: Buffer) -> None:
        self.nbytes -= buffer.memory.nbytes
        self.device.free(buffer.memory)

    def _allocate(self, nbytes: int) -> Buffer | None:
        try:
            memory = self.device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            level = logging.DEBUG if self._logged or self._expected else logging.WARNING
            if not self._expected:
                self._logged, self.denied = True, self.nbytes
            # As text: a handler that stores log records would keep the error alive, and by its frames this store.
            logger.log(level, "no device memory for optimizer state, updating on the host instead: %s", str(error))
            return None
        self.nbytes += nbytes
        return Buffer(memory)
