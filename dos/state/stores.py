"""What holds optimizer state, one store for each tier: homes on the host, residents and slots on the device.

Both have the same verbs: whether it `has` a subgroup's state, and `take` room for that. At home a
subgroup knows where its state is. Only on the device is room given back, with `drop`.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from dos.devices import Device
from dos.machine.host_memory import reserve
from dos.state.arena import State
from dos.state.host_tensor import HostTensor
from dos.state.subgroup import Subgroup
from perfmodel.plan import Tier

logger = logging.getLogger(__name__)

TELL_S = 5.0
"""Seconds between two messages about memory that is being pinned."""


class HostStore:
    """State in host memory, and what travels through there. What was taken once stays taken."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        self._apart: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        """State of which parts were pinned since users last got views of it."""

    @property
    def nbytes(self) -> int:
        """Host memory that was made."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def has(self, subgroup: Subgroup) -> bool:
        """Whether the subgroup's state has been here."""
        return all(tensor.has(subgroup.start, subgroup.stop) for tensor in subgroup.arena.home())

    def stages(self, subgroup: Subgroup) -> bool:
        """Whether its gradients can travel through here."""
        return all(tensor.has(subgroup.start, subgroup.stop) for tensor in subgroup.arena.incoming())

    def take(
        self,
        homes: Iterable[Subgroup] = (),
        *,
        incoming: Iterable[Subgroup] = (),
        outgoing: Iterable[Subgroup] = (),
    ) -> None:
        """Make room for the state of some subgroups, gradients that come from others, parameters that go to others.

        Raises MemoryError, before any is made, if the host has not enough.
        """
        wanted = [(tensor, s) for s in homes for tensor in s.arena.home()]
        wanted += [(tensor, s) for s in incoming for tensor in s.arena.incoming()]
        self._make([*wanted, *((tensor, s) for s in outgoing for tensor in s.arena.outgoing())])

    def prepare(self, subgroups: Iterable[Subgroup]) -> None:
        """Make one more part of what these need once their state leaves the device, if the host has memory for it."""
        for s in subgroups:
            for tensor in (*s.arena.home(), *s.arena.incoming(), *s.arena.outgoing()):
                if not tensor.has(s.start, s.stop):
                    with contextlib.suppress(MemoryError):
                        self._make([(tensor, s)])
                    return

    def take_field(self, tensor: HostTensor, subgroups: Iterable[Subgroup]) -> None:
        """Make room for one more field of the state of these. Raises as `take`."""
        self._make([(tensor, subgroup) for subgroup in subgroups])

    def join_homes(self) -> None:
        """Make state ready for users, who copy views of it that span subgroups. No step may be in flight."""
        while self._apart:
            self._apart.pop().join()

    def _make(self, wanted: Iterable[tuple[HostTensor, Subgroup]]) -> None:
        missing = {(t, *t.part(s.start, s.stop)): None for t, s in wanted if not t.has(s.start, s.stop)}
        if missing:
            total = sum((last - first) * t.tensor.itemsize for t, first, last in missing)
            reserve(total, "optimizer state (DOSAdam)")
            began = told = time.perf_counter()
            done = 0
            for tensor, first, last in missing:
                if time.perf_counter() - told > TELL_S:
                    told = time.perf_counter()
                    logger.warning(
                        "pinning host memory for optimizer state, once: %d of %d GiB after %d s",
                        done >> 30,
                        total >> 30,
                        told - began,
                    )
                tensor.make(first, last)
                done += (last - first) * tensor.tensor.itemsize
                self._tensors.add(tensor)
                if tensor.shown:
                    self._apart.add(tensor)


class DeviceStore:
    """State in device memory, and slots through which it passes. A failed allocation is an answer, not an error.

    resident: state that has come here, by subgroup. slots: staging buffers of equal size.
    denied: bytes that were held when an allocation failed, if one has in this step that was not expected to.
    """

    def __init__(self, device: Device) -> None:
        self.resident: dict[Subgroup, State] = {}
        self.slots: list[Tensor] = []
        self.denied: int | None = None
        self._device = device
        self._buffers: dict[Subgroup, Tensor] = {}
        self._expected = False
        self._logged = False

    @property
    def nbytes(self) -> int:
        """Of residents and slots together; may be read from any thread."""
        return sum(buffer.nbytes for buffer in (*list(self._buffers.values()), *list(self.slots)))

    def expect_denials(self, expected: bool) -> None:
        """A step begins; in one that expects denials, they say nothing about the device's memory."""
        self._expected, self.denied = expected, None
        for subgroup in [s for s in self._buffers if s not in self.resident]:
            self._device.free(self._buffers.pop(subgroup))  # whose eviction was interrupted

    def has(self, subgroup: Subgroup) -> bool:
        """Whether there is room here that is the subgroup's own."""
        return subgroup in self.resident or subgroup.arena.tier is Tier.DEVICE

    def state(self, subgroup: Subgroup) -> State:
        """Where the subgroup's state is."""
        return subgroup.state if subgroup.arena.tier is Tier.DEVICE else self.resident[subgroup]

    def take(self, subgroup: Subgroup) -> State | None:
        """Room for a subgroup's state, uninitialised; None if there is none."""
        host = subgroup.state
        buffer = self._allocate(host.carved_bytes)
        if buffer is None:
            return None
        self._buffers[subgroup] = buffer
        self.resident[subgroup] = host.carve(buffer)
        return self.resident[subgroup]

    def drop(self, subgroup: Subgroup) -> None:
        """Free a resident subgroup's memory. Its state has come home; nothing in flight may use it."""
        del self.resident[subgroup]
        subgroup.batches.clear()  # which hold that memory
        self._device.free(self._buffers[subgroup])
        del self._buffers[subgroup]

    def get_slots(self, count: int, nbytes: int) -> None:
        """Allocate up to `count` slots of `nbytes`, fewer if memory runs out."""
        for _ in range(count):
            slot = self._allocate(nbytes)
            if slot is None:
                break
            self.slots.append(slot)

    def free_slots(self) -> None:
        """Give the slots back. Nothing in flight may use them."""
        while self.slots:
            self._device.free(self.slots[-1])
            self.slots.pop()  # not before: what is interrupted here is done again

    def _allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self._device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            level = logging.DEBUG if self._logged or self._expected else logging.WARNING
            if not self._expected:
                self._logged, self.denied = True, self.nbytes
            # As text: with the error itself, a handler that keeps log records would keep this and all its memory.
            logger.log(level, "no device memory for optimizer state, updating on the host instead: %s", str(error))
            return None
