"""Emulated devices that are late, or tell what they are asked for."""

from __future__ import annotations

import errno
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.devices import Cached, Caller, Copy, Job, Memory
from dos.guard import renewed
from dos.planning.monitor import Budget, MemoryMonitor
from dos.step.transit import drain_streams
from perfmodel import Lane, Op
from perfmodel.hardware import HardwareProfile
from tests.support.disk import Requests, Result, Transfer
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


def synchronize_devices() -> None:
    """Wait for all copies, as torch.cuda.synchronize() does, of which the optimizer does not know."""
    for device in [each for each in renewed if isinstance(each, EmulatedDevice)]:
        drain_streams(device)


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


MESSAGE = "the cable came off"
ALL = "of all kinds"


class FaultyDevice(EmulatedDevice):
    """Counts what it is asked for; of one kind, or of all, that with one of some numbers goes wrong.

    late: whether a copy or update goes wrong when it runs, not when it is asked for. hit: what went wrong last.
    """

    def __init__(self, error: type[Exception] = ValueError) -> None:
        """error: what copies and updates raise."""
        self.asked, self.kind, self.at, self.late, self.hit = Counter[str](), ALL, frozenset[int](), False, ""
        self.error = error
        super().__init__(FAST, capacity=10**7)

    def fail(self, kind: str, *numbers: int, late: bool = False) -> None:
        """Go wrong at these, of this kind, counted from 1 and from now on."""
        self.kind, self.late, self.at = kind, late, frozenset(self.asked[kind] + number for number in numbers)

    def replace_transfer(self, transfer: Transfer) -> Transfer:
        """Of the disk: half of one is done, and then it fails."""

        def replaced(write: bool, requests: Requests, threads: int) -> Result:
            if not self._goes_wrong("disk"):
                return transfer(write, requests, threads)
            half = requests[: len(requests) // 2]
            transfer(write, half, threads)
            return [0] * len(requests), len(half), 0, errno.EIO

        return replaced

    def _goes_wrong(self, what: str) -> bool:
        self.asked += Counter((ALL, what))
        wrong = self.kind in (ALL, what) and self.asked[self.kind] in self.at
        self.hit = what if wrong else self.hit
        return wrong

    def _queue(
        self, op: Op, subgroup: int, work: Callable[[], None], alone_s: float, traffic: int, after: Sequence[Job]
    ) -> Job:
        if not self._goes_wrong(op.value):
            return super()._queue(op, subgroup, work, alone_s, traffic, after)
        if not self.late:
            raise self.error(MESSAGE)

        def fail() -> None:
            raise self.error(MESSAGE)

        return super()._queue(op, subgroup, fail, alone_s, traffic, after)

    def host_update(self, numel: int, traffic: int, *state_format: str) -> AbstractContextManager[float]:
        if self._goes_wrong("host update"):
            raise self.error(MESSAGE)
        return super().host_update(numel, traffic, *state_format)

    def allocate(self, nbytes: int) -> Tensor:
        if self._goes_wrong("memory"):
            raise torch.OutOfMemoryError(MESSAGE)
        return super().allocate(nbytes)

    def refill(self, buffer: Tensor) -> None:
        if self._goes_wrong("refill"):
            raise torch.OutOfMemoryError(MESSAGE)
        super().refill(buffer)

    def memory(self) -> Memory:
        if self._goes_wrong("reading"):
            raise OSError(MESSAGE)
        return super().memory()

    def join(self, job: Job) -> None:
        if self._goes_wrong("join"):
            raise self.error(MESSAGE)
        super().join(job)

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        if self._goes_wrong("fence"):
            raise self.error(MESSAGE)
        return super().fence(callers)


class Watched(EmulatedDevice):
    """Notes how many blocks have memory at a time, and how much all do.

    fetched: the blocks, in order. joins: how often a caller has waited for one.
    """

    def __init__(self, capacity: int = 10**8) -> None:
        super().__init__(FAST, capacity)
        self.filled: set[int] = set()
        self.most = 0
        self.fetched: list[int] = []
        self.fetches: weakref.WeakSet[Job] = weakref.WeakSet()
        self.joins = 0

    def refill(self, buffer: Tensor) -> None:
        super().refill(buffer)
        self.filled.add(id(buffer))
        self.most = max(self.most, len(self.filled))

    def empty(self, buffer: Tensor) -> None:
        super().empty(buffer)
        self.filled.discard(id(buffer))

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        job = super().copy(op, subgroup, copies, after)
        if op is Op.WEIGHTS:
            self.fetched.append(subgroup)
            self.fetches.add(job)
        return job

    def join(self, job: Job) -> None:
        self.joins += job in self.fetches
        super().join(job)


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

    def pin(self, tensor: Tensor) -> bool:
        self.pinned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        self.on_pin()
        return True

    @property
    def made(self) -> int:
        """Bytes."""
        return sum(end - first for first, end in self.pinned)


UUID, TOTAL = "GPU-5f1c", 10**6


class Card(EmulatedDevice):
    """A device that NVML may know. says: what its runtime says of its memory; unused: reserved and not used."""

    def __init__(self, uuid: str | None = UUID, free: int = 500_000, unused: int = 0) -> None:
        super().__init__(FAST, TOTAL)
        self.uuid = uuid
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
