"""What autograd keeps in place of a tensor that it saves, and where the bytes are meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dos.activations.pool import Block
from dos.devices import Device, Job
from dos.sharding.local import is_sharded, laid_out_as, local, version
from dos.state.arena import ALIGNMENT
from perfmodel import Op


class Saved:
    """A range of device memory that backward will read: on the device, on the host, or on its way.

    nbytes: of it. births: of its forward, where it has its number, and a place in the order of use.
    tensors: how many were saved in it. spent: whether backward has read them all.
    """

    _back: Tensor | None = None
    _saving: Job | None = None

    def __init__(self, device: Device, part: Tensor, span: tuple[int, int], travelling: Travelling) -> None:
        """span: bytes of the storage of `part`, from where to where."""
        self._travelling, self._reference = travelling, weakref.ref(self)
        storage = part.untyped_storage()
        self._device = device
        self._first, last = span
        self.nbytes = last - self._first
        # While this is held no other storage gets the same address, by which ranges are known.
        self._storage = StorageWeakRef(storage)
        self._source: Tensor | None = torch.empty(0, dtype=torch.uint8, device=part.device)
        self._source.set_(storage, self._first, (self.nbytes,), (1,))
        self._queue = device.caller()  # to which the memory belongs
        self._block: Block | None = None
        self._restoring: Job | None = None
        self._used = 0
        self.tensors = 0
        self.spent = False
        self.place: int | None = None
        self.number = 0
        self.births: Any = None

    @property
    def away(self) -> bool:
        """Whether it has left, and nothing brings it back yet."""
        return self._source is None and self._back is None

    @property
    def returns(self) -> bool:
        """Whether it has come back, or is on its way."""
        return self._back is not None

    def leave(self, block: Block, after: Sequence[Job]) -> Job:
        """Start its way to the host. after: what must be over before the block is written."""
        assert self._source is not None, "it is on the device when it is saved"
        copies = [(block.tensor, self._source)]
        self._saving = self._device.copy(Op.SAVE, self.place or 0, copies, (*self._device.fence(), *after))
        self._block = block
        self._travelling[self._reference] = self._source, Op.SAVE
        return self._saving

    def free(self) -> None:
        """Let go of the device's memory, once the copy to the host has ended there."""
        assert self._saving is not None, "it is on its way"
        assert self._source is not None, "it is there until now"
        if self._source.untyped_storage().nbytes() < self._first + self.nbytes:
            # What makes memory empty may have done so while it was copied, and fills it again before backward.
            self._saving = self._block = None
            self._travelling.pop(self._reference, None)
            return
        if self._device.caller() == self._queue:
            # What the caller queues next may get the memory, which the copy still reads.
            self._device.join(self._saving)
        else:
            self._device.keep(self._source, Op.SAVE)
        self._travelling.pop(self._reference, None)
        self._source = None

    def bring_back(self) -> Job:
        """Start its way back. Raises torch.OutOfMemoryError."""
        assert self._block is not None, "it is on the host"
        assert self._saving is not None, "it went there"
        # It begins as far from a multiple of these as before: kernels may look at that.
        lead = self._first % ALIGNMENT
        buffer = self._device.allocate(lead + self.nbytes)
        self._queue = self._device.owner
        # What the memory's queue did there before must be over, and the bytes must have come to the host.
        after = (*self._device.fence([self._queue]), self._saving)
        copies = [(buffer[lead:], self._block.tensor)]
        self._restoring = self._device.copy(Op.RESTORE, self.place or 0, copies, after)
        self._travelling[self._reference] = buffer, Op.RESTORE
        self._back = buffer
        return self._restoring

    def read(self, tensor: Packed) -> Tensor:
        """The tensor, for what the caller queues on the device from now on. It is on the device or on its way there."""
        memory = self._source if self._back is None else self._back
        assert memory is not None, "what is away was brought back before"
        if self._device.caller() != self._queue:
            self._device.keep(memory)
        if self._back is None:
            return tensor.made_of(memory, 0)
        assert self._restoring is not None, "its copy was issued"
        self._device.join(self._restoring)
        self._travelling.pop(self._reference, None)
        found = tensor.made_of(self._back, self._first - self._first % ALIGNMENT)
        self._used += 1
        if self._used >= self.tensors:  # autograd has what it needs; with retain_graph it may ask again
            self.spent = True
            self.drop()
        return found

    def drop(self) -> None:
        """Let go of what has come back: the host has it still."""
        if self._back is not None and not self._used:
            self._device.keep(self._back, Op.RESTORE)  # which may be writing there, and has not been waited for
        self._travelling.pop(self._reference, None)
        self._back, self._restoring, self._used = None, None, 0

    def __del__(self) -> None:
        if self._saving is not None and self._source is not None:
            # Unmapped memory is a fault, even of a copy that is of no use any more.
            self._device.keep(self._source, Op.SAVE)
        self.drop()


class Travelling(dict["weakref.ref[Saved]", tuple[Tensor, Op]]):
    """Device memory that copies write or read. Ctrl-C may take the place of a `__del__`; then it is here still."""

    def drop_lost(self, device: Device) -> None:
        """Let go of the memory of ranges that are gone, once its copies have ended."""
        for reference, (tensor, op) in list(self.items()):
            if reference() is None:
                device.keep(tensor, op)
                del self[reference]


class Kept:
    """A tensor that stays where it is. tensor: that autograd gets back."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Any) -> None:
        # What has a grad_fn may be what is saved for that one, which would then hold itself.
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
            wrapper._local_tensor, self.tensor = self.tensor, wrapper
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
        return laid_out_as(part, self.tensor)
