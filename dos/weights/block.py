"""One block's weights: at home on the host, and in device memory while the block computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from dos.devices import Caller, Copy, Device, Job
from dos.state.arena import Arena, aligned
from dos.torch_internals.module_parameters import exchange
from dos.torch_internals.tensors import storage_address, version_counter
from dos.weights.blocks import Member
from perfmodel import Op


class Block:
    """The parameters that belong to one block alone.

    A *home* is a parameter as user code knows it. While the block computes its modules have *copies* instead,
    parameters of our own on the device, whose gradients backward writes. All copies lie in one storage, which is
    emptied when the block has computed and filled again when it is needed: views that autograd has saved of them are
    then valid again.

    number: its place among the blocks. nbytes: of its weights in device memory.
    streams: whether its homes are on the host; else they share the memory of the copies, for good.
    filled: whether the copies have values, or these are on their way. running: how many of its forwards run.
    touched: whether the backward that runs has used it. arenas: those of the homes of trained parameters.
    """

    # Device memory of one block: `fetch` gives it memory and starts the copy, `join` orders the caller behind that,
    # `free` empties it. The copies keep the same storage and the same counters of writes all the time.
    def __init__(self, number: int, members: Sequence[Member], device: Device) -> None:
        self.number = number
        self.members = members
        self.streams = True
        self.filled = self.touched = False
        self.running = 0
        self.arenas: Collection[Arena] = ()
        self._device = device
        self._job: Job | None = None
        """The copy that fills it, until each queue that uses it has joined that."""
        self._reading: Job | None = None
        """The last copy that reads the homes, which may run on when nothing uses its values any more."""
        self._joined: set[Caller] = set()
        self._versions: list[int] = []
        self._leads: list[int] = []
        """`_lead` as it was when the modules got the copies."""
        self._queue: Caller = None
        sizes = [member.parameter.nbytes for member in members]
        self._starts = [sum(map(aligned, sizes[:i])) for i in range(len(sizes))]
        self.nbytes = sum(map(aligned, sizes))
        self.copies: list[nn.Parameter] = []

    def make_copies(self, like: torch.device) -> None:
        """Make the copies, without memory. like: of the device that has them."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=like)
        self._buffer = buffer
        for member, start in zip(self.members, self._starts, strict=True):
            home = member.parameter.detach()
            # Not a view: each has a counter of writes of its own, which filling the buffer does not raise.
            copy = torch.empty(0, dtype=home.dtype, device=like)
            copy.set_(buffer.untyped_storage(), start // home.itemsize, home.size(), home.stride())
            self.copies.append(nn.Parameter(copy, requires_grad=member.parameter.requires_grad))
        buffer.untyped_storage().resize_(0)
        self._leads = self._lead()

    def __del__(self) -> None:
        if self.filled and not self._joined:
            self._device.keep(self._buffer, Op.WEIGHTS)  # as in `free`, where the model goes

    @property
    def storage(self) -> int:
        """The address of the copies' storage."""
        return storage_address(self._buffer.untyped_storage())

    def fetch(self, after: Sequence[Job]) -> Job:
        """Give the copies memory and start to fill it from the homes. Raises torch.OutOfMemoryError.

        after: the jobs after which the homes have the newest values.
        """
        self._device.refill(self._buffer)
        self._queue = self._device.owner
        # The memory may be what the caller's queue used until now.
        job = self._device.copy(
            Op.WEIGHTS, self.number, self._transfers(), (*self._device.fence([self._queue]), *after)
        )
        # Not before: if the copy raises, what is there are no weights.
        self.filled = True
        self._job = self._reading = job
        for arena in self.arenas:
            arena.reading = job
        self._versions = self._now()
        return job

    def _now(self) -> list[int]:
        return [version_counter(member.parameter) for member in self.members]

    @property
    def stale(self) -> bool:
        """Whether a home was written to since the copies were filled."""
        return self._versions != self._now()

    def _transfers(self) -> list[Copy]:
        """The copies that fill the device's memory from the homes."""
        # Through the buffer, not through the parameters: their counters of writes must not rise, for what autograd has
        # saved of them is valid again once they are filled.
        parts = [self._buffer[start : start + c.nbytes] for start, c in zip(self._starts, self.copies, strict=True)]
        return [(part, flat_bytes(member.parameter)) for member, part in zip(self.members, parts, strict=True)]

    @property
    def joined(self) -> bool:
        """Whether the caller's queue is ordered behind the copy that fills it."""
        return self._device.caller() in self._joined

    def join(self) -> None:
        """Order the caller's queue behind that copy."""
        here = self._device.caller()
        if here in self._joined:
            return
        if self._job is not None:
            self._device.join(self._job)  # the caller reads what the copy writes
        if here != self._queue:
            # The allocator knows only the queue that the memory was taken for, whose next work would get it while this
            # one still reads it.
            self._device.keep(self._buffer)
        self._joined.add(here)

    def free(self) -> None:
        """Empty the copies, behind what the caller has queued."""
        if not self.filled:
            return
        if self._job is not None and not self._joined:
            self.join()  # no forward has: the copy would write to memory that the allocator gives away
        self.filled = self.touched = False
        self._job, self._joined = None, set()
        # Views that autograd has saved keep the storage object, and no memory. A read of one before the next fetch is a
        # fault, so whatever reads them asks for the block first (`WeightStream.before_use`, `begins`).
        self._device.empty(self._buffer)

    def finish_reading(self) -> None:
        """Block until no copy reads the homes, to which user code may write then."""
        reading = self._reading
        if reading is not None:
            reading.wait()
            if self._reading is reading:  # backward may have fetched it again, in its thread
                self._reading = None

    def use_copies(self) -> None:
        """Let the block's modules have the copies."""
        for member, copy in zip(self.members, self.copies, strict=True):
            # User code freezes and unfreezes the parameters that it knows.
            if copy.requires_grad != member.parameter.requires_grad:
                copy.requires_grad_(member.parameter.requires_grad)
            for module, name in member.places:
                exchange(module, name, copy)
        self._leads = self._lead()

    def use_homes(self) -> None:
        """Let the block's modules have the homes."""
        # Before user code can look: it would save, average or load into memory that is emptied.
        for member in self.members:
            for module, name in member.places:
                exchange(module, name, member.parameter)

    def _lead(self) -> list[int]:
        """How often each copy was written to, less the writes to its home: `tell_autograd` counts for both."""
        return [version_counter(c) - now for c, now in zip(self.copies, self._now(), strict=True)]

    def check_copies(self) -> None:
        """Raise RuntimeError if the block's forward wrote to its parameters: no write reaches the homes."""
        for copy, before, after in zip(self.copies, self._leads, self._lead(), strict=True):
            if after > before or storage_address(copy.untyped_storage()) != self.storage:
                raise RuntimeError(
                    f"the forward of a block wrote to its own parameter of shape {tuple(copy.shape)}, or replaced its "
                    "memory, and its weights stream: what is written there is lost; write to it between step() and the "
                    "next forward, or attach the model without weights="
                )


def flat_bytes(tensor: Tensor) -> Tensor:
    """A 1-D uint8 view of a dense tensor's memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
