"""An accelerator made of host memory: real copies and updates that take as long as on the hardware it emulates."""

from __future__ import annotations

import bisect
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dos.arguments import given_bytes, whole_number
from dos.devices.base import LANE_OF, Cached, Caller, Copy, Job, Mark, Memory, Moment, ThreadJob, memory_of
from dos.devices.pinned import unpin
from dos.guard import exclusive, renewed, submit
from dos.torch_internals.tensors import storage_address
from perfmodel import Lane, Op, Span
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANES, lane_speeds

Occupancy = int | Callable[[], int]
"""Bytes: a constant, or a function that returns the present number."""


@dataclass(frozen=True)
class Script:
    """Bytes that follow a script.

    points: (position, bytes) in order of position; each holds until the next one.
    position: returns the present position, in the unit of the points, such as seconds or iterations.
    period: the position at which the script begins again; None: the last point holds for ever.

    Raises ValueError for no point, points out of order, or bytes below 0.
    """

    points: Sequence[tuple[float, int]]
    position: Callable[[], float]
    period: float | None = None

    def __post_init__(self) -> None:
        positions = [at for at, _ in self.points]
        if not positions or positions != sorted(positions):
            raise ValueError(f"a script needs points in order of position, found positions {positions}")
        if min(nbytes for _, nbytes in self.points) < 0:
            raise ValueError("a script's bytes must be 0 or more")

    def __call__(self) -> int:
        """Return the bytes at the present position."""
        at = self.position()
        if self.period is not None:
            at %= self.period
        return self.points[max(0, bisect.bisect_right(self.points, at, key=lambda point: point[0]) - 1)][1]


class Usage(NamedTuple):
    """Bytes of an emulated device that the model, the optimizer and the neighbour take."""

    occupied: int
    held: int
    neighbour: int


Storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]
"""Memory that counts as long as anything refers to it, by the address of the storage."""


def _nbytes(storages: Storages) -> int:
    # A list of references first, because other threads allocate meanwhile.
    return sum([storage.nbytes() for each in storages.valuerefs() if (storage := each()) is not None])


_REMEDY = (
    "offload gradients or activations, train a smaller batch, call release_memory(), or give EmulatedDevice a larger "
    "capacity"
)


def _checked(profile: object) -> HardwareProfile:
    """Return a profile, or the built-in one of this name. Raises TypeError or ValueError for anything else."""
    if isinstance(profile, str):
        return HardwareProfile.builtin(profile)
    if not isinstance(profile, HardwareProfile):
        raise TypeError(
            f"profile must be a perfmodel.hardware.HardwareProfile, or the name of a built-in one, found {profile!r}"
        )
    return profile


def _occupancy(found: object, what: str) -> Occupancy:
    """Return bytes, or the user's function. Raises TypeError or ValueError for anything else."""
    return found if callable(found) else whole_number(found, what, "bytes")


def _now(occupancy: Occupancy, what: str) -> int:
    """Return the present bytes. Raises TypeError or ValueError if the user's function gives none."""
    return given_bytes(occupancy(), what) if callable(occupancy) else occupancy


Speeds = Callable[[Mapping[Lane, float]], Mapping[Lane, float]]
"""Busy lanes, with the host DRAM bytes/s that each would cause alone -> speeds as fractions of the speeds alone."""

_DONE_S = 1e-6
"""Work with less than this many seconds left counts as done, because waits are not more exact."""


@dataclass(eq=False)
class _Work:
    """A place in a lane's queue.

    remaining: seconds that it still takes when no other lane is busy. demand: bytes/s of host DRAM meanwhile.
    """

    remaining: float
    demand: float
    urgent: bool
    begun: bool = False


class Pacer:
    """Serves one piece of work per lane at a time, first come first served; lanes slow each other by `speeds`.

    Urgent work interrupts other work, which continues afterwards.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._lock = threading.Lock()
        # One for each lane: a thread that was woken for nothing would hold Python's lock up for the others.
        self._changed = {lane: threading.Condition(self._lock) for lane in Lane}
        self._queues: dict[Lane, deque[_Work]] = {lane: deque() for lane in Lane}
        self._speed: Mapping[Lane, float] = {}
        self._advanced = 0.0

    @contextmanager
    def serve(self, lane: Lane, alone_s: float, traffic: float = 0.0, *, urgent: bool = False) -> Iterator[float]:
        """Occupy the lane while the body runs, and for at least as long as work of `alone_s` seconds takes on it.

        alone_s: seconds that the work takes when no other lane is busy. traffic: bytes that it moves through host DRAM.
        Yields the time.perf_counter() of its start.
        """
        work = _Work(alone_s, traffic / alone_s if alone_s > 0 else 0.0, urgent)
        start = self._enter(lane, work)
        try:
            yield start
        finally:
            self._leave(lane, work)

    def _enter(self, lane: Lane, work: _Work) -> float:
        with self._lock:
            queue = self._queues[lane]
            self._advance()  # urgent work may take the place of the work that is being served
            queue.insert(sum(other.urgent for other in queue) if work.urgent else len(queue), work)
            while queue[0] is not work:
                self._changed[lane].wait()
            self._advance()
            work.begun = True
            self._share()
            return self._advanced

    def _leave(self, lane: Lane, work: _Work) -> None:
        with self._lock:
            queue = self._queues[lane]
            self._advance()
            # Urgent work may have taken the first place meanwhile, and this work continues after it.
            while queue[0] is not work or work.remaining > _DONE_S:
                self._changed[lane].wait(work.remaining / self._speed[lane] if queue[0] is work else None)
                self._advance()
            queue.popleft()
            self._changed[lane].notify_all()
            self._share()

    def _advance(self) -> None:
        """Account for the time since the last call at the speeds that held."""
        now = time.perf_counter()
        for lane, queue in self._queues.items():
            if queue and queue[0].begun:
                queue[0].remaining = max(0.0, queue[0].remaining - (now - self._advanced) * self._speed[lane])
        self._advanced = now

    def _share(self) -> None:
        """Compute the speeds of another set of busy lanes, and wake the threads whose work takes another time now."""
        demands = {lane: queue[0].demand for lane, queue in self._queues.items() if queue and queue[0].begun}
        before, self._speed = self._speed, self._speeds(demands)
        for lane, speed in self._speed.items():
            if speed != before.get(lane):
                self._changed[lane].notify_all()


class EmulatedDevice:
    """Emulates an accelerator and its host; parameters are ordinary CPU tensors that count as being on it.

    profile: rates of the links, the device, the host's update and the disk, or the name of a built-in profile.
        `profile.scaled(1 / 500)` makes a large machine's proportions last long enough to be reproduced by a small one.
    capacity: device memory in bytes.
    occupied: bytes that the model and its activations take; the most that they ever took stays reserved for them.
        Tensors for which `count` was called are added: saved tensors, where these are offloaded, and gradients.
    neighbour: bytes that another process wants; it takes the bytes that are free and waits for the rest.
    peak_bytes: the most bytes in use. own_peak_bytes: without the neighbour. unmet_bytes: the bytes for which the
        neighbour waits.

    Copies and updates are real, each stream runs on a thread of its own, and a lane serves one of them at a time.
    Allocations past the capacity raise torch.OutOfMemoryError. Copies and pickles of an emulated device are new devices
    of the same make, except `copy.deepcopy`, which returns the device itself, as for a torch device.

    Raises TypeError or ValueError for another profile, or for bytes that are no whole number of 0 or more.
    """

    uuid = None  # NVML does not know it
    shares_host_memory = False  # it emulates a machine where it does not
    owner: Caller = None
    queues = False  # the caller's computation is its own
    event_query = 0

    def __init__(
        self,
        profile: HardwareProfile | str,
        capacity: int,
        occupied: Occupancy = 0,
        *,
        neighbour: Occupancy = 0,
    ) -> None:
        self.profile = self.known_profile = _checked(profile)
        self._speed = functools.cache(self.profile.speed)
        self.capacity = whole_number(capacity, "capacity", "bytes")
        self.occupied = _occupancy(occupied, "occupied")
        self.neighbour = _occupancy(neighbour, "neighbour")
        self.caller_number: Callable[[], int] = int  # 0: there is one queue
        self.peak_bytes = 0
        self.own_peak_bytes = 0
        self.unmet_bytes = 0
        self._live: Storages = weakref.WeakValueDictionary()
        self._counted: Storages = weakref.WeakValueDictionary()
        self._reserved = 0
        self._granted = 0
        self.renew()
        self.usage()
        if self.peak_bytes > self.capacity:
            raise ValueError(f"occupied must lie in [0, capacity={self.capacity}] bytes, found {self.peak_bytes}")
        renewed.add(self)

    def __repr__(self) -> str:
        return f"EmulatedDevice({self.profile.name}, {self.capacity / 2**20:.1f} MiB)"

    def __deepcopy__(self, memo: dict[int, object]) -> EmulatedDevice:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(EmulatedDevice, neighbour=self.neighbour), (
            self.profile,
            self.capacity,
            self.occupied,
        )

    def renew(self) -> None:
        """Start threads; a forked child does not inherit the parent's."""
        # A bound method would form a cycle: the threads would stay until the garbage collector runs.
        self._pacer = Pacer(functools.partial(EmulatedDevice._speeds, weakref.proxy(self)))
        self._lock = threading.RLock()  # `allocate` calls `usage`, and so may a destructor that runs meanwhile
        # In-order streams: one worker thread each.
        self._streams = {op: ThreadPoolExecutor(1, thread_name_prefix=f"dos-emulated-{op.value}") for op in LANE_OF}

    @property
    def name(self) -> str:
        return f"emulated {self.profile.name}"

    def capturing(self) -> bool:
        return False

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def pin(self, tensor: Tensor) -> bool:
        return True

    def unpin(self, tensor: Tensor, unused: Tensor) -> None:
        unpin(tensor, unused)

    def allocate_pinned(self, nbytes: int) -> None:
        return None

    @exclusive
    def allocate(self, nbytes: int) -> Tensor:
        self._check(nbytes)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._hold(buffer)
        return buffer

    def _check(self, nbytes: int) -> None:
        free = self._free()
        if nbytes > free:
            raise torch.OutOfMemoryError(
                f"emulated device out of memory: {nbytes} bytes asked for, {free} of {self.capacity} free; {_REMEDY}"
            )

    def _hold(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        self._live[storage_address(storage)] = storage
        self.usage()

    def refill(self, buffer: Tensor) -> None:
        self._drain_if_short(buffer.nbytes)
        self._refill(buffer)

    @exclusive
    def _refill(self, buffer: Tensor) -> None:
        self._check(buffer.nbytes)
        buffer.untyped_storage().resize_(buffer.nbytes)
        self._hold(buffer)

    def empty(self, buffer: Tensor) -> None:
        buffer.untyped_storage().resize_(0)
        self.free(buffer)

    def free(self, buffer: Tensor) -> None:
        self._live.pop(storage_address(buffer.untyped_storage()), None)
        self.usage()

    def keep(self, buffer: Tensor, op: Op | None = None) -> None:
        pass  # copies refer to their memory, and the caller's computation has ended when it returns

    def count(self, tensor: Tensor) -> None:
        storage = memory_of(tensor)
        if storage is None or storage_address(storage) in self._live or storage_address(storage) in self._counted:
            return
        nbytes = storage.nbytes()
        free = self._drain_if_short(nbytes)
        if nbytes > free:
            raise torch.OutOfMemoryError(
                f"emulated device out of memory: a tensor of {nbytes} bytes was made, {free} of {self.capacity} free; "
                f"{_REMEDY}"
            )
        self._counted[storage_address(storage)] = storage
        self.usage()

    def _drain_if_short(self, nbytes: int) -> int:
        """Return the free bytes; if they are less than `nbytes`, after waiting for queued work.

        The caching allocator does the same before it fails: queued work may refer to gradients of the last step.
        """
        free = self._free()
        if nbytes <= free:
            return free
        # A stream is in order: an empty job ends after all work that may refer to memory.
        for stream in self._streams.values():
            stream.submit(lambda: None).result()
        return self._free()

    def memory(self) -> Memory:
        return Memory(self._free(), self.capacity)

    def cached(self) -> Cached:
        usage = self.usage()
        return Cached(usage.occupied + usage.held, 0)  # the free bytes of `memory` include unused ones

    def trim(self) -> None:
        pass

    @exclusive
    def usage(self) -> Usage:
        """Let the neighbour take as many of the bytes that it wants as are free, and return the bytes of each."""
        occupied = _nbytes(self._counted) + _now(self.occupied, "occupied")
        held = _nbytes(self._live)
        wanted = _now(self.neighbour, "neighbour")
        self._reserved = max(self._reserved, occupied)
        self._granted = min(wanted, max(self._granted, self.capacity - self._reserved - held))
        self.unmet_bytes = wanted - self._granted
        usage = Usage(occupied, held, self._granted)
        self.peak_bytes = max(self.peak_bytes, sum(usage))
        self.own_peak_bytes = max(self.own_peak_bytes, occupied + held)
        return usage

    def _free(self) -> int:
        """Return the bytes that are free for the optimizer."""
        return max(0, self.capacity - sum(self.usage()))

    def join(self, job: Job) -> None:
        job.wait()  # the caller computes on its own thread, so it must not continue before

    def caller(self) -> Caller:
        return None

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        return ()  # the caller computes on its own thread: its work has ended when it returns

    def mark(self) -> Mark:
        return Moment(time.perf_counter())  # all work has ended when it is issued

    def copy(
        self,
        op: Op,
        subgroup: int,
        copies: Sequence[Copy],
        after: Sequence[Job] = (),
        then: Callable[[], None] | None = None,
    ) -> Job:
        def work() -> None:
            for destination, source in copies:
                destination.copy_(source)
            if then is not None:
                then()

        nbytes = sum(source.nbytes for _, source in copies)
        return self._queue(op, subgroup, work, LANES[LANE_OF[op]].seconds(nbytes, self.profile), nbytes, after)

    def launch(
        self,
        subgroup: int,
        update: Callable[[], None],
        numel: int,
        after: Sequence[Job] = (),
        reads: Sequence[Tensor] = (),
        state_format: str = MIXED.name,
    ) -> Job:
        # A reference until this has run: user code may release gradients once step() has returned, and malloc would
        # reuse their memory.
        def work(_held: Sequence[Tensor] = reads) -> None:
            update()

        size = numel / self._speed(Lane.GPU, state_format)
        alone_s = LANES[LANE_OF[Op.UPDATE]].seconds(size, self.profile)
        return self._queue(Op.UPDATE, subgroup, work, alone_s, 0, after)

    def bind_host_thread(self) -> None:
        pass

    @property
    def only_clocks_updates(self) -> bool:
        return False

    def host_update(self, numel: int, traffic: int, state_format: str = MIXED.name) -> AbstractContextManager[float]:
        alone_s = LANES[Lane.CPU].seconds(numel / self._speed(Lane.CPU, state_format), self.profile)
        return self._pacer.serve(Lane.CPU, alone_s, traffic * self.profile.cpu_traffic_factor)

    def disk_io(self, lane: Lane, nbytes: int) -> AbstractContextManager[float]:
        return self._pacer.serve(lane, LANES[lane].seconds(nbytes, self.profile), nbytes)

    def _speeds(self, demands: Mapping[Lane, float]) -> Mapping[Lane, float]:
        """Return the speeds of lanes that slow each other down, by the simulator's rule."""
        busy = {number: demands[lane] for number, lane in enumerate(LANES) if lane in demands}
        return dict(zip(LANES, lane_speeds(busy, self.profile), strict=True))

    def _queue(
        self, op: Op, subgroup: int, work: Callable[[], None], alone_s: float, traffic: int, after: Sequence[Job]
    ) -> Job:
        urgent = op in (Op.SAVE, Op.RESTORE, Op.WEIGHTS)

        def run() -> Span:
            # Streams cannot wait for each other in a circle: this one waits only for work that was issued before.
            for job in after:
                job.wait()
            with torch.no_grad(), self._pacer.serve(LANE_OF[op], alone_s, traffic, urgent=urgent) as start:
                work()
            return Span(LANE_OF[op], op, subgroup, start, time.perf_counter(), traffic)

        return ThreadJob(submit(self._streams[op], run))
