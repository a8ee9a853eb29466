"""A CUDA device: torch streams and events, and pinned host memory of exact size."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dos.devices.base import LANE_OF, Behind, Cached, Caller, Copy, Job, Mark, Memory
from dos.devices.coalesce import PIECE_BYTES, Kept, Lent, Part, parts_of, queue_parts
from dos.devices.pinned import pin, unpin
from dos.devices.pinned_allocation import allocate_pinned
from dos.devices.ranges import named, names
from dos.devices.runtime import KINDS, runtime
from dos.guard import renewed
from dos.machine.host_memory import available_bytes
from dos.machine.threads import bind, bound_to, cores_near, leave_cores
from dos.torch_internals.operators import queue_empty_kernel
from dos.torch_internals.streams import find_stream_number
from perfmodel import Lane, Op, Span
from perfmodel.format import MIXED

logger = logging.getLogger(__name__)

TYPE, HANDLE, STREAM = "cuda", "cuda_event", "cuda_stream"
"""The type of the torch devices of torch.cuda, and the attributes of its events and streams that the runtime knows them
by. Tests set them to those of a simulated accelerator."""

_CLOCK_S = 1.0
"""Seconds after which a new clock is started: the clocks of host and device drift apart by microseconds meanwhile."""
_BRACKETS = 3
"""The number of times that the host reads the device's clock; the fastest reading is the most exact."""

_GENERAL = (0, 0)
"""The id of the caching allocator's own pool."""
_URGENT = (Op.SAVE, Op.RESTORE, Op.WEIGHTS)
"""Copies for which compute waits. No other copy runs between their pieces."""
Addresses = tuple[int, int, int]
"""A copy as the runtime takes it: to, from, bytes."""
_ALREADY = nullcontext()
"""In the place of torch.no_grad() where gradients are off, and of torch.cuda.device() where that is the current one."""
_HIGH, _NORMAL = -1, 0
"""Priorities of streams, which order kernels only: an update for which the next forward waits runs before others, and
the empty kernels between copies of state do not wait for compute."""


class CudaDevice:
    """The engine's view of one CUDA device.

    Only `Job.wait` waits for the device, and the constructor for an idle stream.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device(TYPE, torch.cuda.current_device() if device.index is None else device.index)
        self._index: int = self.torch_device.index
        self._streams, self._idle_stream = _streams_of(self.torch_device)
        self.caller_number: Callable[[], int] = partial(find_stream_number(), self._index)
        self._callers: dict[int, torch.cuda.Stream] = {}
        """The caller's streams by number."""
        self._yields = {op: _YieldCopyEngine(-1 if op in _URGENT else 0) for op in self._streams}
        self._numbers = {op: (getattr(s, STREAM), KINDS.get(LANE_OF[op], 0)) for op, s in self._streams.items()}
        """The streams, and the kinds of the copies there, as the runtime knows them."""
        self._runtime = runtime()
        """Queues jobs by one call; None: torch does, call by call."""
        self._leftovers, self._events = _leftovers_of(self.torch_device), _Events(self._idle_stream)
        self._lent: deque[tuple[_CudaJob, Sequence[object]]] = deque()
        """Gradients that copies in flight read. To tell the allocator of each lets go of Python's lock."""
        self._clock = self._start_clock()
        self._cores = cores_near(self._pci_address)
        self._segments = _Segments()
        self._peak: int | None = None
        """The most bytes in use, by the allocator's counter, when it was read last."""
        self.owner: Caller = self.caller()
        self._inherited = False
        renewed.add(self)
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            _warn_of_one_connection()

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device})"

    def __reduce__(self) -> tuple[object, ...]:
        return CudaDevice, (self.torch_device,)

    def renew(self) -> None:
        """Keep all events for ever in a forked child, which has no CUDA: their destructors would end the process."""
        self._inherited = True
        _leak(self._events)
        self._events = _Events(self._idle_stream)
        _leak(self)

    @cached_property
    def uuid(self) -> str | None:
        """The device's UUID as NVML writes it: "GPU-..." or, for a slice of one, "MIG-..."."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        if torch.version.hip is not None or self.shares_host_memory:
            return None  # NVML knows neither AMD's GPUs nor memory that is shared with the host
        # The runtime returns a slice's own UUID (cuDeviceGetUuid_v2), but only the name says that it is a slice.
        return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{properties.uuid}"

    @cached_property
    def shares_host_memory(self) -> bool:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return bool(getattr(properties, "is_integrated", False))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def known_profile(self) -> None:
        return None

    @property
    def event_query(self) -> int:
        return event_query()

    def capturing(self) -> bool:
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # torch was built without CUDA
            return False

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def pin(self, tensor: Tensor) -> bool:
        with self.current():
            self._leftovers.release()  # before more memory is pinned, so that the host need not hold both
        with bound_to(self._cores):  # so that the pages are allocated on the NUMA node of the device
            return pin(tensor, self.torch_device)

    def unpin(self, tensor: Tensor, unused: Tensor) -> None:
        with self.current():
            unpin(tensor, unused)

    def allocate_pinned(self, nbytes: int) -> Tensor | None:
        with bound_to(self._cores):
            return allocate_pinned(nbytes, self.torch_device)

    def allocate(self, nbytes: int) -> Tensor:
        with self._of_owner():
            return self._empty(nbytes)

    @contextmanager
    def _of_owner(self) -> Iterator[None]:
        """Surround allocations for the queue in which the caller works, and allocate on the stream `owner`."""
        # The allocator keeps released memory for the stream that allocated it: on a framework's own stream the model
        # could not use it again.
        with torch.cuda.stream(cast(torch.cuda.Stream, self.owner)):
            yield
        if self.caller() != self.owner:
            # Work that the caller queues next may write the memory, while work of the owner still reads it.
            self.join(self._mark(self.owner))

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def refill(self, buffer: Tensor) -> None:
        with self._of_owner():
            buffer.untyped_storage().resize_(buffer.nbytes)

    def empty(self, buffer: Tensor) -> None:
        buffer.untyped_storage().resize_(0)

    def free(self, buffer: Tensor) -> None:
        pass  # the caching allocator takes the memory back with the last view

    def keep(self, buffer: Tensor, op: Op | None = None) -> None:
        if self._inherited:
            return  # no work of this process uses it, and releasing it would record an event
        buffer.record_stream(self._streams[op] if op is not None else self.caller())

    def count(self, tensor: Tensor) -> None:
        pass  # the allocator counts it

    def memory(self) -> Memory:
        memory = Memory(*torch.cuda.mem_get_info(self.torch_device))
        left = available_bytes() if self.shares_host_memory else None
        # In shared memory the runtime counts Linux's page cache as taken, although Linux releases it on demand.
        return memory if left is None else Memory(min(left, memory.total), memory.total)

    def cached(self) -> Cached:
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        # "active" still counts memory that was released while other streams use it.
        reserved, active, split = (
            stats[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "active", "inactive_split")
        )
        self._look_at_segments(stats["reserved_bytes"]["all"]["allocated"])
        segments = self._segments
        unused = max(0, reserved - active - segments.private - (0 if segments.expandable else split))
        before, self._peak = self._peak, stats["active_bytes"]["all"].get("peak")
        if before is None or self._peak in (None, before):
            return Cached(reserved, unused)
        # The peak has risen since, or user code has reset it: in both cases it was reached since the last call.
        return Cached(reserved, unused, min(unused, reserved - self._peak - segments.private))

    def _look_at_segments(self, allocated: int) -> None:
        """Read the segments, which the counters do not show, if some were made since; at most once a second.

        It takes milliseconds.
        """
        now, known = time.perf_counter(), self._segments
        if allocated == known.allocated or now - known.seconds < _CLOCK_S:
            return
        mine = [each for each in _segments() if each["device"] == self.torch_device.index]
        expandable = any(each.get("is_expandable") for each in mine)
        private = [each for each in mine if tuple(each.get("segment_pool_id", _GENERAL)) != _GENERAL]
        # A segment in use that cannot expand counts its free parts among those of split segments.
        idle = sum(s["total_size"] - s["active_size"] for s in private if expandable or not s["active_size"])
        self._segments = _Segments(allocated, now, expandable, idle)

    def trim(self) -> None:
        with self.current():
            torch.cuda.empty_cache()

    def join(self, job: Job) -> None:
        assert isinstance(job, _CudaJob)
        # Work that the caller queues next reads memory that `job` writes.
        self.caller().wait_event(job.end)

    def caller(self) -> torch.cuda.Stream:
        number = self.caller_number()
        found = self._callers.get(number)
        if found is None:
            found = self._callers[number] = torch.cuda.current_stream(self.torch_device)
        return found

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        return [self._mark(stream) for stream in callers or (self.caller(),)]

    def mark(self) -> Mark:
        return self._mark(self.caller())

    def _mark(self, stream: Caller) -> _CudaJob:
        event = self._events.take()
        event.record(cast(torch.cuda.Stream, stream))
        return _CudaJob(self, self._clock, None, event, Op.BACKWARD, None, (), given_back=True)

    def copy(
        self,
        op: Op,
        subgroup: int,
        copies: Sequence[Copy],
        after: Sequence[Job] = (),
        then: Behind | None = None,
    ) -> Job:
        to_host = LANE_OF[op] is Lane.D2H
        host, device = (0, 1) if to_host else (1, 0)
        # The engine releases state once no work uses it; user code may release gradients and parameters at any time.
        sides = [copy[device] for copy in copies]
        theirs = sides if op in (Op.GRADIENT, Op.PARAMETER) else []
        if isinstance(copies, Kept):
            theirs = [] if copies.recorded else theirs
            copies.recorded = True
        lent, theirs = (theirs, []) if isinstance(copies, Lent) else ((), theirs)
        ours = [copy[host] for copy in copies]
        # Before the start event, because it takes the host milliseconds.
        found = parts_of(copies, host=host) if copies else None
        work, plain, kernel = then, list[Addresses](), None
        if found is not None and (found.plain is None or self._runtime is None):
            work = partial(self._copy_by_torch, op, found.parts, sides, then)
        else:
            if found is not None and found.plain is not None:
                each = [(here, sides[n].data_ptr(), nbytes) for here, n, nbytes in found.plain]
                plain = each if to_host else [(there, here, nbytes) for here, there, nbytes in each]
            if then is not None and self._runtime is not None and hasattr(then, "kernel"):
                kernel = then.kernel()
                work = then if kernel is None else None
        job = self._queue(op, subgroup, work, after, theirs, ours, plain, kernel)
        if lent:  # with their memory: user code may give them other
            self._lent.append((job, [*lent, *map(Tensor.untyped_storage, lent)]))
        return job

    def _copy_by_torch(self, op: Op, parts: Sequence[Part], device: Sequence[Tensor], then: Behind | None) -> None:
        queue_parts(parts, device, to_host=LANE_OF[op] is Lane.D2H, before=self._yields[op])
        if then is not None:
            then()

    def launch(
        self,
        subgroup: int,
        update: Callable[[], None],
        numel: int,
        after: Sequence[Job] = (),
        reads: Sequence[Tensor] = (),
        state_format: str = MIXED.name,
    ) -> Job:
        return self._queue(Op.UPDATE, subgroup, update, after, reads, ())

    def bind_host_thread(self) -> None:
        bind(self._cores)
        leave_cores()
        # A new thread begins on the first GPU, where a call without a device would make a context.
        torch.cuda.set_device(self.torch_device)
        torch.set_grad_enabled(False)  # for this thread alone

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this is the thread's current device.

        torch sets it in most calls, but not where it waits for an event or queries one. In a thread that never chose a
        device these would make a context, half a gigabyte, on the first GPU, which may be another rank's.
        """
        return _ALREADY if torch.cuda.current_device() == self._index else torch.cuda.device(self.torch_device)

    @property
    def only_clocks_updates(self) -> bool:
        return not names()

    @contextmanager
    def host_update(self, numel: int, traffic: int, state_format: str = MIXED.name) -> Iterator[float]:
        with named(Lane.CPU, Op.UPDATE, numel, "parameters"):
            yield time.perf_counter()

    @contextmanager
    def disk_io(self, lane: Lane, nbytes: int) -> Iterator[float]:
        with named(lane, nbytes, "bytes"):
            yield time.perf_counter()

    @property
    def _pci_address(self) -> str | None:
        """The PCI address of the device, or of the one that it is a slice of; None before torch 2.8."""
        p: Any = torch.cuda.get_device_properties(self.torch_device)
        if getattr(p, "pci_bus_id", None) is None:
            return None
        return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

    def _start_clock(self) -> _Clock:
        """Return a clock from now on. Its event is on a stream without work, so that waiting for it takes no time."""
        clocks = []
        for _ in range(_BRACKETS):
            event = torch.cuda.Event(enable_timing=True)
            with self.current():
                before = time.perf_counter()
                # The host must see the event's end between the two readings of its own clock.
                event.record(self._idle_stream)
                event.synchronize()
                after = time.perf_counter()
            clocks.append((after - before, _Clock(event, (before + after) / 2)))
        return min(clocks, key=lambda clock: clock[0])[1]

    def _renew_clock(self) -> None:
        """Start a new clock if the last one is old. Called where the host waits anyway."""
        # An event that a forked child records would never end: the child has no streams.
        if not self._inherited and time.perf_counter() - self._clock.seconds > _CLOCK_S:
            self._clock = self._start_clock()

    def _queue(
        self,
        op: Op,
        subgroup: int,
        work: Callable[[], None] | None,
        after: Sequence[Job],
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
        copies: Sequence[Addresses] = (),
        kernel: Any | None = None,
    ) -> _CudaJob:
        """Queue work on the stream of `op`, behind copies by the runtime and a kernel that it launches.

        theirs: device memory that it uses and user code may release. ours: host memory to keep until it is done.
        """
        stream = self._streams[op]
        with (
            named(LANE_OF[op], op, subgroup) if names() else _ALREADY,
            self.current(),
            _On(stream, self.caller()) if work is not None or self._yields[op].pauses(copies) else _ALREADY,
            torch.no_grad() if work is not None and torch.is_grad_enabled() else _ALREADY,  # eight calls of Python
        ):
            if self._leftovers.ends:
                self._leftovers.release()
            if self._lent:
                self._release_lent()
            start, end = self._events.take(), self._events.take()
            for tensor in theirs:
                # User code may release the tensor before this stream is done; the allocator must not reuse its memory
                # until then.
                tensor.record_stream(stream)
            # The hazards between streams: `work` reads or overwrites memory that a job in `after` writes, or overwrites
            # memory that it reads. The start is recorded after the waits, so that the time of that job does not count.
            if self._runtime is not None:
                behind = [getattr(job.end, HANDLE) for job in cast(Sequence[_CudaJob], after)]
                begin, stop = getattr(start, HANDLE), getattr(end, HANDLE)
                self._call(op, behind, begin, copies, stop if work is None else 0, kernel)
            else:
                for job in cast(Sequence[_CudaJob], after):
                    stream.wait_event(job.end)
                start.record(stream)
            if work is not None:
                work()
            if self._runtime is None:
                end.record(stream)
            elif work is not None:
                self._call(op, (), 0, (), stop)
        if op is Op.WEIGHTS:
            # No optimizer waits for this copy at the interpreter's exit, which unmaps the memory.
            self._leftovers.add(end, ours)
        return _CudaJob(self, self._clock, start, end, op, subgroup, ours, op is not Op.WEIGHTS)  # see leftovers above

    def _call(
        self,
        op: Op,
        waits: Sequence[int],
        start: int,
        copies: Sequence[Addresses],
        end: int,
        kernel: Any | None = None,
    ) -> None:
        """Let the runtime queue a job, or a part of one. waits, start, end: events."""
        assert self._runtime is not None, "it is called in that case alone"
        yields, (stream, kind) = self._yields[op], self._numbers[op]
        error, yields.moved = self._runtime.queue(stream, waits, start, copies, kind, end, yields.moved, kernel)
        if error:
            torch.cuda.check_error(error)

    def _release_lent(self) -> None:
        """Release gradients whose copies have ended. Called wherever work is queued, as behind each update."""
        with suppress(IndexError):
            while True:
                # Taken out first, because another thread may release some, too.
                first = self._lent.popleft()
                if first[0].at() is None:
                    self._lent.appendleft(first)
                    return


class _On:
    """A context in which `stream` is the thread's current one, and afterwards `before`, of the same device.

    As `torch.cuda.stream`, which looks both up through twenty functions. That device must be the thread's current one.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


@cache
def _streams_of(device: torch.device) -> tuple[Mapping[Op, torch.cuda.Stream], torch.cuda.Stream]:
    """Return a stream for each operation, and one for no work at all; all optimizers of the process share them.

    torch returns 32 streams of a priority and then the same ones again: if each optimizer had its own, some would in
    the end be the streams of the model's communication. Sharing cannot block for ever, because a stream waits only for
    work that was issued before.
    """
    streams = {op: torch.cuda.Stream(device, priority=_NORMAL if op in _URGENT else _HIGH) for op in LANE_OF}
    idle = torch.cuda.Stream(device)
    with torch.cuda.stream(idle):
        queue_empty_kernel()  # loads the kernel of _YieldCopyEngine, which may wait for the device: not in a backward
    return streams, idle


class _Leftovers:
    """Host memory that jobs in flight use and to which nothing else refers.

    One for the process, not for each CudaDevice: copies of saved tensors may still run when their optimizer is deleted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        renewed.add(self)
        atexit.register(self.wait)

    def add(self, end: torch.cuda.Event, keeps: Sequence[Tensor]) -> None:
        self.ends.append((end, keeps))

    def release(self) -> None:
        """Release the memory of jobs that have ended; the device must be the thread's current one."""
        with suppress(IndexError):
            while True:
                # Taken out before it is queried: another thread may release leftovers, and a `__del__` add some.
                leftover = self.ends.popleft()
                if not leftover[0].query():
                    self.ends.appendleft(leftover)
                    return

    def wait(self) -> None:
        """Wait for all jobs, at the interpreter's exit, which unmaps the memory that they use."""
        with suppress(RuntimeError), torch.cuda.device(self._device):  # CUDA may have failed before
            for end, _ in list(self.ends):
                end.synchronize()

    def renew(self) -> None:
        """Keep the events for ever in a forked child, as `CudaDevice.renew` does."""
        _leak(self.ends)
        self.ends = deque()


@cache
def _leftovers_of(device: torch.device) -> _Leftovers:
    return _Leftovers(device)


class _YieldCopyEngine:
    """Lets other streams copy between the pieces of one stream, by an empty kernel before a piece; see `coalesce.Turn`.

    A copy engine continues with the stream that it serves as long as that has a copy ready, whatever the priorities:
    all queued pieces would run as one block, and copies for which compute waits would run behind them. A kernel makes
    the stream leave the engine for a moment, in which the engine takes the copy that has been ready longest (measured
    on NVIDIA's GPUs: https://github.com/meta-pytorch/torchrec/pull/4315, 4339).
    """

    def __init__(self, moved: int) -> None:
        self.moved = moved
        """Bytes since the last kernel, in this job or jobs before it: the engine does not see borders of jobs.
        Negative: there are no kernels."""

    def pauses(self, copies: Sequence[Addresses]) -> bool:
        """Return whether any kernel comes between these copies, or before them."""
        return bool(copies) and self.moved >= 0 and self.moved + sum([copy[2] for copy in copies]) > PIECE_BYTES

    def __call__(self, nbytes: int) -> Callable[[], None] | None:
        if self.moved < 0:
            return None
        self.moved += nbytes
        if self.moved <= PIECE_BYTES:
            return None
        self.moved = nbytes
        return queue_empty_kernel


class _Clock(NamedTuple):
    """An event, and its time on the clock of time.perf_counter."""

    event: torch.cuda.Event
    seconds: float

    def read(self, event: torch.cuda.Event) -> float:
        """Return the time of a finished timing event."""
        return self.seconds + self.event.elapsed_time(event) / 1e3


class _Segments(NamedTuple):
    """The state of the caching allocator's segments.

    allocated: bytes of all segments ever made when this was read. seconds: the time.perf_counter() of that.
    expandable: whether the allocator can release parts of segments. private: free bytes in the pools of CUDA graphs and
        of user code, where state cannot be.
    """

    allocated: int = 0
    seconds: float = -_CLOCK_S
    expandable: bool = False
    private: int = 0


def _segments() -> list[Any]:
    try:
        return torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # older versions of torch
        return torch.cuda.memory_snapshot()


def _leak(what: object) -> None:
    """Add a reference, so that the object is never collected."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


@cache
def event_query() -> int:
    """Return the address of the driver's function that asks an event; 0 where the library has another name.

    Not the runtime's: where the event has not ended, that leaves an error, which torch would raise later. The thread
    that calls it has made the device current.
    """
    library, name = ("libamdhip64.so", "hipEventQuery") if torch.version.hip else ("libcuda.so.1", "cuEventQuery")
    try:
        return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


class _Events:
    """Events of jobs that are gone, to be recorded again: to make and to destroy one lets go of Python's lock.

    A stream that waits for an event waits for what was recorded when it was told to.
    """

    def __init__(self, idle: torch.cuda.Stream) -> None:
        self._free: list[torch.cuda.Event] = []
        self._idle = idle

    def take(self) -> torch.cuda.Event:
        """Return an event to which nothing else refers."""
        try:
            return self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # the CPU lane must not spin while it waits
            event.record(self._idle)  # before that the runtime does not know it
            return event

    def give(self, event: torch.cuda.Event) -> None:
        """Take an event back to which nothing else refers."""
        self._free.append(event)


@cache
def _warn_of_one_connection() -> None:
    logger.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams into one queue of the device, so that transfers of "
        "optimizer state can hold up forward and backward; unset it unless your framework needs that order"
    )


@dataclass(eq=False)
class _CudaJob:
    """Work on a stream between two events; a fence or mark has no start.

    The host memory that it uses is kept until the device is done with it, even if nothing refers to the job.
    """

    device: CudaDevice
    clock: _Clock
    start: torch.cuda.Event | None
    end: torch.cuda.Event
    op: Op
    subgroup: int | None
    keeps: Sequence[Tensor]
    given_back: bool
    """Whether nothing else has the end once the job is gone. Not computed then: the interpreter may have ended."""
    ended_at: float | None = None
    span: Span | None = None

    def wait(self) -> Span:
        if self.span is not None:
            return self.span
        with self.device.current():
            # The span is read from both events, and the caller may use the memory of the job once this returns.
            if not self.end.query():  # which keeps Python's lock
                self.end.synchronize()
            self.device._renew_clock()
            end = self.clock.read(self.end)
            if self.start is None:
                found = Span(Lane.GPU, self.op, self.subgroup, end, end)
            else:
                nbytes = sum([tensor.nbytes for tensor in self.keeps])
                found = Span(LANE_OF[self.op], self.op, self.subgroup, self.clock.read(self.start), end, nbytes)
            if self.op is Op.GRADIENT:
                self.device._release_lent()
        self.span, self.keeps = found, ()
        return found

    @property
    def event(self) -> int:
        """The event at its end, as the runtime knows it."""
        handle: int = getattr(self.end, HANDLE)
        return handle

    def at(self) -> float | None:
        if self.ended_at is None:
            with self.device.current():
                if self.end.query():
                    self.ended_at = self.clock.read(self.end)
        return self.ended_at

    def __del__(self) -> None:
        if self.device._inherited:
            # In a forked child the event's destructor would call CUDA, which ends the process.
            _leak(self)
        elif self.keeps:
            # The device may still use this host memory, and a wait would block the thread that collects the job.
            self.device._leftovers.add(self.end, self.keeps)
        elif self.given_back:
            for event in (self.start, self.end):
                if event is not None:
                    self.device._events.give(event)
