"""Parameters that were divided after the optimizer was built, in whose place other parameters are trained."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from dos.sharding.local import is_sharded
from dos.torch_internals.live_objects import parameters_of_all_modules


def find_replaced(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that got no gradient, are no module's any more, and have the shape of a DTensor that is.

    So `fully_shard` and `parallelize_module` leave the parameters that they were given. Without this search a model
    that was divided in part would train in part, silently: steps find gradients on the rest. It looks through all
    objects of the process if there can be such, which takes some 50 ms: to be asked once.
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
