"""Asks in one call whether many tensors are what they were, by the guards of compiled graphs.

No public function of torch asks several tensors at once. Asking each for its dtype, shape, strides and sign takes the
host ten times as long, and some of these calls let go of Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors, which may be others: whether each is as one of these is now, in order.

    It compares classes, dtypes, devices, layouts, shapes, strides and signs, and whether they need gradients. It may
    also return False if another mode of torch is on than now, such as autocast. It refers to none of the tensors.
    tensors: different ones.
    """
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    found: Callable[..., bool] = guards.check
    return found
