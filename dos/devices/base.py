"""The protocol of an accelerator. Streams and events stay behind this protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dos.devices.pinned import lazy_zeros
from dos.torch_internals.tensors import has_storage, is_zero_tensor
from perfmodel import Lane, Op, Span
from perfmodel.compute import RESTORE, SAVE
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM
from perfmodel.tasks import FLUSH, GRADIENT, ON_DEVICE, PARAMETER, PREFETCH
from perfmodel.weights import WEIGHTS

Copy = tuple[Tensor, Tensor]
"""(destination, source): 1-D tensors of equal length and dtype."""


_STREAMS = (GRADIENT, FLUSH, PREFETCH, PARAMETER, ON_DEVICE, SAVE, RESTORE, WEIGHTS)
LANE_OF = {op: LANE_OF_STREAM[stream] for op, stream in _STREAMS}
"""The operations that a device has a stream for, and the lane of each."""


Behind = Callable[[], None]
"""Queues work of a job behind its copies in the current queue of the device.

If it has a method `kernel`, that returns the work as a kernel that native code launches in its place, or None.
"""


Caller = Hashable
"""A queue in which the caller's own work on the device is in order."""


class Memory(NamedTuple):
    """Device memory in bytes."""

    free: int
    total: int


class Cached(NamedTuple):
    """Bytes of device memory that this process has reserved; `unused` of them, state can take and no other process.

    least: the least of `unused` since the last call, negative if more was reserved then; None if that is not known, or
        the peak has not risen.
    """

    reserved: int
    unused: int
    least: int | None = None


class Job(Protocol):
    """Work in flight."""

    def wait(self) -> Span:
        """Block until the work is done; return when it ran. Raises the exception of the work, or of work before it."""


@dataclass(eq=False)
class ThreadJob:
    """A job that a thread of ours runs."""

    future: Future[Span]

    def wait(self) -> Span:
        return self.future.result()


@dataclass(eq=False)
class Promise:
    """A job that another thread will issue."""

    future: Future[Job]

    def wait(self) -> Span:
        return self.future.result().wait()


@dataclass(frozen=True)
class HostJob:
    """Work of the host that has ended. A device need not wait for it."""

    span: Span

    def wait(self) -> Span:
        return self.span


def has_ended(job: Job) -> bool:
    """Return whether a job of a device, or of the host, has ended. Does not wait.

    A job that has failed, or that cannot be asked, has ended, too: the thread that waits for it finds out.
    """
    try:
        asked = getattr(job, "at", None)  # jobs of a device that is queued for can be asked as marks can
        if asked is not None:
            return asked() is not None
        future = getattr(job, "future", None)
        if not isinstance(future, Future):
            return True
        if not future.done():
            return False
        result = future.result()
        return isinstance(result, Span) or has_ended(result)  # else the job that another thread issued
    except Exception:
        return True


class Mark(Protocol):
    """A place in the work that the caller queues on the device."""

    def at(self) -> float | None:
        """Return when the device reached it, by time.perf_counter; None: not yet. Does not wait."""


class Moment(NamedTuple):
    """A mark at a time of the host."""

    seconds: float

    def at(self) -> float:
        return self.seconds


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the one storage that has a tensor's values; None if there is no such storage.

    A sparse tensor has several, an MKLDNN tensor has an opaque one, a tensor within torch.func has the storage of the
    tensor that it wraps, and a zero tensor of forward-mode AD has a storage whose address is null.
    """
    return tensor.untyped_storage() if has_storage(tensor) and not is_zero_tensor(tensor) else None


def pinned_zeros(device: Device, numel: int, dtype: torch.dtype) -> Tensor:
    """Return `numel` zeros, 1-D, in pinned host memory whose pages are allocated at once. numel: at least 1."""
    return pinned_whole(device, lazy_zeros(numel, dtype)).zero_()


def pinned_whole(device: Device, zeros: Tensor) -> Tensor:
    """Return a tensor of `lazy_zeros`, pinned, or pinned zeros in its place if its memory cannot be."""
    found = None if device.pin(zeros) else device.allocate_pinned(zeros.nbytes)
    return zeros if found is None else found.view(zeros.dtype)


class Device(Protocol):
    """An accelerator: memory, and one in-order stream for each kind of operation.

    Work of different streams runs at once unless `after` orders it. Three streams share each link (gradients, flushes
    and saved tensors; prefetches, parameters and restored tensors), so that a transfer that waits does not delay one
    that is ready.
    """

    @property
    def uuid(self) -> str | None:
        """The device's UUID as NVML writes it; None if NVML does not know the device's memory."""

    @property
    def name(self) -> str:
        """The device's name in profiles."""

    @property
    def known_profile(self) -> HardwareProfile | None:
        """The rates of an emulated machine; None for a real one, whose rates are measured."""

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device's memory is the host's: moving state from one to the other releases no memory."""

    @property
    def queues(self) -> bool:
        """Whether the caller's work on the device is queued, so that it can be ordered behind ours without waiting."""

    @property
    def event_query(self) -> int:
        """The address of the runtime's function that asks an event, for `dos.kernels.update.Arrivals`.

        The event is `event` of a job. 0: jobs have futures in place of events.
        """

    def capturing(self) -> bool:
        """Return whether the caller's work is being captured in a graph, during which no event may be queried."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in this device's memory."""

    def pin(self, tensor: Tensor) -> bool:
        """Allocate and pin the memory of a tensor of `lazy_zeros`, or of a part, so that the device copies fast.

        Parts that are pinned one by one begin on page boundaries. Returns whether all of it is pinned.
        """

    def unpin(self, tensor: Tensor, unused: Tensor) -> None:
        """Undo `pin` for memory pinned by one call, and release the memory of `unused`, whole pages of it."""

    def allocate_pinned(self, nbytes: int) -> Tensor | None:
        """Return pinned zeros, 1-D uint8, of the runtime, where it pins no memory of ours; else None."""

    owner: Caller
    """The caller's queue for which `allocate` allocates: the one in which `step()` is called."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return uninitialised device memory, 1-D uint8, released with its last view. Raises torch.OutOfMemoryError."""

    def free(self, buffer: Tensor) -> None:
        """Release memory of `allocate`, of which threads may still have views. No work in flight may use it."""

    def refill(self, buffer: Tensor) -> None:
        """Allocate uninitialised memory for the storage of a 1-D uint8 tensor of the device, which was emptied.

        All tensors in the storage share it. Raises torch.OutOfMemoryError.
        """

    def empty(self, buffer: Tensor) -> None:
        """Release the memory of a tensor's storage. Work in flight may use it only in the queue `owner`."""

    def keep(self, buffer: Tensor, op: Op | None = None) -> None:
        """Keep the memory, once it is released, until queued work ends, as `torch.Tensor.record_stream` does.

        op: work on the stream of this operation; None: work in the queue in which the caller works now.
        """

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor of the model as long as it exists. Only emulated devices need this.

        Raises torch.OutOfMemoryError if the device has too little memory.
        """

    def memory(self) -> Memory:
        """Return free and total device memory as the runtime sees it."""

    def cached(self) -> Cached:
        """Return the bytes that this process has reserved, used or not."""

    def trim(self) -> None:
        """Return reserved memory that is not used to the system. May wait for all work on the device.

        Until then no call of the runtime returns, in any thread.
        """

    def join(self, job: Job) -> None:
        """Order the work that the caller queues from now on behind `job`. Raises the exception of the job."""

    def caller(self) -> Caller:
        """Return the queue in which the caller works now: backward has one for each stream of the forward."""

    caller_number: Callable[[], int]
    """Returns a number that no other `caller` has, of all that live; each gradient asks, so not a method of Python."""

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        """Return jobs for the work that the caller has queued on the device so far, such as the backward pass.

        callers: the caller's queues; empty: the one in which it works now.
        """

    def mark(self) -> Mark:
        """Return a mark at the end of the work that the caller has queued so far."""

    def copy(
        self,
        op: Op,
        subgroup: int,
        copies: Sequence[Copy],
        after: Sequence[Job] = (),
        then: Behind | None = None,
    ) -> Job:
        """Copy across the link of `op` once all of `after` are done; keep the memory of both sides until the end.

        then: queues work on the device behind the copies, which belongs to the job.
        """

    def launch(
        self,
        subgroup: int,
        update: Callable[[], None],
        numel: int,
        after: Sequence[Job] = (),
        reads: Sequence[Tensor] = (),
        state_format: str = MIXED.name,
    ) -> Job:
        """Run `update`, which updates `numel` parameters on the device, once all of `after` are done.

        reads: device tensors of the caller that `update` reads; their memory is kept until it is done.
        state_format: of the parameters' state.
        """

    def bind_host_thread(self) -> None:
        """Bind this thread, which updates on the host, to the cores near the device. Each such thread calls it once."""

    @property
    def only_clocks_updates(self) -> bool:
        """Whether `host_update` does no more now than read the clock, so that native code may do it."""

    def host_update(self, numel: int, traffic: int, state_format: str = MIXED.name) -> AbstractContextManager[float]:
        """Surround an update of `numel` parameters on the host; yield the time.perf_counter() of its start.

        traffic: bytes that it moves through host DRAM. state_format: of the parameters' state.
        """

    def disk_io(self, lane: Lane, nbytes: int) -> AbstractContextManager[float]:
        """Surround a transfer of `nbytes` between host and disk; yield the time.perf_counter() of its start.

        lane: Lane.READ or Lane.WRITE.
        """
