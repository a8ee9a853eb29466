"""Tokens of gradients, which tell whether a gradient is still the same as when its token was made."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import counts_writes, local, version
from dos.torch_internals.tensors import storage_address, version_counter

GradientOrHandle = Tensor | Future
"""A gradient in `p.grad`, or the handle that `OffloadedGradients.gradients` has for an offloaded one."""


class Token:
    """A gradient as it is now: this object, this memory read in this way, this version.

    Numbers alone do not tell two gradients apart: versions begin anew with each tensor, and the allocator reuses
    addresses. The object alone does not either: `gradient.data = ...` changes neither the object nor its version.

    gradient: None where DDP will set another tensor with the same values as `p.grad`.
    negated: whether its memory has the values with the other sign, as a lazily negated tensor's; False for a handle.
    bits: a fingerprint, where the version does not count all writes, or for another tensor; rewritten: whether
        `look_at_bits` has found other bits.
    """

    def __init__(self, gradient: GradientOrHandle, *, here: bool = True) -> None:
        """here: whether `p.grad` is this tensor itself."""
        # Weak: user code releases a gradient by setting it to None, and its memory must be released then.
        self.gradient: weakref.ref[Any] | None = weakref.ref(gradient) if here else None
        self.bits: Tensor | None = None
        self.rewritten = self.negated = False
        self._plain = type(gradient) is Tensor  # as almost all gradients are
        if isinstance(gradient, Tensor):
            try:
                self._version = version_counter(gradient) if self._plain else version(gradient)
            except RuntimeError:
                self._plain, self._version = False, 0  # an inference tensor counts no writes
            mine = gradient if self._plain else local(gradient)
            # Keeps the storage object, not its memory: no other storage can have the same address meanwhile.
            self._storage = StorageWeakRef(mine.untyped_storage())
            self.negated = mine.is_neg()  # once, because it lets go of Python's lock
            self._reading = mine.data_ptr(), mine.dtype, mine.shape, mine.stride(), self.negated  # as `_reading`
            if not here or not (self._plain or counts_writes(gradient)):
                self.bits = fingerprint(mine)

    @property
    def alive(self) -> GradientOrHandle | None:
        """The gradient; None if it was released."""
        return None if self.gradient is None else self.gradient()

    def holds(self, gradient: GradientOrHandle) -> bool:
        """Return whether this is the token of the gradient, except for writes, which `writes` counts."""
        if self.rewritten or self.gradient is None or self.gradient() is not gradient:
            return False
        if not isinstance(gradient, Tensor):
            return True
        mine = gradient if self._plain else local(gradient)
        return self._storage.cdata == storage_address(mine.untyped_storage()) and self._reading == _reading(mine)

    def unchanged(self, gradient: Tensor, writes: int | None) -> bool:
        """Return whether the token `holds` the gradient, whose values are the same.

        writes: the number of writes since that changed no value; None: values have changed.
        """
        if self._plain and self.gradient is not None and self.gradient() is gradient:
            # `holds`, without a call: `step()` asks for each gradient that was sent, before its first work.
            reading = gradient.data_ptr(), gradient.dtype, gradient.shape, gradient.stride(), gradient.is_neg()
            same = not self.rewritten and self._reading == reading
            if not same or self._storage.cdata != storage_address(gradient.untyped_storage()):
                return False
        elif not self.holds(gradient):
            return False
        now = version_counter(gradient) if self._plain else version(gradient)
        return self.bits is not None or now - self._version == writes

    def writes(self, gradient: Tensor) -> int:
        """Return the number of writes to the gradient, which the token `holds`, as far as versions count them."""
        return (version_counter(gradient) if self._plain else version(gradient)) - self._version


def _reading(tensor: Tensor) -> tuple[object, ...]:
    """Return where and how the tensor reads its memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()
