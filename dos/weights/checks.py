"""Refusals of what weights that stream cannot do, before a forward or a move changes anything."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dos.parameters.watching import check_hooks, latest_watcher
from dos.torch_internals.modes import is_compiled, is_compiled_around, is_traced
from dos.torch_internals.module_parameters import Links, are_linked, own_parameter, own_parameters, parameters_of
from dos.weights.block import Block


def links_of(module: nn.Module, block: Block) -> Links:
    """Return how the modules that have the block's parameters are reached from the block's module."""
    holders = {each for member in block.members for each, _ in member.places}
    reached = {each for each in module.modules() if not holders.isdisjoint(each.modules())}
    return [
        (weakref.ref(parent), name, weakref.ref(child))
        for parent in reached
        for name, child in parent.named_children()
        if child in reached
    ]


def check_homes(module: nn.Module, block: Block, links: Links) -> Links:
    """Raise RuntimeError if user code has replaced or moved parameters of a block, or has unfrozen some.

    module: the block's. links: see `links_of`; those of now are returned. See `check_hooks`, too.
    """
    linked = are_linked(links)
    now = {} if linked else _places_in(module)
    check_hooks([member.parameter for member in block.members])
    for member in block.members:
        if member.parameter.requires_grad and not member.trained:
            raise RuntimeError(
                f"a parameter of shape {tuple(member.parameter.shape)} requires gradients, and did not when its weights"
                " began to stream; call optimizer.attach(model, weights=...) again"
            )
        for reference, name in member.where:  # not `places`: each forward of a block asks
            place = reference()
            if place is not None and own_parameter(place, name) is not member.parameter:
                _raise_replaced(module, member.parameter, f"{type(place).__name__}.{name}")
        for other, name in now.get(id(member.parameter), set()).difference(member.places):
            _raise_replaced(module, member.parameter, f"{type(other).__name__}.{name}")
    return links if linked else links_of(module, block)


def _places_in(module: nn.Module) -> dict[int, set[tuple[nn.Module, str]]]:
    """Return where the parameters within a module are, by their ids."""
    found = defaultdict[int, set[tuple[nn.Module, str]]](set)
    for each in module.modules():
        for name, parameter in own_parameters(each).items():
            found[id(parameter)].add((each, name))
    return found


def _raise_replaced(module: nn.Module, parameter: Tensor, place: str) -> NoReturn:
    """Raise for a parameter that a block had in this place, or has there now."""
    if any(parameter is each for each in parameters_of(module)):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has got another place in its block than when its weights "
            f"began to stream ({place}), as after pruning or remove_parametrizations(); call "
            "optimizer.attach(model, weights=...) again"
        )
    raise RuntimeError(
        f"{place} is another parameter than when its weights began to stream; load weights without assign=True, give "
        "functional_call() and torch.export a copy.deepcopy() of the model, or build the optimizer anew and call "
        "attach(weights=...) again"
    )


def check_optimizer(module: nn.Module, block: Block, watcher: Any) -> None:
    """Raise RuntimeError if a block is trained whose gradients the optimizer of another attach() would get.

    watcher: of the optimizer for which they stream; None if that was deleted.
    """
    trained = next((m.parameter for m in block.members if m.trained), None)
    if trained is None or not (module.training and torch.is_grad_enabled()):
        return
    other = watcher is None or latest_watcher(trained) not in (None, watcher)
    # Not where user code has moved the weight to another optimizer, which is given its gradients.
    if other and (watcher is None or any(p is trained for p in watcher.assembly.parameters)):
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


def check_traced(streams: bool) -> None:
    """Raise RuntimeError where torch compiles a model with what is around its blocks, or traces one that streams."""
    if is_traced() if streams else is_compiled_around():
        raise RuntimeError(
            "a model whose weights stream ran while torch traced or compiled it as a whole (torch.compile, export, "
            "jit.trace, make_fx, torch.func.linearize, functionalize, fake tensors), and hooks that fetch weights "
            "cannot be traced; trace copy.deepcopy(model), or compile blocks before attach()"
        )


def refuse_to_move() -> None:
    """Raise the RuntimeError of a model that user code moves or converts."""
    raise RuntimeError(
        "the weights of this model stream between host and device, so it cannot be moved or converted; leave out "
        "model.to(), .cuda() and .half() after optimizer.attach(model, weights=...), which has put everything where it "
        "belongs, or convert the model before; Hugging Face's Trainer moves models unless its arguments have "
        "place_model_on_device = False, Accelerate unless accelerator.device_placement is False, and Lightning unless "
        "its strategy is told not to (docs/hugging-face.md)"
    )
