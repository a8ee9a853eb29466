"""Finds parameters that user code divided after building the optimizer, so that others are trained in their place."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from dos.sharding.local import is_sharded
from dos.torch_internals.live_objects import parameters_of_all_modules


def find_replaced(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters without a gradient that no module has, of the shape of a DTensor that a module has.

    `fully_shard` and `parallelize_module` replace parameters by such DTensors. Without this search a model that was
    divided in part would silently train in part: steps find gradients of the other parameters. If there can be such
    parameters, it looks through all objects of the process, which takes some 50 ms: call it once.
    """
    if "torch.distributed.tensor" not in sys.modules or not dist.is_initialized():
        return []
    candidates = [p for p in parameters if p.grad is None and p.requires_grad and not is_sharded(p)]
    if not candidates:
        return []
    held = parameters_of_all_modules()
    names = {id(p) for p in held}
    shapes = {p.shape for p in held if is_sharded(p)}
    return [p for p in candidates if id(p) not in names and p.shape in shapes]
