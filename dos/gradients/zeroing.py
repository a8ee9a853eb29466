"""Replacements of torch's own `zero_grad`, of modules and of optimizers, which do not see gradients on the host."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos.torch_internals.module_parameters import parameters_of
from dos.torch_internals.patches import replace_method

watched: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions that offload gradients, or whose updates run on; weak, because torch's methods stay replaced."""

zero_grad_of_optimizers = torch.optim.Optimizer.zero_grad
"""torch's own method, which sees `p.grad` alone."""


def watch_zeroing(session: Any) -> None:
    """Tell this session from now on of parameters whose gradients user code zeroes, through any module or optimizer."""
    watched.add(session)
    _wrap_torch()


@functools.cache
def _wrap_torch() -> None:
    replace_method(nn.Module, "zero_grad", _zero_module)
    replace_method(torch.optim.Optimizer, "zero_grad", _zero_optimizer)


def _zero_module(zero_grad: Callable[..., None], module: nn.Module, set_to_none: bool = True) -> None:
    """Zero the gradients of a module's parameters as torch does, without waiting for their updates."""
    parameters = parameters_of(module) if watched else []
    if not _discard(parameters, set_to_none):
        zero_grad(module, set_to_none)
        return
    for p in parameters:
        if p.grad is None:
            continue
        if set_to_none:
            p.grad = None
        else:
            (p.grad.detach_() if p.grad.grad_fn is not None else p.grad.requires_grad_(False)).zero_()


def _zero_optimizer(zero_grad: Callable[..., None], optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Zero the gradients of an optimizer's parameters, some of which may be those of an optimizer of ours, too."""
    if watched:
        _discard([p for group in optimizer.param_groups for p in group["params"]], set_to_none)
    zero_grad(optimizer, set_to_none)


def tell_others(own: Any, set_to_none: bool) -> None:
    """Tell all sessions but this one that user code zeroes the gradients of its parameters."""
    others = [session for session in list(watched) if session is not own]
    if others:
        _discard(own.assembly.parameters, set_to_none, others)


def _discard(parameters: Sequence[Tensor], set_to_none: bool, sessions: Sequence[Any] | None = None) -> bool:
    """Tell these sessions, by default all. Returns whether any of these are parameters of an optimizer of ours."""
    sessions = list(watched) if sessions is None else sessions
    found = [session.edits.discard_gradients(parameters, overwrites=not set_to_none) for session in sessions]
    return any(found)  # not before all were told
