"""Loss scaling: reads the requests of torch.amp.GradScaler to a step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler

from dos.guard import warn
from dos.sharding.local import version
from dos.sharding.meshes import Meshes
from dos.torch_internals.callers import calling_scaler


class AmpScale(NamedTuple):
    """The requests of torch.amp.GradScaler to a step.

    factor: unscales the gradients.
    writes: the number of writes to every gradient since backward that changed no value, by its version counter; None
        if the gradients have other values than backward wrote.
    skip: whether the step must not happen.
    """

    factor: float
    writes: int | None
    skip: bool


UNSCALED = AmpScale(1.0, 0, False)
"""The requests of a step without GradScaler."""


def amp_scale(found_inf: Any, grad_scale: Tensor | None, meshes: Meshes, *, offloaded: bool) -> AmpScale:
    """Read the attributes that GradScaler.step() sets on an optimizer during the call, in one transfer.

    meshes: the ranks over which gradients are divided. A gradient that is infinite on one rank counts on all.
        GradScaler reduces over the mesh of the first gradient only, so its `found_inf` is set here, as torch's
        ShardedGradScaler does: all scales stay equal.
    Raises RuntimeError if gradients are offloaded, because GradScaler has not seen them, or if ranks' scales differ.
    """
    if offloaded:
        raise RuntimeError(
            "GradScaler cannot check gradients that DOSAdam(offload_gradients=True) keeps on the host; "
            "train in bfloat16, which needs no loss scaling, or without offload_gradients"
        )
    if grad_scale is None:  # unscale_() was called, which changes values and no version counter
        return AmpScale(1.0, None, _anywhere(bool(float(found_inf)), None, meshes))
    # In one transfer, because each read waits for the device. Without any gradient found_inf is 0 and no tensor.
    found_inf = torch.as_tensor(found_inf, dtype=grad_scale.dtype, device=grad_scale.device)
    scale, infinite = torch.stack([grad_scale.view(()), found_inf.view(())]).tolist()
    # GradScaler's check for inf multiplied every gradient by 1, in place.
    return AmpScale(1.0 / scale, versions_of_a_check(), _anywhere(bool(infinite), scale, meshes))


def _anywhere(infinite: bool, scale: float | None, meshes: Meshes) -> bool:
    """Return whether a gradient is infinite on any rank. scale: the loss scale; None: read it from the scaler."""
    if not meshes:
        return infinite
    caller = calling_scaler()
    if scale is None:
        scale = 1.0 if caller is None else caller.scaler.get_scale()
    anywhere = meshes.any_infinite(infinite, scale)
    if caller is not None:
        caller.set_found_inf(anywhere)
    elif anywhere != infinite:
        warn(
            "gradients are infinite on another rank, of which this rank's loss scaler does not know: all ranks skip "
            "the step, and from now on their loss scales differ; use torch.amp.GradScaler, or reduce the scale on "
            "every rank"
        )
    return anywhere


@functools.cache
def versions_of_a_check() -> int:
    """Return how often GradScaler's check for inf counts as a write to a gradient; versions of torch differ."""
    parameter = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    before = version(parameter.grad)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), device="cpu"))  # makes the scale, which unscale_() needs
    scaler.unscale_(torch.optim.SGD([parameter]))
    return version(parameter.grad) - before
