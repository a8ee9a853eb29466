"""Stand-ins for tensors that autograd saves, their memory meanwhile, and the tensors that one forward saves."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
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

PARTS = 16
"""One of this number of parts of a forward's tensors may be in transit to the host, or back ahead of use, at a time."""
AT_ONCE = 2
"""The number of tensors that may always be in transit to the host, or back ahead of their use, whatever their size."""
MOST = 2 * PARTS
"""The most groups of saved tensors for which plans are made, two of which stay on the device."""

Range = tuple[int, int, int]
"""Bytes of a storage: the address of the storage object, the first byte, and the end."""


class Saved:
    """A range of device memory that backward will read: on the device, on the host, or in transit.

    nbytes: the size of the range. forward: the tensors that its forward saved, among which it has a number, and a place
        in the order of use.
    tensors: the number of tensors saved in it. spent: whether backward has read them all.
    """

    forward: SavedByForward

    _host: tuple[Block, Job] | None = None
    """The block on the host, and the copy to it."""
    _back: tuple[Tensor, Job] | None = None
    """The memory on the device to which it was restored, and the copy to it."""

    # Its life: `save` starts the copy to a block on the host, and `release` releases the device's memory behind it.
    # `restore` starts the copy into other memory, `read` makes tensors of that, and releases it when backward has read
    # all of them; with retain_graph it is restored again. User code may discard the graph at any point: `__del__` then
    # keeps the memory until copies that still use it have ended.
    def __init__(self, device: Device, part: Tensor, where: Range, in_flight: CopiesInFlight) -> None:
        """where: bytes of the storage of `part`."""
        self._in_flight, self._reference = in_flight, weakref.ref(self)
        storage = part.untyped_storage()
        self._device = device
        self.where = where
        _, self._first, last = where
        self.nbytes = last - self._first
        self._callers: set[Caller] = set()
        """The caller's queues in which its tensors were saved."""
        self._written: list[tuple[list[weakref.ref[Tensor]], int]] = []
        """For each version counter of its tensors: the tensors that share it, and its value when they were saved."""
        # Keeps the storage object, not its memory: no other storage gets its address, by which ranges are known.
        self._storage = StorageWeakRef(storage)
        self._source: Tensor | None = torch.empty(0, dtype=torch.uint8, device=part.device)
        self._source.set_(storage, self._first, (self.nbytes,), (1,))
        self._queue = device.caller()  # the queue to which the memory belongs
        self._used = 0
        self.tensors = 0
        self.spent = False
        self.place: int | None = None
        self.number = 0

    @property
    def away(self) -> bool:
        """Whether it has moved to the host, and no copy restores it yet."""
        return self._source is None and self._back is None

    @property
    def returns(self) -> bool:
        """Whether it was restored, or a copy restores it."""
        return self._back is not None

    def holds(self, tensor: Any) -> bool:
        """Return whether backward may read here a tensor of these bytes that is saved now.

        Until the copy begins it may: the copy takes the values of that time, and `Kept.check` raises for a tensor that
        was written to in between. After that it may if its own version counter shows no write since; tensors of the
        same memory may have other counters.
        """
        return self._host is None or self._counts_writes_to(tensor)

    def note(self, tensor: Any) -> None:
        """Note the queue and the version counter of a tensor in these bytes that is saved now."""
        self._callers.add(self._device.caller())
        if not self._counts_writes_to(tensor):
            # Weak: a strong reference would keep the memory that moving the tensor is to release.
            self._written.append(([weakref.ref(other) for other in counted_with(tensor)], version(tensor)))

    def _counts_writes_to(self, tensor: Any) -> bool:
        """Return whether a tensor was saved here that shares this one's counter, which shows no write since."""
        others, now = counted_with(tensor), version(tensor)
        return any(
            writes == now and all(one() is other for one, other in zip(known, others, strict=True))
            for known, writes in self._written
            if len(known) == len(others)
        )

    @property
    def emptied(self) -> bool:
        """Whether its owner has released the memory, to fill it again before backward, as FSDP2 does."""
        return self._source is not None and self._source.untyped_storage().nbytes() < self._first + self.nbytes

    def save(self, block: Block, after: Sequence[Job]) -> Job:
        """Start the copy to the host. after: jobs that must end before the block is written."""
        assert self._source is not None, "it is on the device when it is saved"
        copies = [(block.tensor, self._source)]
        # The operations that wrote the bytes must have ended, in every queue in which the bytes were saved.
        saving = self._device.copy(Op.SAVE, self.place or 0, copies, (*self._device.fence(self._callers), *after))
        self._host = block, saving
        # The copy reads the memory until it ends, even if user code discards the graph before.
        self._in_flight[self._reference] = self._source, Op.SAVE
        return saving

    def release(self) -> None:
        """Release the device's memory behind the copy to the host."""
        assert self._host is not None, "it is on its way"
        assert self._source is not None, "it is there until now"
        if self.emptied:  # perhaps while the copy ran, which may have read other bytes: the owner fills it again
            self._host = None
            self._in_flight.pop(self._reference, None)
            return
        if self._device.caller() == self._queue:
            # The allocator may give the memory to the caller's next work, while the copy still reads it.
            self._device.join(self._host[1])
        else:
            # The memory belongs to another queue, and a join would order this one. The allocator waits for the copy
            # instead.
            self._device.keep(self._source, Op.SAVE)
        self._in_flight.pop(self._reference, None)
        self._source = None

    def restore(self) -> Job:
        """Start the copy back to the device. Raises torch.OutOfMemoryError."""
        assert self._host is not None, "it is on the host"
        block, saving = self._host
        # The same alignment as before: kernels may choose other paths, with other bits, by it.
        lead = self._first % ALIGNMENT
        buffer = self._device.allocate(lead + self.nbytes)
        self._queue = self._device.owner
        # Earlier work of the queue may still use the new memory, and the copy to the host must have ended.
        after = (*self._device.fence([self._queue]), saving)
        copies = [(buffer[lead:], block.tensor)]
        restoring = self._device.copy(Op.RESTORE, self.place or 0, copies, after)
        # The copy writes the memory until it ends, even if user code discards the graph before.
        self._in_flight[self._reference] = buffer, Op.RESTORE
        self._back = buffer, restoring
        return restoring

    def read(self, tensor: Packed) -> Tensor:
        """Return the tensor, for work that the caller queues from now on. It must be on the device or on its way."""
        memory = self._source if self._back is None else self._back[0]
        assert memory is not None, "what is away was brought back before"
        if self._device.caller() != self._queue:
            # The allocator knows only the queue that allocated the memory, and would give it to that queue's next work
            # while this queue still reads it.
            self._device.keep(memory)
        if self._back is None:
            return tensor.made_of(memory, 0)
        # Backward reads the bytes that the copy writes. From here on the order of this queue protects the memory.
        self._device.join(self._back[1])
        self._in_flight.pop(self._reference, None)
        found = tensor.made_of(memory, self._first - self._first % ALIGNMENT)
        self._used += 1
        if self._used >= self.tensors:  # autograd has read all tensors; with retain_graph it may read them again
            self.spent = True
            self._back, self._used = None, 0  # the block on the host still has the bytes
        return found

    def __del__(self) -> None:
        if self._host is not None:
            self._in_flight.release(self._reference, self._device)


class CopiesInFlight(dict["weakref.ref[Saved]", tuple[Tensor, Op]]):
    """Device memory that copies read or write, where no queue of the caller is ordered behind the copy."""

    def release(self, reference: weakref.ref[Saved], device: Device) -> None:
        """Release the memory of a range that was collected, once its copy has ended."""
        lost = self.pop(reference, None)
        if lost is not None:
            # The allocator would give the memory away, or unmap it, while the copy still runs.
            device.keep(*lost)

    def release_lost(self, device: Device) -> None:
        """Release the memory of ranges whose `__del__` Ctrl-C has interrupted: Python ignores such exceptions."""
        for reference in [each for each in self if each() is None]:
            self.release(reference, device)


class Kept:
    """A saved tensor that stays on the device. tensor: the one that autograd gets back."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Any) -> None:
        # A non-leaf may be saved by its own grad_fn: keeping the tensor itself would form a cycle.
        self.tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self._version = version(tensor)

    def check(self) -> None:
        """Raise RuntimeError, as torch does without hooks, if the tensor was written to after it was saved."""
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
        """The shape of the tensor; of a DTensor, of the whole."""
        return self.tensor.shape


class Packed(Kept):
    """A saved tensor in a range that may move.

    saved: the range. tensor: a tensor without elements that shares the version counter of the saved one.
    """

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "saved")

    def __init__(self, tensor: Any, part: Tensor, saved: Saved) -> None:
        """part: this rank's part of a DTensor; else the tensor."""
        self.tensor = part.detach()
        self.tensor.data = part.new_empty(0)  # keeps the shared version counter, and no memory
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
        """Return the tensor in `memory`, whose storage begins with byte `origin` of the tensor's own storage."""
        part = torch.empty(0, dtype=self._dtype, device=memory.device)
        offset = (self._offset - origin) // part.itemsize
        part.set_(memory.untyped_storage(), offset, self._size, self._stride)
        # Shares the version counter of the saved tensor: if backward writes to it, `check` raises for other readers.
        found = self.tensor.detach()
        if is_sharded(found):
            set_local_tensor(found, local_tensor(self.tensor).detach())
        local(found).data = part
        return found


Node = tuple[int, int]
"""An autograd node: its thread, and its number there."""


class SavedByForward:
    """The tensors that one forward saves, in order.

    saved: their ranges; a range that is saved again is at its last place only. sizes: in bytes; 0 for a second copy of
        the same memory, which is released once.
    nbytes: of all ranges. offloaded_bytes: of the ones that moved. kept_bytes: of the ones that stay.
    backward_began: whether backward has begun to read. moves: whether the range saved last moves.
    waiting: ranges that move once the operation that saves them has run. under_way: ranges that move, of which the
        device's memory is not released yet, with their sizes, which add up to under_way_bytes.
    timed: whether marks are made. marks: in the caller's work: where forward began, where each range was saved, and
        where forward ended. due: where backward first read each range, by its number among `sizes`.
    """

    def __init__(self, moves: Callable[[SavedByForward], bool], *, timed: bool) -> None:
        # Weak, here and below: user code may release a graph at any point, with the memory of its tensors.
        self.saved: list[weakref.ref[Saved] | None] = []
        self.sizes: list[int] = []
        self.nbytes = 0
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self.backward_began = False
        self._ranges: defaultdict[Range, list[weakref.ref[Saved]]] = defaultdict(list)
        self.waiting: weakref.WeakKeyDictionary[Saved, Node] = weakref.WeakKeyDictionary()
        self.under_way: deque[tuple[weakref.ref[Saved], int]] = deque()
        self.under_way_bytes = 0
        self.moves = moves
        self.timed = timed
        self.marks: list[Mark] = []
        self.due: dict[int, Mark] = {}
        self._last_read = -1
        """The place of the range that backward read last."""
        self._ahead: deque[tuple[int, int]] = deque()
        """Place and size of the ranges that `next_after` has yielded and backward is still to read."""
        self._ahead_bytes = 0
        self._front = 0
        """The lowest place that `next_after` has passed."""

    def add(self, saved: Saved) -> None:
        """Add a range that is saved, perhaps again: backward reads it before all ranges so far."""
        if saved.place is None:
            saved.forward, saved.number = self, len(self.sizes)
            # Once: the same memory in two ranges is released once, and would be counted twice.
            self.sizes.append(0 if any(self._of(saved.where)) else saved.nbytes)
            self.nbytes += self.sizes[-1]
            self._ranges[saved.where].append(weakref.ref(saved))
        else:
            self.saved[saved.place] = None
        saved.place = len(self.saved)
        self.saved.append(weakref.ref(saved))

    def find(self, where: Range, tensor: Any) -> Saved | None:
        """Return the range that has these bytes as the tensor has them now, if any."""
        return next((saved for saved in self._of(where) if saved.holds(tensor)), None)

    def _of(self, where: Range) -> Iterator[Saved]:
        """Return all ranges of these bytes, the last one first."""
        found = (reference() for reference in reversed(self._ranges[where]))
        return (saved for saved in found if saved is not None)

    def ranges(self) -> Iterator[Saved]:
        """Yield the ranges that backward may still read."""
        return (
            saved for saved in (reference() for reference in self.saved if reference is not None) if saved is not None
        )

    def next_after(self, saved: Saved) -> Iterator[Saved]:
        """Yield the ranges that backward reads after this one, each once, as far as they may return ahead of their use.

        At least AT_ONCE ranges may, and one of PARTS parts of all bytes. A range that is yielded last, before the
        iterator is given up, is yielded again by the next call.
        """
        assert saved.place is not None, "it was added"
        if saved.place > self._last_read:  # another backward, or another branch of the graph
            self._ahead.clear()
            self._ahead_bytes, self._front = 0, saved.place
        self._last_read = saved.place
        self._front = min(self._front, saved.place)
        while self._ahead and self._ahead[0][0] >= saved.place:
            self._ahead_bytes -= self._ahead.popleft()[1]
        while self._front and (len(self._ahead) < AT_ONCE or self._ahead_bytes < self.part_bytes):
            reference = self.saved[self._front - 1]
            found = None if reference is None else reference()
            if found is not None and not found.spent:
                yield found
                self._ahead.append((self._front - 1, found.nbytes))
                self._ahead_bytes += found.nbytes
            self._front -= 1

    @property
    def moving_bytes(self) -> int:
        """Bytes that moved, or will move."""
        return self.offloaded_bytes + sum(self.sizes[saved.number] for saved in list(self.waiting))

    @property
    def part_bytes(self) -> int:
        """Bytes that may be in transit at a time."""
        return self.nbytes // PARTS

    @property
    def away_bytes(self) -> int:
        """Bytes that are not on the device."""
        return sum(self.sizes[saved.number] for saved in self.ranges() if saved.away)

    def groups(self) -> tuple[SavedTensors, ...]:
        """Return all ranges in MOST groups or fewer; none if forward has not ended, or a mark was not reached."""
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
    """Return where the times lie between the first, 0, and the last, 1, in order."""
    known = [time for time in times if time is not None]
    first, last = min(known), max(known)
    return [(time - first) / (last - first) if last > first else 0.0 for time in known]
