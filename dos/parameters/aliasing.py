"""Tensors that share memory: exactly, so that disjoint views of one buffer do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class _Extent(NamedTuple):
    device: str
    start: int
    end: int
    position: int


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Positions of two tensors that have memory in common, or of one twice whose own elements do; None: there are none.

    For dense tensors in O(n log n); tensors with gaps are compared with all that lie in between.
    """
    extents = sorted(_extent(tensor, i) for i, tensor in enumerate(tensors) if tensor.numel())
    before: list[_Extent] = []
    for extent in extents:
        tensor = tensors[extent.position]
        if _overlaps_itself(tensor):
            return extent.position, extent.position
        before = [b for b in before if b.device == extent.device and b.end > extent.start]
        for other in before:
            if np.shares_memory(_Memory(tensor).array(), _Memory(tensors[other.position]).array()):
                return tuple(sorted((other.position, extent.position)))  # type: ignore[return-value]
        before.append(extent)
    return None


class _Memory:
    """A tensor's addresses, on any device, as numpy understands them; nothing is read there."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }

    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


def _extent(tensor: Tensor, position: int) -> _Extent:
    """The first address and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return _Extent(str(tensor.device), start, start + (last + 1) * tensor.element_size(), position)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of the tensor are one in memory."""
    found = torch._debug_has_internal_overlap(tensor)
    if found != 2:  # it is known
        return bool(found)
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    return int(offsets.unique().numel()) < tensor.numel()
