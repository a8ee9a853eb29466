"""Stand-ins for weights in a forked child, which does not have the memory that its parent has pinned."""

from __future__ import annotations

from typing import Any

from torch import nn

from dos.guard import LOST

SAID = LOST.format("weights of this model, which stream between host and GPU")

_HARMLESS = frozenset(("shape", "dtype", "device", "layout", "ndim", "grad", "requires_grad", "is_leaf"))
_METHODS = frozenset(("size", "dim", "numel", "stride", "requires_grad_"))


class Lost(nn.Parameter):
    """A parameter without memory: touching it would be a segmentation fault, so that all but its description raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        known = (
            getattr(func.__self__, "__name__", "") in _HARMLESS if name in ("__get__", "__set__") else name in _METHODS
        )
        if not known:
            raise RuntimeError(SAID)
        return super().__torch_function__(func, types, args, kwargs or {})
