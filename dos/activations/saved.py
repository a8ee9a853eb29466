"""Stand-ins for tensors that autograd saves, the places of their bytes meanwhile, and all that one forward saves."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dos.activations.pool import Block
from dos.devices import Caller, Device, Job, Mark
from dos.sharding.local import counted_with, is_sharded, local, version
from dos.state.arena import ALIGNMENT
from dos.torch_internals.dtensors import local_tensor, set_local_tensor
from perfmodel import Op
from perfmodel.workload import SavedTensors

WINDOW = 16
"""Of what a forward has saved, the part that may be on its way to the host, or back ahead of its use, at a time."""
MOST = 2 * WINDOW
"""Of such groups are plans made, two of which stay on the device."""


Range = tuple[int, int, int]
"""Bytes of a storage: the address of the storage object, the first byte, and where they end."""


class Saved:
    """A range of device memory that backward will read: on the device, on the host, or on its way.

    nbytes: of it. forward: all that its forward saved, where it has its number, and a place in the order of use.
    tensors: how many were saved in it. spent: whether backward has read them all.
    """

    forward: SavedByForward

    _host: tuple[Block, Job] | None = None
    """Where it went, and the copy there."""
    _back: tuple[Tensor, Job] | None = None
    """Where it came back to, and the copy there."""

    # Its life: `leave` starts the copy to a block on the host, and `free` lets go of the device's memory behind it.
    # `bring_back` starts the copy into other memory, `read` makes tensors of that, and lets go of it when all have
    # been read; with retain_graph it comes back again. User code may drop the graph at any point, where `__del__`
    # leaves memory to the copies that still use it.
    def __init__(self, device: Device, part: Tensor, where: Range, travelling: Travelling) -> None:
        """where: bytes of the storage of `part`."""
        self._travelling, self._reference = travelling, weakref.ref(self)
        storage = part.untyped_storage()
        self._device = device
        self.where = where
        _, self._first, last = where
        self.nbytes = last - self._first
        self._callers: set[Caller] = set()
        """In which of the caller's queues its tensors were saved."""
        self._written: list[tuple[list[weakref.ref[Tensor]], int]] = []
        """Of its tensors: which ones have their counters, and what these showed when they were saved."""
        # While this is held no other storage gets the same address, by which ranges are known.
        self._storage = StorageWeakRef(storage)
        self._source: Tensor | None = torch.empty(0, dtype=torch.uint8, device=part.device)
        self._source.set_(storage, self._first, (self.nbytes,), (1,))
        self._queue = device.caller()  # to which the memory belongs
        self._used = 0
        self.tensors = 0
        self.spent = False
        self.place: int | None = None
        self.number = 0

    @property
    def away(self) -> bool:
        """Whether it has left, and nothing brings it back yet."""
        return self._source is None and self._back is None

    @property
    def returns(self) -> bool:
        """Whether it has come back, or is on its way."""
        return self._back is not None

    def holds(self, tensor: Any) -> bool:
        """Whether backward may read here a tensor of these bytes that is saved now.

        Until the copy begins it may: the copy takes what is there then, and `Kept.check` raises for a tensor that was
        written to in between. After that it may if its own counter shows that nothing was written since; tensors of the
        same memory may have others.
        """
        return self._host is None or self._counts_writes_to(tensor)

    def note(self, tensor: Any) -> None:
        """A tensor in these bytes is saved."""
        self._callers.add(self._device.caller())
        if not self._counts_writes_to(tensor):
            self._written.append(([weakref.ref(other) for other in counted_with(tensor)], version(tensor)))

    def _counts_writes_to(self, tensor: Any) -> bool:
        """Whether a tensor was saved here that shares this one's counter, which shows no write since."""
        others, now = counted_with(tensor), version(tensor)
        return any(
            writes == now and all(one() is other for one, other in zip(known, others, strict=True))
            for known, writes in self._written
            if len(known) == len(others)
        )

    @property
    def emptied(self) -> bool:
        """Whether its owner gave the memory back, to fill it again before backward, as FSDP2 does."""
        return self._source is not None and self._source.untyped_storage().nbytes() < self._first + self.nbytes

    def leave(self, block: Block, after: Sequence[Job]) -> Job:
        """Start its way to the host. after: what must be over before the block is written."""
        assert self._source is not None, "it is on the device when it is saved"
        copies = [(block.tensor, self._source)]
        # What wrote the bytes must be over, and what has saved them, in whichever queues they were saved.
        saving = self._device.copy(Op.SAVE, self.place or 0, copies, (*self._device.fence(self._callers), *after))
        self._host = block, saving
        # The copy reads the memory until it ends.
        self._travelling[self._reference] = self._source, Op.SAVE
        return saving

    def free(self) -> None:
        """Let go of the device's memory, once the copy to the host has ended there."""
        assert self._host is not None, "it is on its way"
        assert self._source is not None, "it is there until now"
        if self.emptied:  # perhaps while it was copied
            self._host = None
            self._travelling.pop(self._reference, None)
            return
        if self._device.caller() == self._queue:
            # What the caller queues next may get the memory, which the copy still reads.
            self._device.join(self._host[1])
        else:
            # The memory is another queue's, and a join would order this one. The allocator waits for the copy instead.
            self._device.keep(self._source, Op.SAVE)
        self._travelling.pop(self._reference, None)
        self._source = None

    def bring_back(self) -> Job:
        """Start its way back. Raises torch.OutOfMemoryError."""
        assert self._host is not None, "it is on the host"
        block, saving = self._host
        # It begins as far from a multiple of these as before: kernels may look at that.
        lead = self._first % ALIGNMENT
        buffer = self._device.allocate(lead + self.nbytes)
        self._queue = self._device.owner
        # What the memory's queue did there before must be over, and the bytes must have come to the host.
        after = (*self._device.fence([self._queue]), saving)
        copies = [(buffer[lead:], block.tensor)]
        restoring = self._device.copy(Op.RESTORE, self.place or 0, copies, after)
        # The copy writes the memory until it ends, as in `leave`.
        self._travelling[self._reference] = buffer, Op.RESTORE
        self._back = buffer, restoring
        return restoring

    def read(self, tensor: Packed) -> Tensor:
        """The tensor, for what the caller queues on the device from now on. It is on the device or on its way there."""
        memory = self._source if self._back is None else self._back[0]
        assert memory is not None, "what is away was brought back before"
        if self._device.caller() != self._queue:
            # The allocator knows only the queue that the memory was taken for, whose next work would get it while this
            # queue still reads it.
            self._device.keep(memory)
        if self._back is None:
            return tensor.made_of(memory, 0)
        # Backward reads what the copy writes. From here on the memory is safe in the order of this queue.
        self._device.join(self._back[1])
        self._travelling.pop(self._reference, None)
        found = tensor.made_of(memory, self._first - self._first % ALIGNMENT)
        self._used += 1
        if self._used >= self.tensors:  # autograd has what it needs; with retain_graph it may ask again
            self.spent = True
            self._back, self._used = None, 0  # the host has it still
        return found

    def __del__(self) -> None:
        if self._host is not None:
            self._travelling.let_go(self._reference, self._device)


class Travelling(dict["weakref.ref[Saved]", tuple[Tensor, Op]]):
    """Device memory that copies write or read, and that no queue of the caller's is ordered behind."""

    def let_go(self, reference: weakref.ref[Saved], device: Device) -> None:
        """Let go of the memory of a range that is gone, once its copy has ended."""
        lost = self.pop(reference, None)
        if lost is not None:
            # The allocator would give it away, or unmap it, under a copy that runs, though that is of no use any more.
            device.keep(*lost)

    def let_go_of_lost(self, device: Device) -> None:
        """The same for ranges of which Ctrl-C took the place of the `__del__`: Python says that it was ignored."""
        for reference in [each for each in self if each() is None]:
            self.let_go(reference, device)


class Kept:
    """A tensor that stays where it is. tensor: that autograd gets back."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Any) -> None:
        # A tensor with a grad_fn may be saved by that very node: to keep the tensor would form a cycle.
        self.tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self._version = version(tensor)

    def check(self) -> None:
        """Raise what torch raises, where no hooks are, for a saved tensor that was written to: RuntimeError."""
        now = version(self.tensor)
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{local(self.tensor).type()} {list(self.shape)}] is at version {now}; expected version "
                f"{self._version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
                "its gradient, with torch.autograd.set_detect_anomaly(True)."
            )

    @property
    def shape(self) -> Sequence[int]:
        """Of all of it, if it is a DTensor."""
        return self.tensor.shape


class Packed(Kept):
    """A tensor in a range that may leave. saved: that range. tensor: without elements, but written to when it is."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "saved")

    def __init__(self, tensor: Any, part: Tensor, saved: Saved) -> None:
        """part: what this rank has of a DTensor."""
        self.tensor = part.detach()
        self.tensor.data = part.new_empty(0)  # it counts on with the tensor
        if is_sharded(tensor):
            wrapper = tensor.detach()
            set_local_tensor(wrapper, self.tensor)
            self.tensor = wrapper
        self._version = version(tensor)
        self._dtype, self._size, self._stride = part.dtype, part.size(), part.stride()
        self._offset = part.storage_offset() * part.itemsize
        self.saved = saved
        saved.tensors += 1

    @property
    def shape(self) -> Sequence[int]:
        return self.tensor.shape if is_sharded(self.tensor) else self._size

    def made_of(self, memory: Tensor, origin: int) -> Tensor:
        """The tensor in memory whose storage begins with what was byte `origin` of the tensor's own."""
        part = torch.empty(0, dtype=self._dtype, device=memory.device)
        offset = (self._offset - origin) // part.itemsize
        part.set_(memory.untyped_storage(), offset, self._size, self._stride)
        # It shares the counter of what was saved: if backward writes to it, `check` raises for other readers.
        found = self.tensor.detach()
        if is_sharded(found):
            set_local_tensor(found, local_tensor(self.tensor).detach())
        local(found).data = part
        return found


Node = tuple[int, int]
"""An autograd node: its thread, and its number there."""


class SavedByForward:
    """The tensors that one forward saves, in order.

    saved: where it is, at the last place for what is saved again. sizes: in bytes; 0 for a second copy of the same
        memory, which is freed once.
    nbytes: of all. offloaded_bytes: that left. kept_bytes: that were not to.
    backward_began: whether it has begun to read it. may_leave: whether what was saved last may leave.
    waiting: those that leave once the operation that saves them has run. under_way: those that left, and that the
        device has yet.
    marks: in the caller's work, if they are asked for: the begin of forward, and each birth; then forward's end.
    due: when backward needed it first, by its number among `sizes`.
    """

    def __init__(self, may_leave: Callable[[SavedByForward], bool], *, timed: bool) -> None:
        self.saved: list[weakref.ref[Saved] | None] = []
        self.sizes: list[int] = []
        self.nbytes = 0
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self.backward_began = False
        self._ranges: defaultdict[Range, list[weakref.ref[Saved]]] = defaultdict(list)
        self.waiting: weakref.WeakKeyDictionary[Saved, Node] = weakref.WeakKeyDictionary()
        self.under_way: list[weakref.ref[Saved]] = []
        self.may_leave = may_leave
        self.timed = timed
        self.marks: list[Mark] = []
        self.due: dict[int, Mark] = {}

    def add(self, saved: Saved) -> None:
        """It is saved, perhaps again: backward needs it before all others so far."""
        if saved.place is None:
            saved.forward, saved.number = self, len(self.sizes)
            self.sizes.append(0 if any(self._of(saved.where)) else saved.nbytes)
            self.nbytes += self.sizes[-1]
            self._ranges[saved.where].append(weakref.ref(saved))
        else:
            self.saved[saved.place] = None
        saved.place = len(self.saved)
        self.saved.append(weakref.ref(saved))

    def find(self, where: Range, tensor: Any) -> Saved | None:
        """Where the bytes were saved as the tensor has them now."""
        return next((saved for saved in self._of(where) if saved.holds(tensor)), None)

    def _of(self, where: Range) -> Iterator[Saved]:
        """All that these bytes were saved in, the last first."""
        found = (reference() for reference in reversed(self._ranges[where]))
        return (saved for saved in found if saved is not None)

    def before(self, saved: Saved | None = None) -> Iterator[Saved]:
        """The ranges saved before this one, or all, as far as they are needed yet, the last first."""
        for reference in reversed(self.saved[: None if saved is None else saved.place]):
            found = None if reference is None else reference()
            if found is not None:
                yield found

    @property
    def leaving_bytes(self) -> int:
        """Bytes that left, or are to."""
        return self.offloaded_bytes + sum(self.sizes[saved.number] for saved in list(self.waiting))

    @property
    def window(self) -> int:
        """Bytes that may be on their way at a time."""
        return self.nbytes // WINDOW

    @property
    def away_bytes(self) -> int:
        """Bytes that are not on the device."""
        return sum(self.sizes[saved.number] for saved in self.before() if saved.away)

    def groups(self) -> tuple[SavedTensors, ...]:
        """All of it in at most MOST groups; none if the device has not come to it all, or forward has not ended."""
        born, due = [mark.at() for mark in self.marks], {number: mark.at() for number, mark in self.due.items()}
        if None in born or None in due.values() or not due or len(born) != len(self.sizes) + 2:
            return ()
        born_at, due_at = _shares(born), dict(zip(due, _shares([*due.values()]), strict=True))
        found: list[SavedTensors] = []
        needed = nbytes = 0.0
        for number in reversed(range(len(self.sizes))):
            needed = max(needed, due_at.get(number, 0.0))
            if not found or nbytes * MOST >= self.nbytes:
                found.append(SavedTensors(0, born_at[number + 1], needed))
                nbytes = 0
            nbytes += self.sizes[number]
            found[-1] = found[-1]._replace(nbytes=int(nbytes))
        return tuple(reversed(found))


def _shares(times: Sequence[float | None]) -> list[float]:
    """Where they lie from the first to the last, from 0 to 1, in order."""
    known = [time for time in times if time is not None]
    first, last = min(known), max(known)
    return [(time - first) / (last - first) if last > first else 0.0 for time in known]
