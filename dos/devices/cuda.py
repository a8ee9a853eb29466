"""A CUDA device: torch streams and events, and pinned host memory of exact size."""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from dos.devices.base import LANES, Copy, Job, Memory
from perfmodel import Lane, Op, Span

logger = logging.getLogger(__name__)


class CudaDevice:
    """The engine's view of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._streams = {op: torch.cuda.Stream(self.torch_device) for op in LANES}
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(self.torch_device))
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device})"

    def __reduce__(self) -> tuple[object, ...]:
        return CudaDevice, (self.torch_device,)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _pinned_zeros(numel * dtype.itemsize).view(dtype) if numel else torch.zeros(0, dtype=dtype)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Nothing to do: the caching allocator takes the memory when the last view goes."""

    def memory(self) -> Memory:
        return Memory(*torch.cuda.mem_get_info(self.torch_device))

    def join(self, job: Job) -> None:
        assert isinstance(job, _CudaJob)
        torch.cuda.current_stream(self.torch_device).wait_event(job.end)

    def fence(self) -> Sequence[Job]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return (_CudaJob(self, event, event, Op.BACKWARD, Lane.GPU, None),)

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

    def _queue(
        self, op: Op, subgroup: int, work: Callable[[], None], after: Sequence[Job], used: Sequence[Tensor]
    ) -> Job:
        stream = self._streams[op]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
        return _CudaJob(self, start, end, op, LANES[op], subgroup)

    def seconds(self, event: torch.cuda.Event) -> float:
        """When a finished timing event happened, on the clock of time.perf_counter."""
        return self._origin_s + self._origin.elapsed_time(event) / 1e3


class _CudaJob:
    """Work on a stream between two events."""

    def __init__(
        self,
        device: CudaDevice,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        op: Op,
        lane: Lane,
        subgroup: int | None,
    ) -> None:
        self.end = end
        self._device, self._start, self._op, self._lane, self._subgroup = device, start, op, lane, subgroup

    def wait(self) -> Span:
        self.end.synchronize()
        if self._op is Op.BACKWARD:  # a fence has no beginning of its own
            now = time.perf_counter()
            return Span(self._lane, self._op, self._subgroup, now, now)
        start, end = self._device.seconds(self._start), self._device.seconds(self.end)
        return Span(self._lane, self._op, self._subgroup, start, end)


def _pinned_zeros(nbytes: int) -> Tensor:
    """1-D uint8 zeros whose pages are registered for fast copies; `pin_memory=True` would round up to a power of 2."""
    # A numpy array in between, because its finaliser runs before the mapping under it goes.
    pages = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8).view(_Pages)
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
