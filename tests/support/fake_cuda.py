"""A CUDA runtime without CUDA, for `CudaDevice`: its streams, events and memory, and work that runs as late as allowed.

Work is queued when it is issued and runs when something waits for it: only what must have run by then (`lazy`), or
pieces of any streams in random order. So a wait that is missing, an event that is recorded again too early or memory
that is freed too early shows as wrong results, always and not only now and then.

The caller has streams, too, `Runtime.caller` and what `caller_stream` makes. What Python computes on CPU tensors is
done at once; what is queued with `FakeStream.enqueue` is as late as all else, and `queue_gradients` queues what
backward writes. Where a caller's stream is told to wait it does so at once, because what Python computes next cannot.

Each stream has a clock, so that work of different streams overlaps in time; `Runtime.host` is the host's, which goes on
when the host waits. Each thread has a current device and uses device 0 if it was given none: calls that torch does not
guard make a context there, see `Runtime.contexts`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dos.devices import Cached, Job, Memory, pinned_allocation
from dos.devices.cuda import CudaDevice, _leftovers_of, _streams_of
from dos.devices.runtime import runtime_of
from perfmodel import Op


class Record:
    """One recording of an event: done once the stream has come to it. at: when, in the runtime's seconds."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.at: float | None = None

    @property
    def done(self) -> bool:
        return self.at is not None


PATIENCE = 2
"""The number of times that the CPU lane asks for an event in vain."""


class Work(NamedTuple):
    """What a stream runs. seconds: it takes. issued: when, by the host's clock."""

    run: Callable[[], None]
    seconds: float
    issued: float


class Runtime:
    """Runs what streams have queued.

    recorded, made: how many events were. host: the host's clock in seconds. caller: the stream on which the user works.
    waits: how often it waited for the device. capturing: whether the caller's work is captured in a graph.
    contexts: the devices on which something has made a context. regions: pinned host memory, end by first byte.
    refuses: errors of the next attempts to pin. most_at_once, most_in_all: bytes that can be pinned; refused: the bytes
    of attempts that asked for more. most_allocated: bytes that the runtime allocates pinned; allocations_refused: as
    `refused`. allocated: the streams of whose memory something was allocated.
    fatal: how often a forked child has done what ends its process.
    log: copies between host and device, and kernels that do nothing, as they ran.
    """

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, seed: int | None) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.host = 0.0
        self.recorded = 0
        self.made = 0
        self.waits = 0
        self.capturing = False
        self.contexts: set[int] = set()
        self.regions: dict[int, int] = {}
        self.refuses: list[int] = []
        self.most_at_once = self.most_in_all = math.inf
        self.refused: list[int] = []
        self.most_allocated = 0.0
        self.allocations_refused: list[int] = []
        self._allocations: dict[int, Any] = {}
        self.allocated: set[FakeStream] = set()
        self.caller = self.caller_stream()
        self.fatal = 0
        self.log: list[str] = []
        self.events: weakref.WeakValueDictionary[int, FakeEvent] = weakref.WeakValueDictionary()
        self.query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._query)
        self.kept: weakref.ref[object] | None = None
        """Host memory that must be kept until the copies that are queued now have run."""
        self.recorded_on: Sequence[Tensor] = ()
        """Device memory that these use, which the allocator leaves to them."""
        words = ctypes.c_void_p, ctypes.c_void_p
        kinds: dict[Any, tuple[Any, ...]] = {
            self._wait_event: (*words, ctypes.c_uint),
            self._record_event: words,
            self._copy: (*words, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
        }
        self._calls: list[Any] = [
            ctypes.CFUNCTYPE(ctypes.c_int, *kind)(self._answered(call)) for call, kind in kinds.items()
        ]
        self._calls.append(ctypes.CFUNCTYPE(None, ctypes.c_int64)(lambda cycles: self.sleep()))
        self._calls.append(ctypes.c_void_p())  # there is no kernel
        self._process = os.getpid()
        self._of_thread = threading.local()
        self._random = None if seed is None else random.Random(seed)

    def caller_stream(self) -> FakeStream:
        """A stream of the user's."""
        return FakeStream(self, at_once=True)

    def check_capture(self) -> None:
        """What the thread that captures must not do; others may where their captures are apart (`thread_local`)."""
        assert not (self.capturing and threading.current_thread() is threading.main_thread()), (
            "cudaErrorStreamCaptureUnsupported"
        )

    def _query(self, event: int) -> int:
        """As the driver's function. Of an event that does not exist it raises."""
        return 0 if self.events[event].query() else 600

    @property
    def functions(self) -> tuple[int, ...]:
        """As `dos.devices.runtime.runtime_of` takes them."""
        return tuple(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)

    def check_error(self, error: int) -> None:
        """What torch does with an error of the runtime."""
        raise RuntimeError(f"CUDA error: {error}")

    def _answered(self, call: Callable[..., None]) -> Callable[..., int]:
        """What native code calls, which gets no exception."""

        def answered(*arguments: Any) -> int:
            try:
                call(*arguments)
            except Exception:
                return 1
            return 0

        return answered

    def _stream(self, number: int) -> FakeStream:
        return next(stream for stream in self.streams if stream.cuda_stream == number)

    def _wait_event(self, stream: int, event: int, flags: int) -> None:
        self._stream(stream).wait_event(self.events[event])

    def _record_event(self, event: int, stream: int) -> None:
        self.events[event].record(self._stream(stream))

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.log.append("copy")
        for address in (to, source):
            self.check_range(address, address + nbytes)
        kept = self.kept

        def run(_: object = self.recorded_on) -> None:
            assert kept is None or kept() is not None, "host memory was let go of while a copy used it"
            ctypes.memmove(to, source, nbytes)

        # One millisecond for all copies of a job.
        queue = self._stream(stream)
        queue.enqueue(run, 1e-3 if isinstance(queue.queue[-1], Record) else 0.0)

    def sleep(self) -> None:
        self.log.append("kernel")

    def complete(self, record: Record) -> None:
        """Run until the record is done. The host waits for that."""
        self.check_capture()
        with self.lock:
            self.waits += 1
            self._run_until(record)
            self.host = max(self.host, record.at)

    def advance(self) -> bool:
        """Run something of any stream that can go on, if the order is random; whether there was anything."""
        with self.lock:
            ready = [s for s in self.streams if s.queue and not s.blocked()]
            if ready and self._random is not None:
                self._step(self._random.choice(ready))
            return bool(ready)

    def current_stream(self, device: object = None) -> FakeStream:
        """This thread's."""
        return getattr(self._of_thread, "stream", self.caller)

    def use(self, stream: FakeStream) -> None:
        """Make it the thread's current stream, as autograd does before it runs a node and its hooks."""
        self._of_thread.stream = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make it the thread's current stream meanwhile."""
        before, self._of_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def current_device(self) -> int:
        """This thread's; 0 if it never chose one."""
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device: torch.device | int) -> None:
        """For this thread, from now on."""
        self._of_thread.device = device if isinstance(device, int) else device.index

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        """Make it the thread's current device meanwhile."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def handle(self) -> object:
        """What an event has of CUDA. An array, which the collector does not look at: it ends when it is freed."""
        handle = np.empty(0)

        def destroy() -> None:
            self.fatal += self.inherited  # the destructor raises

        weakref.finalize(handle, destroy)
        return handle

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, which has no CUDA."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """What calls do in a forked child."""
        if self.inherited:
            raise RuntimeError("CUDA error: initialization error")

    def keep(self, stream: FakeStream) -> None:
        """Let memory stay until the stream is done: to free it records an event."""
        self.fatal += self.inherited

    def make_context(self) -> None:
        """What a call does that torch does not guard: it needs a context on the thread's current device."""
        self.check_process()
        self.contexts.add(self.current_device())

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.make_context()
        if self.refuses:
            return self.refuses.pop(0)
        if nbytes > self.most_at_once or self.pinned + nbytes > self.most_in_all:
            self.refused.append(nbytes)
            return 2
        assert all(end <= address or address + nbytes <= first for first, end in self.regions.items()), "pinned twice"
        self.regions[address] = address + nbytes
        return 0

    def cudaHostAlloc(self, pointer: Any, nbytes: Any, flags: object) -> int:  # noqa: N802
        self.make_context()
        if sum(map(len, self._allocations.values())) + nbytes.value > self.most_allocated:
            self.allocations_refused.append(nbytes.value)
            return 2
        memory = np.full(nbytes.value + mmap.PAGESIZE, 0xFF, np.uint8)
        memory = memory[-memory.ctypes.data % mmap.PAGESIZE :][: nbytes.value]  # whole pages, as CUDA's
        address = pointer._obj.value = memory.ctypes.data
        self._allocations[address], self.regions[address] = memory, address + len(memory)
        return 0

    def cudaFreeHost(self, address: Any) -> None:  # noqa: N802
        self.make_context()
        del self._allocations[address.value], self.regions[address.value]

    @property
    def pinned(self) -> int:
        """Bytes that are pinned."""
        return sum(end - first for first, end in self.regions.items())

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.make_context()
        del self.regions[address]

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]

    def check_copy(self, tensor: Tensor) -> None:
        """What the runtime does with one side of a copy."""
        self.check_range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def check_range(self, first: int, last: int) -> None:
        """It must not begin in a pinned region and end elsewhere."""
        if any(begin <= first < end < last for begin, end in self.regions.items()):
            raise RuntimeError("CUDA error: invalid argument")

    def _run_until(self, record: Record) -> None:
        while not record.done and self._random is not None:
            assert self.advance(), "nothing can go on: streams wait for each other"
        while not record.done:
            self._step(record.stream)

    def _step(self, stream: FakeStream) -> None:
        item = stream.queue.popleft()
        if isinstance(item, Work):
            stream.now = max(stream.now, item.issued) + item.seconds
            item.run()
        elif item.stream is stream:
            item.at = stream.now
        else:
            self._run_until(item)
            stream.now = max(stream.now, item.at)


class FakeStream:
    """queue: work, own records, and other streams' records to wait for. now: its clock, where it has come to.

    at_once: whether it does not only note whom to wait for, but waits.
    """

    def __init__(self, runtime: Runtime, at_once: bool = False) -> None:
        self._runtime = runtime
        self._at_once = at_once
        self.queue: deque[Record | Work] = deque()
        self.now = 0.0
        self.cuda_stream = id(self)
        runtime.streams.append(self)

    def enqueue(self, run: Callable[[], None], seconds: float = 1e-3) -> None:
        """Run this in order."""
        self.queue.append(Work(run, seconds, self._runtime.host))

    def blocked(self) -> bool:
        head = self.queue[0]
        return isinstance(head, Record) and head.stream is not self and not head.done

    def record(self) -> Record:
        """A record of where the stream is now."""
        with self._runtime.lock:
            # A stream without work comes to it when it is issued.
            self.enqueue(lambda: None, 0.0)
            record = Record(self)
            self.queue.append(record)
            return record

    def wait_record(self, record: Record) -> None:
        """Go on only once the record is done."""
        with self._runtime.lock:
            self.queue.append(record)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.record_ is not None, "waits for an event that was never recorded"
        self.wait_record(event.record_)
        if self._at_once:
            with self._runtime.lock:
                self._runtime._run_until(self.record())


class FakeEvent:
    def __init__(self, runtime: Runtime, timing: bool) -> None:
        self._runtime = runtime
        self._timing = timing
        self.record_: Record | None = None
        self._asked = 0
        runtime.made += 1
        runtime.events[id(self)] = self
        self.cuda_event = id(self)
        self._handle: object = None  # like CUDA's, which is made where the event is first recorded

    def record(self, stream: FakeStream) -> None:
        self._runtime.check_process()
        with self._runtime.lock:
            if self._handle is None:
                self._handle = self._runtime.handle()
            self._runtime.recorded += 1
            self.record_ = stream.record()
            self._asked = 0

    def query(self) -> bool:
        self._runtime.check_capture()
        self._runtime.make_context()
        self._runtime.advance()
        # The CPU lane asks until something has ended, and nothing would if nobody waited.
        if not self.record_.done and threading.current_thread().name.startswith("dos-cpu"):
            self._asked += 1
            if self._asked > PATIENCE:
                self._runtime.complete(self.record_)
        return self.record_.done

    def synchronize(self) -> None:
        self._runtime.make_context()
        self._runtime.complete(self.record_)

    def elapsed_time(self, other: FakeEvent) -> float:
        self._runtime.make_context()  # torch asks both events whether they are done before it sets the device
        assert self._timing
        assert other._timing
        assert self.record_.at is not None, "read before it happened"
        assert other.record_.at is not None, "read before it happened"
        return (other.record_.at - self.record_.at) * 1e3


def use_virtual_time(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the package times is in the runtime's seconds."""
    clock = SimpleNamespace(perf_counter=lambda: runtime.host)
    for module in ("devices.cuda", "backward", "step.host_lane", "step.iteration"):
        monkeypatch.setattr(f"dos.{module}.time", clock)
    monkeypatch.setattr(FakeCudaDevice, "only_clocks_updates", False)  # native code reads the real clock


def queue_gradients(
    runtime: Runtime, parameters: Iterable[Tensor], streams: Sequence[FakeStream] | None = None
) -> None:
    """Let backward's writes to gradients be as late as other work; to be called before an optimizer watches them.

    Until then there is NaN, and what is written is NaN if the parameter was written to by then.
    streams: on which the parameters' forwards ran, in turn, and so their backwards; `end_backward` is to be called.
    """
    of_parameter = {} if streams is None else dict(zip(map(id, parameters := list(parameters)), cycle(streams)))

    def wrote(parameter: Tensor) -> None:
        if of_parameter:
            runtime.use(of_parameter[id(parameter)])
        # `data` has a version counter of its own: on a device, too, the number rises when the write is issued.
        gradient, values, weights = parameter.grad.data, parameter.grad.clone(), parameter.detach().clone()
        gradient.fill_(float("nan"))

        def write() -> None:
            gradient.copy_(values if torch.equal(parameter.detach(), weights) else float("nan") * values)

        runtime.current_stream().enqueue(write)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(wrote)


class Kept(list[Tensor]):
    """Host memory that a job keeps, which `work` here would keep in any case."""


class FakeCudaDevice(CudaDevice):
    """A CudaDevice whose device memory is CPU memory and whose work is queued on a `Runtime`."""

    def __init__(self, runtime: Runtime, index: int = 0) -> None:
        self.runtime = runtime
        super().__init__(torch.device("cuda", index))

    def __deepcopy__(self, memo: dict[int, object]) -> FakeCudaDevice:
        return self

    @property
    def event_query(self) -> int:
        return ctypes.cast(self.runtime.query, ctypes.c_void_p).value or 0

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def allocate(self, nbytes: int) -> Tensor:
        self._foreign = self.runtime.current_stream() is not self.owner
        return super().allocate(nbytes)

    def _empty(self, nbytes: int) -> Tensor:
        """What its owner still does with the memory leaves NaN there in every dtype; it is late if others allocate."""
        buffer, owner = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), self.runtime.current_stream()
        self.runtime.allocated.add(owner)
        if self._foreign:
            owner.enqueue(lambda: buffer.fill_(0xFF))
            return buffer
        return buffer.fill_(0xFF)

    def free(self, buffer: Tensor) -> None:
        buffer.fill_(0xFF)

    def memory(self) -> Memory:
        return Memory(2**26, 2**26)  # a pool for saved tensors has as much, and all of its pages are made

    def cached(self) -> Cached:
        return Cached(0, 0)

    def trim(self) -> None:
        pass

    def _queue(
        self,
        op: Op,
        subgroup: int,
        work: Callable[[], None] | None,
        after: Sequence[Job],
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
        copies: Sequence[tuple[int, int, int]] = (),
        kernel: Any | None = None,
    ) -> Job:
        queue: Any = self._streams[op]
        kept = Kept(ours)
        held, uses = weakref.ref(kept), bool(kept)
        with self.runtime.lock:  # as one call of the runtime; the others may come in between

            def run() -> None:
                assert held() is not None or not uses, "host memory was let go of while a copy used it"
                began = self.runtime.host
                with torch.no_grad():
                    assert work is not None
                    work()
                queue.now += self.runtime.host - began  # the start was recorded before, and the device waited

            late = None if work is None else lambda: queue.enqueue(run)
            self.runtime.kept, self.runtime.recorded_on = held if uses else None, theirs
            try:
                return super()._queue(op, subgroup, late, after, theirs, kept, copies, kernel)
            finally:
                self.runtime.recorded_on = ()


def end_backward(runtime: Runtime, streams: Iterable[FakeStream]) -> None:
    """What autograd does at the end: the caller's stream goes on behind all that backward used."""
    runtime.use(runtime.caller)
    for stream in streams:
        runtime.caller.wait_record(stream.record())


def install(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> Runtime:
    """Put the runtime in the place of torch.cuda's. seed: of the order in which work runs; None: as late as allowed."""
    runtime = Runtime(seed)
    _streams_of.cache_clear()
    _leftovers_of.cache_clear()
    for name, replacement in {
        "Stream": lambda device, priority=0: FakeStream(runtime),
        "Event": lambda enable_timing=False, blocking=False: FakeEvent(runtime, enable_timing),
        "device": runtime.device,
        "set_device": runtime.set_device,
        "current_device": runtime.current_device,
        "stream": runtime.stream,
        "set_stream": runtime.use,
        "current_stream": runtime.current_stream,
        "cudart": lambda: runtime,
        "_sleep": lambda cycles: runtime.sleep(),
        "check_error": runtime.check_error,
        "is_current_stream_capturing": lambda: runtime.capturing,
        "get_device_properties": lambda device: SimpleNamespace(name="Fake 80GB", uuid="0-1-2-3"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    number = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, number, lambda index: id(runtime.current_stream()), raising=False)
    monkeypatch.setattr("dos.devices.cuda.runtime", lambda: runtime_of(runtime.functions))
    monkeypatch.setattr(pinned_allocation, "library", lambda: runtime if runtime.most_allocated else None)
    copy, to = Tensor.copy_, Tensor.to

    def checked_copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            runtime.log.append("copy")
            for tensor in (destination, source):
                runtime.check_copy(tensor)
        return copy(destination, source)

    def checked_to(tensor: Tensor, *args: Any, **settings: Any) -> Tensor:
        if not any(str(value).startswith("cuda") for value in (*args, *settings.values())):
            return to(tensor, *args, **settings)
        runtime.check_copy(tensor)
        return tensor.clone()

    def checked_copies(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for pair in zip(destinations, sources, strict=True):
            checked_copy(*pair, non_blocking=True)

    monkeypatch.setattr("dos.devices.coalesce.queue_copies", checked_copies)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: runtime.keep(stream))
    monkeypatch.setattr(Tensor, "copy_", checked_copy)
    monkeypatch.setattr(Tensor, "to", checked_to)
    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor.to("cuda"))
    return runtime
