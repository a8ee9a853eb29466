"""Gradients of a weight in two parts, which one backward writes: of the weight itself, and of its copy."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dos.torch_internals.graph import uses_of_leaves
from dos.torch_internals.modes import writes_gradient
from dos.torch_internals.module_parameters import own_parameters
from dos.torch_internals.patches import replace_run_backward
from dos.torch_internals.tensors import has_gradient_hooks


class Graph:
    """The graph of a backward. outputs: where it begins."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = outputs

    @functools.cached_property
    def uses(self) -> dict[int, list[int]]:
        """The numbers of the nodes that use each leaf, see `uses_of_leaves`."""
        return uses_of_leaves(self._outputs)


_running: list[Graph] = []
"""The graphs of the backwards that run, in any thread."""

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def know_model(model: nn.Module) -> None:
    """Let errors name the parameters of this model, whose weights stream, and note the graphs of backwards."""
    _models.add(model)
    _note_graphs()


@functools.cache
def _note_graphs() -> None:
    def run(run_backward: Callable[..., Any], outputs: Sequence[Any], *arguments: Any, **rest: Any) -> Any:
        graph = Graph(outputs)
        _running.append(graph)
        try:
            return run_backward(outputs, *arguments, **rest)
        finally:
            _running.remove(graph)

    replace_run_backward(run)


def will_write(parameter: Tensor) -> bool:
    """Return whether a backward that runs writes the gradient of this leaf, or one around that of this thread."""
    if writes_gradient(parameter):
        return True
    # Torch tells it of the innermost one alone. The graph around a checkpoint that is recomputed has few nodes.
    return len(_running) > 1 and any(id(parameter) in graph.uses for graph in _running)


def check_parts(parameter: Tensor, copy: Tensor, graph: Graph | None = None) -> None:
    """Raise RuntimeError if the sum of both parts is not what autograd would compute without the copy.

    It would add up the gradients of all uses in the order in which backward runs them, and run hooks on the sum. The
    parts are sums by themselves: the order is the same where one part has a single use, which comes last.

    graph: of the backward that writes both; None: it runs.
    """
    if has_gradient_hooks(parameter):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} of a block has a hook of register_hook(), and the loss "
            "uses it beside its block, so that the hook has run on each of two gradients and not on their sum; use "
            "optimizer.edit_gradients() before step() instead, or attach the model without weights="
        )
    # The innermost one first: where they are nested the others do not write both.
    for each in [graph] if graph is not None else reversed(_running):
        uses, its = each.uses.get(id(parameter)), each.uses.get(id(copy))
        if uses and its:
            if not (_is_last(uses, its) or _is_last(its, uses) or len(uses) == len(its) == 1):
                raise RuntimeError(
                    f"the loss uses {_name(parameter)}, of shape {tuple(parameter.shape)}, beside its block, and uses "
                    f"it {len(uses) + len(its)} times in all, so that its gradients would add up in another order than "
                    "without weights=, with other last bits; call backward() for what uses it beside the block by "
                    "itself, or attach the model without weights="
                )
            return


def _is_last(uses: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether there is one use, and backward comes to it behind all others."""
    return len(uses) == 1 and uses[0] < min(others)


def _name(parameter: Tensor) -> str:
    """Return the parameter's name in its model."""
    for model in list(_models):
        for prefix, module in model.named_modules():
            for name, own in own_parameters(module).items():
                if own is parameter:
                    return f"{prefix}.{name}" if prefix else name
    return "a parameter"
