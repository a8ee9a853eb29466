"""Tensors with a storage of their own over a part of larger memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack


def with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a dense view, without a copy, whose storage has the bytes of the view alone.

    Code that looks at storages, as that which saves checkpoints does, then finds no memory that tensors share. The
    storage keeps the memory of the view alive. It cannot be resized; `share_memory_()` copies it elsewhere. Versions
    count for the result alone, which is no view.
    """
    flat = view.detach().as_strided((view.numel(),), (1,)).view(torch.uint8)  # DLPack does not know all dtypes
    # Not `from_dlpack(view)`: that waits for streams, and the layout of axes of length 1 would be another.
    storage = from_dlpack(to_dlpack(flat)).untyped_storage()
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def overlap_with(memory: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Return a function that says whether a tensor lies in the memory of any of these dense ones, which are apart."""
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory)

    def overlaps(tensor: Tensor) -> bool:
        place = bisect.bisect_right(ranges, tensor.data_ptr(), key=lambda each: each[0]) - 1
        return place >= 0 and tensor.data_ptr() < ranges[place][1]

    return overlaps
