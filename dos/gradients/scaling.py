"""Loss scaling: what torch.amp.GradScaler asks of a step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dos.sharding.meshes import Meshes


class AmpScale(NamedTuple):
    """What torch.amp.GradScaler asks of a step.

    factor: unscales the gradients.
    writes: how often every gradient was written since backward without changing a value, by its version counter; None
        if the gradients have other values than backward left.
    skip: whether the step must not happen.
    """

    factor: float
    writes: int | None
    skip: bool


def amp_scale(optimizer: Any, meshes: Meshes, *, offloaded: bool) -> AmpScale:
    """Read the attributes that GradScaler.step() sets on an optimizer during the call, in one transfer.

    meshes: the ranks over which gradients are divided. What is infinite on one is so on all; GradScaler looks at the
        mesh of the first gradient only.
    Raises RuntimeError if gradients are offloaded, because GradScaler has not seen them.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return AmpScale(1.0, 0, False)
    if offloaded:
        raise RuntimeError(
            "GradScaler cannot check gradients that DOSAdam(offload_gradients=True) keeps on the host; "
            "train in bfloat16, which needs no loss scaling, or without offload_gradients"
        )
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is None:  # unscale_() was called, which no version counter tells
        return AmpScale(1.0, None, _anywhere(bool(float(found_inf)), 1.0, meshes))
    # Each number read by itself would wait for the device once more. Without any gradient, found_inf is 0, no tensor.
    found_inf = torch.as_tensor(found_inf, dtype=grad_scale.dtype, device=grad_scale.device)
    scale, infinite = torch.stack([grad_scale.view(()), found_inf.view(())]).tolist()
    # Its check for inf multiplied every gradient by 1, in place.
    return AmpScale(1.0 / scale, versions_of_a_check(), _anywhere(bool(infinite), scale, meshes))


def _anywhere(infinite: bool, scale: float, meshes: Meshes) -> bool:
    return meshes.any_infinite(infinite, scale) if meshes else infinite


@functools.cache
def versions_of_a_check() -> int:
    """How often GradScaler's check for inf counts as a write to a gradient; versions of torch differ."""
    gradient, found_inf, one = (torch.ones(1, dtype=torch.float32, device="cpu") for _ in range(3))
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, one)
    return gradient._version - before
