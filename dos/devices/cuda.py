"""A CUDA device: torch streams and events, and pinned host memory of exact size."""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dos.devices.base import LANES, Copy, Job, Memory
from perfmodel import Lane, Op, Span

logger = logging.getLogger(__name__)


_CLOCK_S = 60.0
"""Seconds after which a new clock is started: elapsed times are float32 milliseconds, exact to microseconds so far."""


class CudaDevice:
    """The engine's view of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._streams = {op: torch.cuda.Stream(self.torch_device) for op in LANES}
        self._idle_stream = torch.cuda.Stream(self.torch_device)
        self._clock = self._start_clock()

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device})"

    def __reduce__(self) -> tuple[object, ...]:
        return CudaDevice, (self.torch_device,)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _pinned_zeros(numel * dtype.itemsize).view(dtype) if numel else torch.zeros(0, dtype=dtype, device="cpu")

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Nothing to do: the caching allocator takes the memory when the last view goes."""

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # What the caching allocator holds and nobody uses is free for us, too.
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return Memory(free + unused, total)

    def join(self, job: Job) -> None:
        assert isinstance(job, _CudaJob)
        torch.cuda.current_stream(self.torch_device).wait_event(job.end)

    def fence(self) -> Sequence[Job]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return (_CudaJob(self._clock, event, event, Op.BACKWARD, Lane.GPU, None),)

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        def work() -> None:
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)

        return self._queue(op, subgroup, work, after, [t for pair in copies for t in pair if t.is_cuda])

    def launch(
        self,
        subgroup: int,
        update: Callable[[], None],
        numel: int,
        after: Sequence[Job] = (),
        reads: Sequence[Tensor] = (),
    ) -> Job:
        return self._queue(Op.UPDATE, subgroup, update, after, reads)

    def host_update(self, numel: int) -> AbstractContextManager[float]:
        return nullcontext(time.perf_counter())

    def _start_clock(self) -> _Clock:
        """A clock from now on. Its event is on a stream without work, so waiting for it waits for nothing else."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._idle_stream)
        event.synchronize()
        return _Clock(event, time.perf_counter())

    def _queue(
        self, op: Op, subgroup: int, work: Callable[[], None], after: Sequence[Job], used: Sequence[Tensor]
    ) -> Job:
        if time.perf_counter() - self._clock.seconds > _CLOCK_S:
            self._clock = self._start_clock()
        stream = self._streams[op]
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # the CPU lane must not spin while it waits
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream), torch.no_grad():
            for job in after:
                assert isinstance(job, _CudaJob)
                # Closes the read-before-write hazard between streams: what `job` writes, `work` reads or overwrites.
                stream.wait_event(job.end)
            start.record(stream)
            work()
            end.record(stream)
        for tensor in used:
            # Their owner may free them before this stream comes to them; the allocator must not reuse them until then.
            tensor.record_stream(stream)
        return _CudaJob(self._clock, start, end, op, LANES[op], subgroup, work)


class _Clock(NamedTuple):
    """An event and when it was, on the clock of time.perf_counter."""

    event: torch.cuda.Event
    seconds: float

    def read(self, event: torch.cuda.Event) -> float:
        """When a finished timing event happened."""
        return self.seconds + self.event.elapsed_time(event) / 1e3


class _CudaJob:
    """Work on a stream between two events."""

    def __init__(
        self,
        clock: _Clock,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        op: Op,
        lane: Lane,
        subgroup: int | None,
        keeps: object = None,
    ) -> None:
        self.end = end
        self._keeps = keeps  # host memory that a copy still reads or writes
        self._clock, self._start, self._op, self._lane, self._subgroup = clock, start, op, lane, subgroup

    def wait(self) -> Span:
        self.end.synchronize()
        if self._op is Op.BACKWARD:  # a fence has no beginning of its own
            now = time.perf_counter()
            return Span(self._lane, self._op, self._subgroup, now, now)
        return Span(self._lane, self._op, self._subgroup, self._clock.read(self._start), self._clock.read(self.end))


def _pinned_zeros(nbytes: int) -> Tensor:
    """1-D uint8 zeros whose pages are registered for fast copies; `pin_memory=True` would round up to a power of 2."""
    # A numpy array in between, because its finaliser runs before the mapping under it goes.
    pages = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8).view(
        _Pages
    )
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(pages.ctypes.data, nbytes, 0)
    if error == runtime.cudaError.success:
        weakref.finalize(pages, runtime.cudaHostUnregister, pages.ctypes.data)
    else:
        logger.warning(
            "pinning %.1f MiB of host memory failed (%s): copies of optimizer state will be slower and not overlap; "
            "raise the limit of locked memory (ulimit -l)",
            nbytes / 2**20,
            error,
        )
    return torch.from_numpy(pages)


class _Pages(np.ndarray):
    """An array that can be referenced weakly."""
