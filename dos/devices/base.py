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


Caller = Hashable
"""A queue in which the caller's own work on the device is in order."""


class Memory(NamedTuple):
    """Device memory in bytes."""

    free: int
    total: int


class Cached(NamedTuple):
    """Bytes of device memory that this process has reserved, and what of them state could have though others cannot.

    least: of `unused`, when most was in use since this was asked last, negative if more was reserved then; None if
    that is not known, or no more than before.
    """

    reserved: int
    unused: int
    least: int | None = None


class Job(Protocol):
    """Work in flight."""

    def wait(self) -> Span:
        """Block until the work is done and say when it ran. Raises what the work, or work it waited for, raised."""


@dataclass(eq=False)
class ThreadJob:
    """A job that a thread of ours runs."""

    future: Future[Span]

    def wait(self) -> Span:
        return self.future.result()


@dataclass(frozen=True)
class HostJob:
    """Work of the host that has ended. A device need not wait for it."""

    span: Span

    def wait(self) -> Span:
        return self.span


class Mark(Protocol):
    """A place in the work that the caller queues on the device."""

    def at(self) -> float | None:
        """When the device came to it, by time.perf_counter; None: it has not yet. Does not wait."""


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The one piece of memory that a tensor's values lie in; None if there is no such piece.

    A sparse tensor has several, an MKLDNN tensor has an opaque one, a tensor within torch.func has that of what it
    wraps, and a zero tensor of forward-mode AD has a storage whose address is null.
    """
    return tensor.untyped_storage() if has_storage(tensor) and not is_zero_tensor(tensor) else None


def pinned_zeros(device: Device, numel: int, dtype: torch.dtype) -> Tensor:
    """1-D zeros in host memory that is there at once, at least one."""
    zeros = lazy_zeros(numel, dtype)
    device.pin(zeros)
    return zeros.zero_()


class Device(Protocol):
    """An accelerator: memory, and one in-order stream for each kind of operation.

    Work of different streams runs at once unless `after` orders it. Three streams share each link (gradients, flushes
    and saved tensors; prefetches, parameters and restored tensors), so that a transfer that waits does not hold up one
    that could go.
    """

    @property
    def uuid(self) -> str | None:
        """The device's UUID as NVML writes it; None for one of whose memory NVML knows nothing."""

    @property
    def name(self) -> str:
        """Its name in profiles."""

    @property
    def known_profile(self) -> HardwareProfile | None:
        """The rates of an emulated machine; None for a real one, whose rates are measured."""

    @property
    def shares_host_memory(self) -> bool:
        """Whether the device's memory is the host's: state that goes from one to the other makes no room."""

    @property
    def queues(self) -> bool:
        """Whether the caller's work on the device is queued, so that it can be ordered behind ours without waiting."""

    def capturing(self) -> bool:
        """Whether the caller's work is being captured in a graph, where events of others must not be asked for."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in this device's memory."""

    def pin(self, tensor: Tensor) -> None:
        """Make the memory of a part of what `lazy_zeros` gave, so that the device copies fast from there.

        Parts that are pinned one by one begin on page boundaries.
        """

    def unpin(self, tensor: Tensor, unused: Tensor) -> None:
        """Undo `pin` for what was pinned as one. Give the memory of `unused`, a part of that in whole pages, back."""

    owner: Caller
    """The queue of the caller's from whose memory `allocate` takes: that in which `step()` is called."""

    def allocate(self, nbytes: int) -> Tensor:
        """1-D uint8 device memory, uninitialised, which goes with its last view. Raises torch.OutOfMemoryError."""

    def free(self, buffer: Tensor) -> None:
        """Give back what `allocate` gave, of which threads may have views yet. No work in flight may use it."""

    def refill(self, buffer: Tensor) -> None:
        """Give memory, uninitialised, to a 1-D uint8 tensor of the device whose storage was emptied.

        All tensors in its storage have it. Raises torch.OutOfMemoryError.
        """

    def empty(self, buffer: Tensor) -> None:
        """Free the memory of such a tensor's storage. No work in flight may use it; in `owner`, what is queued may."""

    def keep(self, buffer: Tensor, op: Op | None = None) -> None:
        """Let the memory stay, once it is let go of, until what is queued so far may not use it any more.

        op: on the stream of this operation; None: in the queue in which the caller works now.
        """

    def count(self, tensor: Tensor) -> None:
        """Count a tensor of the model's as long as it is there. Only emulated devices must be told.

        Raises torch.OutOfMemoryError if there is no room for it.
        """

    def memory(self) -> Memory:
        """Free and total device memory as the runtime sees it."""

    def cached(self) -> Cached:
        """The bytes that this process has reserved, used or not: all else that is not free is others'."""

    def trim(self) -> None:
        """Give what is reserved and not used back to all. May wait for the device."""

    def join(self, job: Job) -> None:
        """Order what the caller queues on the device from now on behind `job`. Raises what the job raised."""

    def caller(self) -> Caller:
        """In which of its queues the caller works now: backward has one for each stream of the forward."""

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        """The work that the caller has queued on the device so far, such as the backward pass.

        callers: in these of its queues; none: in the one in which it works now.
        """

    def mark(self) -> Mark:
        """The place to which the caller's work has been queued so far."""

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        """Copy across the link of `op` once all of `after` are done. The memory of both sides stays until then."""

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

        reads: device tensors of the caller's that `update` reads; their memory stays until it is done.
        state_format: of the parameters' state.
        """

    def bind_host_thread(self) -> None:
        """Called once by the thread that will update on the host: to run it where the device's memory is near."""

    def host_update(self, numel: int, traffic: int, state_format: str = MIXED.name) -> AbstractContextManager[float]:
        """Surrounds an update of `numel` parameters on the host; gives the time.perf_counter() of its start.

        traffic: bytes that it moves through host DRAM. state_format: of the parameters' state.
        """

    def disk_io(self, lane: Lane, nbytes: int) -> AbstractContextManager[float]:
        """Surrounds a transfer of so many bytes between host and disk; gives the time.perf_counter() of its start.

        lane: Lane.READ or Lane.WRITE.
        """
