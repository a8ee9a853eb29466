"""Tensors that share memory: exactly, so that disjoint views of one buffer do not count."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Positions of two tensors that have memory in common, or of one twice whose own elements do; None: there are none.

    For dense tensors in O(n log n); tensors with gaps are compared with all that lie in between.
    """
    extents = sorted((*_extent(tensor), i) for i, tensor in enumerate(tensors) if tensor.numel())
    before: list[tuple[str, int, int, int]] = []
    for extent in extents:
        device, start, _, position = extent
        if _overlaps_itself(tensors[position]):
            return position, position
        before = [other for other in before if other[0] == device and other[2] > start]
        for *_, other in before:
            if np.shares_memory(_addresses(tensors[position]), _addresses(tensors[other])):
                return min(position, other), max(position, other)
        before.append(extent)
    return None


def _extent(tensor: Tensor) -> tuple[str, int, int]:
    """The device, the first address and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's addresses, on any device, as numpy understands them; nothing is read there."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of the tensor are one in memory."""
    found = torch._debug_has_internal_overlap(tensor)
    if found != 2:  # it is known
        return bool(found)
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    return int(offsets.unique().numel()) < tensor.numel()
