"""torch's own gradient clipping, where optimizers of ours have the gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dos.gradients.clipping import clip_factor
from dos.sharding.local import is_sharded


class Clips(Protocol):
    """An optimizer, as torch's clipping meets it."""

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a gradient of any of these is on the host, where torch does not see it."""

    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Let the next step multiply the gradients of those that are its own; returns those."""


_live: weakref.WeakSet[Clips] = weakref.WeakSet()
_folds = False


def fold_clipping(enabled: bool = True) -> None:
    """Let torch's gradient clipping leave the gradients of DOSAdam's parameters as they are, from now on.

    For training loops that are not one's own and call ``torch.nn.utils.clip_grad_norm_`` or
    ``clip_grads_with_norm_`` in each step (Accelerate, Trainer, torchtitan): the norm is torch's, and the factor goes
    into the next ``step()``, as that of ``optimizer.clip_grad_norm_`` does, so that gradients which left during
    backward still are what the step uses. ``p.grad`` then has the values from before clipping. Gradients of other
    parameters are clipped as ever. False: as it was.
    Clipping then raises RuntimeError for gradients that were clipped already, of which torch would find a wrong norm.
    """
    global _folds
    _folds = enabled
    _wrap_torch()


def watch_clipping(optimizer: Clips, *, offloads: bool) -> None:
    """Let torch's clipping know of this optimizer, at once if that may have offloaded gradients."""
    _live.add(optimizer)
    if offloads:
        _wrap_torch()


@functools.cache
def _wrap_torch() -> None:
    """What does the clipping is wrapped, under the private name by which `clip_grad_norm_` calls it, so that whoever
    imported that already gets this, too, and under its public one.
    """
    module = torch.nn.utils.clip_grad
    clip = module._clip_grads_with_norm_

    @functools.wraps(clip)
    def wrapped(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        optimizers = list(_live)
        if any(optimizer.has_offloaded(parameters) for optimizer in optimizers):
            raise RuntimeError(
                "torch's gradient clipping found no gradients, because DOSAdam(offload_gradients=True) keeps them on "
                "the host; clip with optimizer.clip_grad_norm_(max_norm) or DOSAdam(..., max_grad_norm=...)"
            )
        if _folds and optimizers:
            whole = total_norm.full_tensor() if is_sharded(total_norm) else total_norm  # type: ignore[attr-defined]
            factor = clip_factor(whole.to(torch.float32), max_norm)
            # A parameter may be of several: of one that was replaced and is still referred to, too.
            folded = {id(p) for optimizer in optimizers for p in optimizer.fold_factor(parameters, factor)}
            parameters = [p for p in parameters if id(p) not in folded]
        if parameters:
            clip(parameters, max_norm, total_norm, *args, **kwargs)

    module._clip_grads_with_norm_ = wrapped
    torch.nn.utils.clip_grads_with_norm_ = wrapped
