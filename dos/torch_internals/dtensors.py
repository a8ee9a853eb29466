"""The parts of a DTensor: its local tensor, and its layout. Torch 2.6 to 2.13.

`DTensor.to_local` returns the same tensor only where autograd is off, at the price of a change of mode.
`DTensor.from_local` moves the part to the device of the mesh, where a part on the host must stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

local_tensor: Callable[[Any], Any] = operator.attrgetter("_local_tensor")
"""Returns this rank's part of a DTensor."""


def set_local_tensor(dtensor: Any, part: Tensor) -> None:
    """Set another part of a DTensor, of the same shape and dtype."""
    dtensor._local_tensor = part


def dtensor_as(like: Any, part: Tensor, shape: Sequence[int] | None = None) -> Any:
    """Return a DTensor laid out as `like` is, with this part, without a copy.

    shape: of the whole tensor, if another than that of `like`, and in row-major order.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = like._spec
    whole = like if shape is None else torch.empty(tuple(shape), device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    extra = {"shard_order": spec.shard_order} if hasattr(spec, "shard_order") else {}  # not in torch 2.6
    # A DTensor takes its part's offset for its own address, and torch.distributed.checkpoint takes a DTensor with an
    # address for one with memory. So it is made with a part at offset 0.
    at_0 = part.as_strided(part.size(), part.stride(), 0)
    found = type(like)(at_0, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta, **extra), requires_grad=False)
    set_local_tensor(found, part)
    return found
