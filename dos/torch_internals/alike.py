"""Asks in one call whether many tensors are what they were, by the guards of compiled graphs.

No public function of torch asks several tensors at once. Asking each for its dtype, shape, strides and sign takes the
host ten times as long, and some of these calls let go of Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


class Alike:
    """The classes, dtypes, devices, layouts, shapes, strides and signs of tensors, and whether they need gradients.

    Refers to none of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: different ones."""
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are as the tensors were from which this was made, one by one; they may be others.

        May also return False if another mode of torch is on than then, such as autocast.
        """
        found: bool = self._guards.check(*tensors)
        return found
