"""The plain tensor in a DTensor or wrapper: the only place where they are unwrapped, and DTensors wrapped again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dos.torch_internals.dtensors import dtensor_as, local_tensor
from dos.torch_internals.tensors import PLAIN, base_of, held_tensor, is_wrapper, version_counter


def is_sharded(tensor: object) -> bool:
    """Return whether the tensor is a DTensor, of any placements."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before this is imported
    return module is not None and isinstance(tensor, module.DTensor)


def is_wrapped(tensor: Any) -> bool:
    """Return whether `local` gives another tensor: of a DTensor, and of a wrapper that holds one dense tensor."""
    if type(tensor) in PLAIN:
        return False
    return is_sharded(tensor) or (is_wrapper(tensor) and held_tensor(tensor) is not None)


def local(tensor: Any) -> Tensor:
    """Return the plain tensor with the values: this rank's part of a DTensor, or what a wrapper holds, without a copy.

    A plain tensor is returned itself, and so is a wrapper that does not hold one dense tensor of its shape and dtype.
    """
    if type(tensor) in PLAIN:
        return tensor
    part = local_tensor(tensor) if is_sharded(tensor) else tensor
    # The collective that writes the part may still run.
    part = part.trigger_wait() if hasattr(part, "trigger_wait") else part
    held = held_tensor(part) if type(part) not in PLAIN and is_wrapper(part) else None
    return part if held is None else held


def holds_wrapper(dtensor: Any) -> bool:
    """Return whether this rank's part of a DTensor is itself a wrapper, whose values may not be put in its place."""
    part = local_tensor(dtensor)
    return not hasattr(part, "trigger_wait") and local(dtensor) is not part


def laid_out_as(part: Tensor, like: Any, shape: Sequence[int] | None = None) -> Tensor:
    """Return a DTensor laid out as `like`, with `part` as this rank's part, without a copy; `part` if `like` is none.

    shape: of the whole tensor, if another than that of `like`, and in row-major order.
    """
    return dtensor_as(like, part, shape) if is_sharded(like) else part


def same_layout(one: Any, other: Any) -> bool:
    """Return whether both are divided over the same ranks in the same way, or neither is divided."""
    if not is_sharded(one) or not is_sharded(other):
        return is_sharded(one) == is_sharded(other)
    return one.device_mesh == other.device_mesh and one.placements == other.placements


def moved_to_layout(tensor: Any, like: Any) -> Tensor:
    """Return the tensor divided as `like` is. A collective, unless each rank has all of it, or the layout is the same.

    Raises ValueError if it lies on other ranks than `like`.
    """
    if not is_sharded(like) or same_layout(tensor, like):
        return tensor
    if not is_sharded(tensor):  # each rank has the whole, and takes its part
        tensor = as_replicated(tensor, like)
    if tensor.device_mesh != like.device_mesh:
        raise ValueError(f"expected a tensor on {like.device_mesh}, found one on {tensor.device_mesh}")
    return tensor.redistribute(like.device_mesh, like.placements)


def whole(tensor: Any) -> Tensor:
    """Return all of a DTensor, by a collective; any other tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def as_replicated(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor that is equal on all ranks as a DTensor on the ranks of `like`; itself if `like` is none."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def to_host(tensor: Any) -> Tensor:
    """Return the tensor on the host: itself if it is there."""
    part = local(tensor)
    return tensor if part.device.type == "cpu" else laid_out_as(part.cpu(), tensor)


def version(tensor: Any) -> int:
    """Return the number of counted writes to the tensor; of a wrapped one, also to all tensors that it wraps."""
    if type(tensor) in PLAIN:  # of each gradient, in its hook
        try:
            return version_counter(tensor)
        except RuntimeError:  # an inference tensor counts no writes; to ask would let go of Python's lock
            return 0
    return sum(0 if part.is_inference() else version_counter(part) for part in _layers(tensor))


def _layers(tensor: Any) -> tuple[Tensor, ...]:
    """Return the tensor, and those that it wraps."""
    if type(tensor) in PLAIN:
        return (tensor,)
    parts = (tensor, local_tensor(tensor)) if is_sharded(tensor) else (tensor,)
    held = held_tensor(parts[-1]) if is_wrapper(parts[-1]) and not is_sharded(parts[-1]) else None
    return parts if held is None else (*parts, held)


def counted_with(tensor: Any) -> tuple[Tensor, ...]:
    """Return the tensors that have the counters which `version` adds up: a view shares the counter of its base.

    The same memory may have several counters: `.data`, `torch.unsafe_chunk`, `torch.from_numpy` and views made within
    an operator return tensors with counters of their own. A detached tensor shares one, but not visibly.
    """
    return tuple(map(base_of, _layers(tensor)))


def counts_writes(tensor: Tensor) -> bool:
    """Return whether `version` counts all writes: not to wrapped tensors, nor to those made in torch.inference_mode."""
    return not (is_wrapped(tensor) or tensor.is_inference())
