"""Private operators of torch: on lists of tensors, on an address, and an empty kernel. Torch 2.6 to 2.13.

`__cuda_array_interface__` makes a tensor of an address, too, but queries the driver and does not support bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

add_to_all: Callable[[list[Tensor], float], None] = torch._foreach_add_
"""Adds the number to each tensor, in one call."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copies the tensors of the second list to those of the first; on a GPU by a few kernels for all."""


def queue_copies(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Queue copies between host and device, as `copy_(source, non_blocking=True)` does for each, by one call for all.

    For tensors of several devices `_foreach_copy_` calls `copy_` for each, without Python.
    """
    torch._foreach_copy_(destinations, sources, non_blocking=True)


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor at an address, whose memory the caller must keep."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def queue_empty_kernel() -> None:
    """Queue a kernel on the current CUDA stream that has one thread, reads no memory and ends at once.

    Even beside large kernels a GPU has room for it.
    """
    torch.cuda._sleep(0)
