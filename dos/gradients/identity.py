"""Whether a gradient still is the one that it was when something was done to it."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import counts_writes, local, version
from dos.torch_internals.tensors import storage_address

GradientOrHandle = Tensor | Future
"""A gradient with its parameter, or what `OffloadedGradients.gradients` has for one that is not."""


class Token:
    """A gradient as it is now: this object, this memory read in this way, this version.

    Numbers alone do not tell two gradients apart: versions begin anew with each tensor, and addresses come back once
    memory was freed. The object alone does not tell either: `gradient.data = ...` leaves it and its version as they
    were.

    gradient: None where another tensor will have the same values, with the parameter.
    bits: a fingerprint where the version does not count all writes, or for another tensor; rewritten: whether the
        gradient was found to have others, by `look_at_bits`.
    """

    def __init__(self, gradient: GradientOrHandle, *, here: bool = True) -> None:
        """here: whether this tensor itself is with the parameter."""
        self.gradient: weakref.ref[Any] | None = weakref.ref(gradient) if here else None
        self.bits: Tensor | None = None
        self.rewritten = False
        if isinstance(gradient, Tensor):
            mine = local(gradient)
            # Keeps the storage object but not its memory: while it is held, no other storage has the same address.
            self._storage = StorageWeakRef(mine.untyped_storage())
            self._reading = _reading(mine)
            self._version = version(gradient)
            if not here or not counts_writes(gradient):
                self.bits = fingerprint(mine)

    @property
    def alive(self) -> GradientOrHandle | None:
        """The gradient, if it is still there."""
        return None if self.gradient is None else self.gradient()

    def holds(self, gradient: GradientOrHandle) -> bool:
        """Whether this is the gradient, but for writes that `writes` tells of."""
        if self.rewritten or self.gradient is None or self.gradient() is not gradient:
            return False
        if not isinstance(gradient, Tensor):
            return True
        mine = local(gradient)
        return self._storage.cdata == storage_address(mine.untyped_storage()) and self._reading == _reading(mine)

    def writes(self, gradient: Tensor) -> int:
        """How often the gradient was written to since, as far as versions count that."""
        return version(gradient) - self._version


def _reading(tensor: Tensor) -> tuple[object, ...]:
    """Where and how values are read from the tensor's memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()
