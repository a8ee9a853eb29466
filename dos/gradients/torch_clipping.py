"""Replacements of torch's own gradient clipping, for gradients that DOSAdam has offloaded or folds factors into."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dos.gradients.clipping import clip_factor
from dos.guard import warn
from dos.sharding.local import as_replicated, is_sharded, whole
from dos.torch_internals.patches import replace_clipping

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions of all optimizers of ours; weak, because torch's functions stay replaced and would keep them alive."""
_folds = False


def fold_clipping(enabled: bool = True) -> None:
    """Fold the factor of torch's gradient clipping into the next ``step()`` of DOSAdam, from now on.

    For training loops of others that call ``torch.nn.utils.clip_grad_norm_`` or ``clip_grads_with_norm_`` in each step
    (Accelerate, Trainer, torchtitan). Torch computes the norm, and the factor is folded into the update as by
    ``optimizer.clip_grad_norm_``, so that the step can use the gradients that backward has sent to the host. ``p.grad``
    keeps its values from before clipping. Gradients of other parameters are clipped in place.
    Offloaded gradients are always clipped in this way.

    enabled: False restores torch's behaviour.
    Clipping then raises RuntimeError for gradients that were clipped already, for which torch's norm would be wrong.
    """
    global _folds
    _folds = enabled
    _wrap_torch()


def watch_clipping(session: Any, *, offloads: bool) -> None:
    """Register this session with torch's clipping, which is replaced at once if gradients may be offloaded."""
    _sessions.add(session)
    if offloads:
        _wrap_torch()


def refuse_clipping() -> None:
    """Let torch's clipping be refused where gradients are used while backward runs."""
    _wrap_torch()


@functools.cache
def _wrap_torch() -> None:
    replace_clipping("clip_grad_norm_", _clip_grad_norm)
    replace_clipping("_clip_grads_with_norm_", _clip_grads_with_norm)
    replace_clipping("clip_grad_value_", _clip_grad_value)


def _clip_grad_norm(
    clip: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip as torch does, and offloaded gradients, too: their factor is folded into the update."""
    found = _as_list(parameters)
    if max_norm == math.inf and not error_if_nonfinite and _are_updated(found):
        warn(
            "torch.nn.utils.clip_grad_norm_ was asked for the norm of gradients that attach(updates='backward') has "
            "used already; it is given as NaN, and nothing is clipped, as max_norm=inf says"
        )
        return torch.full((), math.nan, device=found[0].device)
    _refuse_updated(found, "clip_grad_norm_")
    sessions = [session for session in list(_sessions) if session.edits.may_have_offloaded(found)]
    if not sessions:
        # torch warns of a generator that is empty.
        return clip(found or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norms = [session.edits.offloaded_norm(found, float(norm_type)) for session in sessions]
    gradients = [p.grad for p in found if p.grad is not None]
    if gradients:
        norms.insert(0, whole(torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)))
    norms = [norm.to(norms[0].device, torch.float32) for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} for gradients from `parameters`, those on the host included, is "
            f"{float(total)}, so they cannot be clipped; set error_if_nonfinite=False to multiply them all the same"
        )
    torch.nn.utils.clip_grads_with_norm_([p for p in found if p.grad is not None], max_norm, total, foreach)
    for session in sessions:
        session.edits.fold_offloaded(found, clip_factor(total, float(max_norm)))
    return as_replicated(total, next(filter(is_sharded, found), None))


def _clip_grads_with_norm(
    clip: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Clip as torch does, or fold the factor into the update if `fold_clipping` was called."""
    found = _as_list(parameters)
    _refuse_updated(found, "clip_grads_with_norm_")
    _refuse_offloaded(found, "clip_grads_with_norm_", "its norm was found without them")
    sessions = list(_sessions) if _folds else []
    if sessions:
        factor = clip_factor(whole(total_norm).to(torch.float32), float(max_norm))
        # Several sessions may have a parameter: an optimizer that user code has replaced may still be alive.
        folded = {id(p) for session in sessions for p in session.edits.fold_factor(found, factor)}
        found = [p for p in found if id(p) not in folded]
    if found:
        clip(found, max_norm, total_norm, foreach)


def _clip_grad_value(
    clip: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clip as torch does; refuse offloaded gradients, which torch does not see."""
    found = _as_list(parameters)
    _refuse_updated(found, "clip_grad_value_")
    _refuse_offloaded(found, "clip_grad_value_", "it does not see them")
    clip(found, clip_value, foreach)


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _refuse_offloaded(parameters: Sequence[Tensor], function: str, why: str) -> None:
    if any(session.edits.has_offloaded(parameters) for session in list(_sessions)):
        raise RuntimeError(
            f"torch.nn.utils.{function} cannot clip gradients that DOSAdam(offload_gradients=True) keeps on the host, "
            f"because {why}; clip their norm with torch.nn.utils.clip_grad_norm_, which does, or with "
            "DOSAdam(..., max_grad_norm=...), or leave offload_gradients out"
        )


def _are_updated(parameters: Sequence[Tensor]) -> bool:
    return any(session.edits.updates_any(parameters) for session in list(_sessions))


def _refuse_updated(parameters: Sequence[Tensor], function: str) -> None:
    if _are_updated(parameters):
        raise RuntimeError(
            f"torch.nn.utils.{function} comes too late: attach(updates='backward') uses gradients while backward runs, "
            "when the norm of all of them is not known; train without clipping (max_grad_norm=0 or None in a trainer), "
            "or attach the model without updates="
        )
