"""One block's weights: at home on the host, and in device memory while the block computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from dos.devices import Caller, Copy, Device, Job
from dos.devices.base import has_ended
from dos.state.arena import Arena, aligned
from dos.state.own_storage import overlap_with
from dos.torch_internals.module_parameters import exchange
from dos.torch_internals.tensors import storage_address, version_counter
from dos.weights.blocks import Member
from dos.weights.former import FormerMemory
from perfmodel import Op


class OnDevice:
    """The bytes of the device that the blocks of a model take, counted as they change; may be read from any thread.

    nbytes: the bytes of all blocks that are filled. streaming: the number of those of them that stream.
    """

    def __init__(self) -> None:
        self.nbytes = self.streaming = 0


class Block:
    """The parameters that belong to one block alone.

    A *home* is a parameter as user code knows it. While the block computes, its modules have *copies* instead,
    parameters of our own on the device, whose gradients backward writes. All copies share one storage, which is emptied
    when the block has computed and filled again when it is needed: views that autograd has saved of it are then valid
    again.

    number: its place among the blocks. nbytes: the size of its weights in device memory.
    streams: whether its homes are on the host; else they share the memory of the copies.
    filled: whether the copies have values, or a transfer writes them. running: the number of its forwards that run.
    exchanging: whether its modules get other parameters now.
    thread: the thread in which the last of them has begun.
    lost: whether this process is a forked child that lacks memory of its homes.
    touched: whether the backward that runs has used it. due: how many of the forwards that it has recomputed it has yet
        to pass. lent: whether the modules have the copies although the block does not run.
    mark: stands for the block where a reference would be a cycle. detached: whether another block has taken its place.
    arenas: the arenas of trained parameters.
    places: the memory that its parameters must have, by their ids: homes, or the copies'; empty before they are moved.
    """

    # Device memory of one block: `fetch` allocates it and starts the copy, `join` orders the caller behind the copy,
    # `release` empties it. The copies always have the same storage and the same version counters.
    def __init__(self, number: int, members: Sequence[Member], device: Device, there: OnDevice) -> None:
        """there: counts this block, too."""
        self._there = there
        self.number = number
        self.members = members
        self.streams = True
        self.filled = self.touched = self.lent = self.detached = self.lost = False
        self.exchanging = False
        self.running = self.due = self.thread = 0
        self.mark = object()
        self.arenas: Collection[Arena] = ()
        self._device = device
        self._reading: Job | None = None
        """The last transfer that reads the homes and fills the copies. It may run on after `release`."""
        self._joined: set[Caller] = set()
        self._versions: list[int] = []
        self._offsets_at_load: list[int] = []
        """The value of `_version_offsets` when the modules got the copies."""
        self._queue: Caller = None
        sizes = [member.parameter.nbytes for member in members]
        self._starts = [sum(map(aligned, sizes[:i])) for i in range(len(sizes))]
        self.nbytes = sum(map(aligned, sizes))
        self.copies: list[nn.Parameter] = []
        self.places: dict[int, Tensor] = {}
        self._former = FormerMemory()

    def __repr__(self) -> str:
        """Say where the weights are, what moves them, and who uses them, without a wait."""
        said = [f"{self.nbytes} bytes", "at home"]
        if self.filled:
            coming = self._reading is not None and not has_ended(self._reading)
            said[1] = "coming to the device" if coming else "on the device" if self.streams else "stays on the device"
            said += [f"queues behind its transfer: {len(self._joined)}"] if self._joined else []
        elif self._reading is not None and not has_ended(self._reading):
            said.append("a released transfer reads its home")
        said += [f"forwards that run: {self.running}"] if self.running else []
        said += ["backward has used it"] if self.touched else []
        said += ["the modules have its copies"] if self.lent or self.running else []
        return f"<Block {self.number}: {', '.join(said)}>"

    def make_copies(self, like: torch.device) -> None:
        """Make the copies, without memory. like: their device."""
        for member, copy in zip(self.members, self._make_buffer(like), strict=True):
            self.copies.append(nn.Parameter(copy, requires_grad=member.parameter.requires_grad))
        self._offsets_at_load = self._version_offsets()

    def _make_buffer(self, like: torch.device) -> list[Tensor]:
        """Make the storage of the copies, without memory; return tensors for them. like: their device."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=like)
        self._buffer, tensors = buffer, []
        for member, start in zip(self.members, self._starts, strict=True):
            home = member.parameter.detach()
            # Not a view: each copy has a version counter of its own, which filling the buffer does not raise.
            copy = torch.empty(0, dtype=home.dtype, device=like)
            tensors.append(copy.set_(buffer.untyped_storage(), start // home.itemsize, home.size(), home.stride()))
        buffer.untyped_storage().resize_(0)
        return tensors

    def count(self, *, filled: bool, streams: bool) -> None:
        """Set both, and count the block by them."""
        self._there.nbytes += (filled - self.filled) * self.nbytes
        self._there.streaming += (filled and streams) - (self.filled and self.streams)
        self.filled, self.streams = filled, streams

    def leave_memory(self) -> None:
        """Go on without memory, in another storage: user code may have kept tensors of weights that have stayed.

        Such a tensor has a storage of its own over this memory, which emptying the copies' storage would free.
        """
        for copy, tensor in zip(self.copies, self._make_buffer(self._buffer.device), strict=True):
            copy.data = tensor
        self.count(filled=False, streams=self.streams)
        self._joined = set()

    def __del__(self) -> None:
        if self.filled and not self._joined:
            # The allocator would give the memory away while the transfer still writes to it.
            self._device.keep(self._buffer, Op.WEIGHTS)

    def use_memory(self, places: Sequence[Tensor]) -> None:
        """Let the parameters have this memory, whose values they already have: on the host, or the copies'."""
        for member, place in zip(self.members, places, strict=True):
            self._former.give(member.parameter, place)
        # `data`, whose version counter is its own: autograd must take no update for a write to a copy.
        self.places = {id(m.parameter): place.data for m, place in zip(self.members, places, strict=True)}

    @property
    def kept(self) -> bool:
        """Whether user code keeps memory of a parameter into which other values were written; see `FormerMemory`."""
        return bool(self._former)

    def replaced(self) -> list[Tensor]:
        """Return the parameters whose memory user code has replaced, as by `p.data = ...`, or has put back since."""
        pairs = ((m.parameter, self.places[id(m.parameter)]) for m in self.members if self.places)
        return [p for p, place in pairs if _layout(p) != _layout(place) or self._former.is_back(p)]

    def give_back(self, parameter: Tensor, place: Tensor, values: Tensor) -> None:
        """Give a parameter whose memory was replaced its place again, with these values."""
        place.copy_(self._former.take(parameter, place, values))
        self._former.give(parameter, place)
        # Backward refuses graphs from before, which saved the copy.
        copy = next(c for m, c in zip(self.members, self.copies, strict=True) if m.parameter is parameter)
        torch.autograd.graph.increment_version(copy)

    @property
    def storage(self) -> int:
        """The address of the copies' storage."""
        return storage_address(self._buffer.untyped_storage())

    def fetch(self, after: Sequence[Job]) -> Job:
        """Allocate memory for the copies and start to fill it from the homes. Raises torch.OutOfMemoryError.

        after: the jobs after which the homes have the newest values.
        """
        self._device.refill(self._buffer)
        self._queue = self._device.owner
        # Behind the caller's queue, which may still use former contents of this memory.
        job = self._device.copy(
            Op.WEIGHTS, self.number, self._transfers(), (*self._device.fence([self._queue]), *after)
        )
        # After the copy was issued: if that raises, the memory has no weights.
        self.count(filled=True, streams=self.streams)
        self._reading = job
        for arena in self.arenas:
            arena.reading = job
        self._versions = self._now()
        return job

    def _now(self) -> list[int]:
        return [version_counter(member.parameter) for member in self.members]

    @property
    def stale(self) -> bool:
        """Whether user code or an update wrote to a home since the copies were filled."""
        return self._versions != self._now()

    def _transfers(self) -> list[Copy]:
        """Return the copies from the homes to the device's memory."""
        # Into the buffer, not into the parameters, whose version counters must not rise: the tensors that autograd has
        # saved of them are valid again once the buffer is filled.
        parts = [self._buffer[start : start + c.nbytes] for start, c in zip(self._starts, self.copies, strict=True)]
        # From the places, not from the parameters, whose storages are apart: small neighbours are copied together.
        homes = [self.places.get(id(member.parameter), member.parameter) for member in self.members]
        return [(part, flat_bytes(home)) for home, part in zip(homes, parts, strict=True)]

    @property
    def joined(self) -> bool:
        """Whether the caller's queue is ordered behind the transfer that fills the copies."""
        return self._device.caller() in self._joined

    def join(self) -> None:
        """Order the caller's queue behind the transfer that fills the copies."""
        here = self._device.caller()
        if here in self._joined:
            return
        if self._reading is not None:
            self._device.join(self._reading)  # the caller reads the weights that the transfer writes
        if here != self._queue:
            # The allocator knows only the queue that allocated the memory, and would give it to that queue's next work
            # while this queue still reads it.
            self._device.keep(self._buffer)
        self._joined.add(here)

    def release(self) -> None:
        """Release the memory of the copies, behind the work that the caller has queued."""
        if not self.filled:
            return
        if not self._joined:
            self.join()  # no forward has joined: the transfer would write to memory that the allocator gives away
        self.count(filled=False, streams=self.streams)
        self._joined = set()
        # Views that autograd has saved keep the storage object, without memory. Reading one before the next fetch would
        # be a fault, so `BackwardHooks` fetch the block before.
        self._device.empty(self._buffer)

    def end_backward(self) -> None:
        """Forget what a backward has used, which has ended or raised."""
        self.touched, self.due = False, 0
        if self.lent:
            self.use_homes()

    def finish_reading(self) -> None:
        """Block until no transfer reads the homes, so that user code may write to them."""
        reading = self._reading
        if reading is not None:
            # The transfer would read half of the values that user code is about to write.
            reading.wait()
            if self._reading is reading:  # backward's thread may have fetched the block again
                self._reading = None

    def use_copies(self) -> None:
        """Set the copies as the parameters of the block's modules."""
        for member, copy in zip(self.members, self.copies, strict=True):
            # User code freezes and unfreezes the homes, which are the parameters that it knows.
            if copy.requires_grad != member.parameter.requires_grad:
                copy.requires_grad_(member.parameter.requires_grad)
        self._exchange(self.copies)
        self._offsets_at_load = self._version_offsets()

    def use_homes(self) -> None:
        """Set the homes as the parameters of the block's modules."""
        self.lent = False
        # Before user code can read the copies: it would save, average or load into memory that is released.
        self._exchange([member.parameter for member in self.members])

    def _exchange(self, parameters: Sequence[Tensor]) -> None:
        self.exchanging = True  # recurrent layers read their parameters as these are set, which is no use by user code
        try:
            for member, parameter in zip(self.members, parameters, strict=True):
                for module, name in member.places:
                    exchange(module, name, parameter)
        finally:
            self.exchanging = False

    def _version_offsets(self) -> list[int]:
        """Return the writes to each copy less the writes to its home: `tell_autograd` raises both counters."""
        return [version_counter(c) - now for c, now in zip(self.copies, self._now(), strict=True)]

    def check_copies(self) -> None:
        """Raise RuntimeError if the block's forward wrote to its parameters: no write reaches the homes."""
        for copy, before, after in zip(self.copies, self._offsets_at_load, self._version_offsets(), strict=True):
            if after > before or storage_address(copy.untyped_storage()) != self.storage:
                raise RuntimeError(
                    f"the forward of a block wrote to its own parameter of shape {tuple(copy.shape)}, or replaced its "
                    "memory, and its weights stream: what is written there is lost; write to it between step() and the "
                    "next forward, or attach the model without weights="
                )


def take_replaced(blocks: Iterable[Block]) -> None:
    """Copy the values of `replaced` parameters to the memory that updates and transfers use, and give them that.

    No work in flight may use either. Raises RuntimeError, with nothing changed, where it cannot have the values.
    """
    found = [(block, p, block.places[id(p)]) for block in blocks for p in block.replaced()]
    for _, p, place in found:
        if p.shape != place.shape or p.dtype != place.dtype:
            raise RuntimeError(
                f"a parameter has got other memory, as by p.data = ..., of {p.dtype} and shape {tuple(p.shape)}, "
                f"and its weights began to stream as {place.dtype} of shape {tuple(place.shape)}; give it memory "
                "of that type and shape, or build a new model and a new optimizer"
            )
    # Where user code has exchanged weights, the memory of one is the place of another, which is written below. That
    # of `p.data.t()` is its own place in another order.
    lies_in_place = overlap_with(place for *_, place in found)
    values = {id(p): p.detach().clone() if lies_in_place(p) else p.detach() for _, p, _ in found}
    for block, p, place in found:
        block.give_back(p, place, values[id(p)])


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a 1-D uint8 view of a dense tensor's memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
