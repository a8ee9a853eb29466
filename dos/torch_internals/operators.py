"""Private operators of torch: on lists of tensors, on an address, and a kernel that does nothing. Torch 2.6 to 2.13.

`__cuda_array_interface__` makes a tensor of an address, too, but asks the driver about it and knows no bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

add_to_all: Callable[[list[Tensor], float], None] = torch._foreach_add_
"""Adds the number to each tensor, in one call."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copies to each of the first list the tensor of the second; on a GPU by a few kernels for all."""


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor of memory that is there already, and that the caller must keep."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def queue_empty_kernel() -> None:
    """Queue a kernel of one thread, which even large kernels leave room for, on the current CUDA stream.

    It reads no memory and ends at once.
    """
    torch.cuda._sleep(0)
