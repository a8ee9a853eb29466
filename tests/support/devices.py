"""Emulated devices that are late, or tell what they are asked for."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.devices import Cached, Copy, Job, Memory
from dos.planning.monitor import Budget, MemoryMonitor
from perfmodel import Lane, Op
from perfmodel.hardware import HardwareProfile
from tests.support.training import FAST


class UpdatesAfterStep(EmulatedDevice):
    """Begins no update on the host before `returned` is set: a `step` that waits for one never returns."""

    def __init__(self, profile: HardwareProfile, capacity: int) -> None:
        super().__init__(profile, capacity)
        self.returned = threading.Event()
        self.returned.set()

    def host_update(self, numel: int, traffic: int, *state_format: str) -> AbstractContextManager[float]:
        assert self.returned.wait(60), "step() waits for its updates"
        return super().host_update(numel, traffic, *state_format)


class LateDevice(EmulatedDevice):
    """Delays each copy, update, read and write by so many seconds, behind all that it waits for."""

    def __init__(self, delay: Callable[[Op], float]) -> None:
        super().__init__(FAST, capacity=10**9)
        self.delay = delay

    def _queue(self, op: Op, subgroup: int, work: Callable[[], None], *rest: Any) -> Job:
        seconds = self.delay(op)

        def late() -> None:
            time.sleep(seconds)
            work()

        return super()._queue(op, subgroup, late, *rest)

    def disk_io(self, lane: Lane, nbytes: int) -> AbstractContextManager[float]:
        time.sleep(self.delay(Op.READ if lane is Lane.READ else Op.WRITE))
        return super().disk_io(lane, nbytes)


def jittery_device(seed: int) -> LateDevice:
    """Delays are random, so that lanes overtake each other in every way."""
    drawn = random.Random(seed)
    return LateDevice(lambda op: drawn.uniform(0, 2e-3))


class Amount:
    """Bytes that a test sets, for `occupied` and `neighbour` of an emulated device."""

    nbytes = 0

    def __call__(self) -> int:
        return self.nbytes


LIES: dict[str, Callable[[Memory], Memory]] = {
    "all is free": lambda true: Memory(true.total, true.total),
    "nothing is free": lambda true: Memory(0, true.total),
    "nonsense": lambda true: Memory(-1, 10),
}
"""What a device says of its memory instead."""


class Unreliable(EmulatedDevice):
    """Fails to allocate, is late, and tells of its memory what is not so, each now and then.

    failing: how often it does not allocate, whatever is free. failures: how often it has not.
    late: the most seconds by which a copy or update is late. lie: of `LIES`, told at every third reading.
    """

    def __init__(
        self,
        failing: float = 0.0,
        capacity: int = 10**6,
        seed: int = 0,
        *,
        late: float = 0.0,
        lie: str | None = None,
        profile: HardwareProfile = FAST,
        **memory: Any,
    ) -> None:
        self.failing, self.late, self.lie = failing, late, lie
        self.random, self.failures, self.readings = random.Random(seed), 0, 0
        super().__init__(profile, capacity, **memory)

    def _queue(self, op: Op, subgroup: int, work: Callable[[], None], *rest: Any) -> Job:
        seconds = self.random.uniform(0, self.late) if self.late else 0.0
        return super()._queue(op, subgroup, lambda: (time.sleep(seconds) if seconds else None, work())[1], *rest)

    def allocate(self, nbytes: int) -> Tensor:
        if self.random.random() < self.failing:
            self.failures += 1
            raise torch.OutOfMemoryError("so it was rolled")
        return super().allocate(nbytes)

    def memory(self) -> Memory:
        true = super().memory()
        self.readings += 1
        return true if self.lie is None or self.readings % 3 else LIES[self.lie](true)


class Asked(NamedTuple):
    """A copy that a device is asked for, of so many pieces of memory."""

    op: Op
    subgroup: int
    pieces: int
    nbytes: int


class Copying(EmulatedDevice):
    """Notes the copies that it is asked for. jobs: those that are not forgotten."""

    def __init__(self, profile: HardwareProfile = FAST) -> None:
        super().__init__(profile, capacity=10**9)
        self.asked: list[Asked] = []
        self.jobs: weakref.WeakSet[Job] = weakref.WeakSet()

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        self.asked.append(Asked(op, subgroup, len(copies), sum(source.nbytes for _, source in copies)))
        job = super().copy(op, subgroup, copies, after)
        self.jobs.add(job)
        return job


class CopyingAtOnce(Copying):
    """Has each copy made when it returns, so that what is written next is not in it."""

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        job = super().copy(op, subgroup, copies, after)
        job.wait()
        return job


class Pinning(EmulatedDevice):
    """Notes the host memory that is pinned, by its first byte and its end. on_pin: is called then."""

    def __init__(self, capacity: int = 10**9, on_pin: Callable[[], None] = lambda: None) -> None:
        super().__init__(FAST, capacity)
        self.pinned: list[tuple[int, int]] = []
        self.on_pin = on_pin

    def pin(self, tensor: Tensor) -> None:
        self.pinned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        self.on_pin()

    @property
    def made(self) -> int:
        """Bytes."""
        return sum(end - first for first, end in self.pinned)


UUID, TOTAL = "GPU-5f1c", 10**6


class Card(EmulatedDevice):
    """A device that NVML may know. says: what its runtime says of its memory; unused: reserved and not used."""

    def __init__(self, uuid: str | None = UUID, free: int = 500_000, unused: int = 0) -> None:
        super().__init__(FAST, TOTAL)
        self.uuid = uuid  # type: ignore[misc]
        self.says = Memory(free, TOTAL)
        self.unused = unused
        self.reads = 0

    def memory(self) -> Memory:
        self.reads += 1
        return self.says

    def cached(self) -> Cached:
        return Cached(TOTAL, self.unused)  # whatever is not free is this process's own


def monitor_of(device: Card, budget: Budget = None) -> MemoryMonitor:
    return MemoryMonitor(device, held=lambda: 0, budget=budget)
