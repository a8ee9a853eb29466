"""Replaces functions of torch, for the whole process, where torch calls no hook. Torch 2.6 to 2.13.

Clipping is a function of gradients, which calls no module and no optimizer. `zero_grad` of modules and of optimizers
sets an attribute, which is None already where gradients are on the host. DistributedDataParallel broadcasts
parameters when it is built, and at the end of `join()`, after all hooks of the model and of `Join`. It tells nobody
that it exists. Backward that is given `inputs` knows tensors by identity, and calls no hook before it has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def replace_clipping(name: str, ours: Callable[..., Any]) -> None:
    """Let torch's function of this name call ours, with the function that it called before as the first argument.

    torch's function is a wrapper that enters `no_grad`. Only the function within is replaced, because other modules may
    have imported the wrapper under any name.
    """
    wrapper = getattr(torch.nn.utils.clip_grad, name)
    cells = [cell for cell in wrapper.__closure__ or () if cell.cell_contents is getattr(wrapper, "__wrapped__", None)]
    if len(cells) != 1:
        raise RuntimeError(
            f"torch.nn.utils.clip_grad.{name} of torch {torch.__version__} is not what DOSAdam knows; clip with "
            "max_grad_norm= or optimizer.clip_grad_norm_(), without offload_gradients= and dos.fold_clipping()"
        )
    cells[0].cell_contents = functools.wraps(wrapper.__wrapped__)(functools.partial(ours, wrapper.__wrapped__))


def replace_method(owner: type, name: str, ours: Callable[..., Any]) -> None:
    """Let the method of this class call ours, with the method as it was as the first argument."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(before, self, *args, **kwargs)

    setattr(owner, name, method)


def call_when_built(kind: type, call: Callable[[Any], None]) -> None:
    """Call `call` with each object of a class that is built, or unpickled, from now on."""

    def build(before: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        call(self)

    for name in ("__init__", "__setstate__"):
        replace_method(kind, name, build)


def call_before_broadcasts(call: Callable[[nn.Module], None]) -> None:
    """Call `call` with the model before DistributedDataParallel broadcasts it."""
    implementation = torch.nn.parallel.distributed
    broadcast = getattr(implementation, "_sync_module_states", None)
    if broadcast is None:  # torch without torch.distributed
        return

    @functools.wraps(broadcast)
    def call_and_broadcast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call(module)
        return broadcast(module, *args, **kwargs)

    implementation._sync_module_states = call_and_broadcast


def replace_run_backward(ours: Callable[..., Any]) -> None:
    """Let each backward that user code begins call ours, with the function that it called before as the first argument.

    Its further arguments are those of `torch.autograd.graph._engine_run_backward`, which `torch.autograd.backward` and
    `grad` call.
    """
    # Not `backward` and `grad`, which other modules may have imported under any name.
    before = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = functools.wraps(before)(functools.partial(ours, before))
