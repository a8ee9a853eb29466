"""A CUDA runtime without CUDA, for `CudaDevice`: its streams, events and memory, and work that runs as late as allowed.

Work is queued when it is issued and runs when something waits for it: only what must have run by then (`lazy`), or
pieces of any streams in random order. So a wait that is missing, an event that is recorded again too early or memory
that is freed too early shows as wrong results, always and not only now and then. What the caller computes is done at
once, on CPU tensors.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dos.devices import Job, Memory
from dos.devices.cuda import CudaDevice
from perfmodel import Op


class Record:
    """One recording of an event: done once the stream has come to it. at: when, in the runtime's seconds."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream
        self.at: float | None = None

    @property
    def done(self) -> bool:
        return self.at is not None


class Runtime:
    """Runs what streams have queued. recorded, made: how many events were."""

    def __init__(self, seed: int | None) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.now = 0.0
        self.recorded = 0
        self.made = 0
        self._random = None if seed is None else random.Random(seed)

    def complete(self, record: Record) -> None:
        """Run until the record is done."""
        with self.lock:
            while not record.done and self._random is not None:
                assert self.advance(), "nothing can go on: streams wait for each other"
            while not record.done:
                assert record.stream is not None
                self._step(record.stream)

    def advance(self) -> bool:
        """Run something of any stream that can go on, if the order is random; whether there was anything."""
        with self.lock:
            ready = [s for s in self.streams if s.queue and not s.blocked()]
            if ready and self._random is not None:
                self._step(self._random.choice(ready))
            return bool(ready)

    def _step(self, stream: FakeStream) -> None:
        item = stream.queue.popleft()
        self.now += 1e-3
        if not isinstance(item, Record):
            item()
        elif item.stream is stream:
            item.at = self.now
        else:
            self.complete(item)


class FakeStream:
    """queue: work, own records, and other streams' records to wait for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.queue: deque[Record | Callable[[], None]] = deque()
        runtime.streams.append(self)

    def blocked(self) -> bool:
        head = self.queue[0]
        return isinstance(head, Record) and head.stream is not self and not head.done

    def wait_event(self, event: FakeEvent) -> None:
        with self._runtime.lock:
            assert event.record_ is not None, "waits for an event that was never recorded"
            self.queue.append(event.record_)


class FakeEvent:
    def __init__(self, runtime: Runtime, timing: bool) -> None:
        self._runtime = runtime
        self._timing = timing
        self.record_: Record | None = None
        runtime.made += 1

    def record(self, stream: FakeStream | Caller) -> None:
        with self._runtime.lock:
            self._runtime.recorded += 1
            self.record_ = Record(stream if isinstance(stream, FakeStream) else None)
            if isinstance(stream, FakeStream):
                stream.queue.append(self.record_)
            else:
                self.record_.at = self._runtime.now

    def query(self) -> bool:
        self._runtime.advance()
        assert self.record_ is not None
        return self.record_.done

    def synchronize(self) -> None:
        assert self.record_ is not None
        self._runtime.complete(self.record_)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._timing
        assert other._timing
        assert self.record_ is not None
        assert other.record_ is not None
        assert self.record_.at is not None, "read before it happened"
        assert other.record_.at is not None, "read before it happened"
        return (other.record_.at - self.record_.at) * 1e3


class Caller:
    """The caller's stream: everything on it is done at once, so it waits at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class FakeCudaDevice(CudaDevice):
    """A CudaDevice whose device memory is CPU memory and whose work is queued on a `Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        super().__init__(torch.device("cuda", 0))

    def __deepcopy__(self, memo: dict[int, object]) -> FakeCudaDevice:
        return self

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN in every dtype

    def free(self, buffer: Tensor) -> None:
        buffer.fill_(0xFF)

    def memory(self) -> Memory:
        return Memory(10**9, 10**9)

    def unused(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def trim(self) -> None:
        pass

    def _queue(
        self,
        op: Op,
        subgroup: int,
        work: Callable[[], None],
        after: Sequence[Job],
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
    ) -> Job:
        queue: Any = self._streams[op]
        with self.runtime.lock:  # as one call of the runtime; the others may come in between

            def run() -> None:
                with torch.no_grad():
                    work()

            return super()._queue(op, subgroup, lambda: queue.queue.append(run), after, theirs, ours)


def install(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> Runtime:
    """Put the runtime in the place of torch.cuda's. seed: of the order in which work runs; None: as late as allowed."""
    runtime = Runtime(seed)
    caller = Caller(runtime)
    for name, replacement in {
        "Stream": lambda device, priority=0: FakeStream(runtime),
        "Event": lambda enable_timing=False, blocking=False: FakeEvent(runtime, enable_timing),
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: caller,
        "get_device_properties": lambda device: SimpleNamespace(name="Fake 80GB", uuid="0-1-2-3"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return runtime
