"""Refusals of what weights that stream cannot do, before a forward or a move changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dos.parameters.watching import check_hooks, latest_watcher
from dos.torch_internals.modes import is_compiled
from dos.torch_internals.module_parameters import own_parameters
from dos.weights.block import Block


def check_homes(block: Block) -> None:
    """Raise RuntimeError if user code has replaced parameters of a block, or has unfrozen some; see `check_hooks`."""
    for member in block.members:
        check_hooks(member.parameter)
        if member.parameter.requires_grad and not member.trained:
            raise RuntimeError(
                f"a parameter of shape {tuple(member.parameter.shape)} requires gradients, and did not when its weights"
                " began to stream; call optimizer.attach(model, weights=...) again"
            )
        for module, name in member.places:
            if own_parameters(module).get(name) is not member.parameter:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is another parameter than when its weights began to stream; load "
                    "weights without assign=True, or build the optimizer anew and call attach(weights=...) again"
                )


def check_optimizer(module: nn.Module, block: Block, watcher: Any) -> None:
    """Raise RuntimeError if a block is trained whose gradients the optimizer of another attach() would get.

    watcher: of the optimizer for which they stream; None if that was deleted.
    """
    trained = next((m.parameter for m in block.members if m.trained), None)
    if trained is None or not (module.training and torch.is_grad_enabled()):
        return
    if watcher is None or latest_watcher(trained) not in (None, watcher):
        raise RuntimeError(
            "the weights of this model stream for an optimizer that was deleted or replaced, which alone gets "
            "their gradients; call attach(model, weights=...) of the new optimizer, before any of its steps, or "
            "build the model anew (evaluating it needs no optimizer)"
        )


def check_compiled(plain: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if any of these modules, which were not compiled when they were hooked, is now."""
    if any(is_compiled(module) for module in plain):
        raise RuntimeError(
            "a block whose weights stream was compiled after attach(), so that torch.compile would trace the hooks "
            "that fetch its weights; call optimizer.attach(model, weights=...) again, or compile blocks before it"
        )


def refuse_to_move() -> None:
    """Raise the RuntimeError of a model that user code moves or converts."""
    raise RuntimeError(
        "the weights of this model stream between host and device, so it cannot be moved or converted; leave out "
        "model.to(), .cuda() and .half() after optimizer.attach(model, weights=...), which has put everything where it "
        "belongs, or convert the model before; Hugging Face's Trainer moves models unless its arguments have "
        "place_model_on_device = False, and Accelerate unless accelerator.device_placement is False"
    )
