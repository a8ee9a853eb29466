"""What the gradients are multiplied by on their way into the update: clipping and loss scaling."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


Gradient = Tensor | Future
"""A gradient with its parameter, or what `OffloadedGradients.handles` has for one that is not."""


class PendingClip:
    """Clip factors waiting for the step, each for one gradient as it was when the factor was computed.

    A gradient that is replaced or written to afterwards, as zeroing and backward do, is another one: no factor is its.
    """

    def __init__(self) -> None:
        self._factors: dict[int, tuple[weakref.ref[Any], int, Tensor]] = {}
        self._floats: dict[int, float] = {}

    def clip(self, gradients: Iterable[Gradient], factor: Tensor) -> None:
        """Multiply the factors of these gradients by `factor`, and forget all others."""
        before = {id(gradient): (gradient, self.factor(gradient)) for gradient in gradients}
        # Most often all have the same one, which is then read from the device only once.
        products = {id(old): old * factor for _, old in before.values() if old is not None}
        self._floats = {}
        self._factors = {
            key: (weakref.ref(gradient), _version(gradient), products.get(id(old), factor))
            for key, (gradient, old) in before.items()
        }

    def factor(self, gradient: Gradient) -> Tensor | None:
        """What clipping multiplies the gradient by: float32, shape (); None: it was not clipped, or changed since."""
        version, factor = self._of(gradient)
        # GradScaler may have checked and unscaled it since, which in some versions of torch count as writes.
        unchanged = 0 <= _version(gradient) - version <= 2 * _versions_of_a_check()
        return factor if unchanged else None

    def as_float(self, gradient: Gradient) -> float:
        """The factor as a number, 1 if there is none. One synchronisation for all gradients that share it."""
        factor = self.factor(gradient)
        if factor is None:
            return 1.0
        if id(factor) not in self._floats:
            self._floats[id(factor)] = float(factor)
        return self._floats[id(factor)]

    def lost(self, gradient: Gradient) -> bool:
        """Whether the gradient was clipped and has been written to since."""
        return self._of(gradient)[1] is not None and self.factor(gradient) is None

    def _of(self, gradient: Gradient) -> tuple[int, Tensor | None]:
        """The version that was clipped, and the factor."""
        reference, version, factor = self._factors.get(id(gradient), (None, 0, None))
        return (version, factor) if reference is not None and reference() is gradient else (0, None)


def _version(gradient: Gradient) -> int:
    return gradient._version if isinstance(gradient, Tensor) else 0


def amp_scale(optimizer: Any, *, offloaded: bool) -> AmpScale:
    """Read the attributes that GradScaler.step() sets on an optimizer during the call. One synchronisation.

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
        return AmpScale(1.0, None, bool(float(found_inf)))
    # Its check for inf multiplied every gradient by 1, in place.
    return AmpScale(1.0 / float(grad_scale), _versions_of_a_check(), bool(float(found_inf)))


@functools.cache
def _versions_of_a_check() -> int:
    """How often GradScaler's check for inf counts as a write to a gradient; versions of torch differ."""
    gradient = torch.ones(1, device="cpu")
    before = gradient._version
    found_inf, one = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, one)
    return gradient._version - before


def global_norm(gradients: Sequence[Tensor], clip: PendingClip, elsewhere: Sequence[Tensor] = ()) -> Tensor:
    """The 2-norm of all gradients together as `clip` has them: float32, shape (), on the first one's device; or 0.

    elsewhere: norms of gradients that are not among these, shape ().
    """
    device = gradients[0].device if gradients else None
    norms = []
    for gradient in gradients:
        norm, factor = torch.linalg.vector_norm(gradient, dtype=torch.float32), clip.factor(gradient)
        norms.append(norm if factor is None else norm * factor.to(norm.device))
    norms = [norm.to(device, non_blocking=True) for norm in (*norms, *elsewhere)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What clipping to `max_norm` multiplies by: the formula of torch.nn.utils.clip_grads_with_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
