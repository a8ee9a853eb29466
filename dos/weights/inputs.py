"""Backward where weights stream: of chosen parameters, as by `torch.autograd.grad()`, and after one that raised."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from dos.torch_internals.patches import replace_run_backward
from dos.weights.parts import Graph, check_parts

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


@functools.cache
def serve_inputs(copies_of: Callable[[Sequence[Tensor]], dict[int, Tensor]]) -> None:
    """Let backward of chosen parameters write, or return, the gradients of their copies, too.

    copies_of: returns the copies of those of some tensors that have one, by the ids of the tensors.
    """

    def run(
        run_backward: Callable[..., Any],
        outputs: Sequence[Tensor],
        gradients: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> Any:
        rest = gradients, retain_graph, create_graph
        leaves = tuple(map(_leaf, inputs))
        copies = copies_of(leaves) if leaves else {}
        if not copies:
            return run_backward(outputs, *rest, inputs, allow_unreachable, accumulate_grad=accumulate_grad)
        found = run_backward(outputs, *rest, (*inputs, *copies.values()), True, accumulate_grad=accumulate_grad)
        if accumulate_grad:
            return found
        of_copies, graph = dict(zip(copies, found[len(inputs) :], strict=True)), Graph(outputs)
        for p, g in zip(leaves, found, strict=False):
            if g is not None and of_copies.get(id(p)) is not None:
                check_parts(p, copies[id(p)], graph)
        result = tuple(_sum(g, of_copies.get(id(p)), p) for p, g in zip(leaves, found, strict=False))
        if not allow_unreachable and any(each is None for each in result):
            raise RuntimeError(_UNUSED)
        return result

    replace_run_backward(run)


def _leaf(each: Any) -> Any:
    """Return the parameter whose gradient this edge is, where it is one; else the same."""
    return getattr(each.node, "variable", each) if isinstance(each, GradientEdge) else each


def _sum(gradient: Tensor | None, of_copy: Tensor | None, parameter: Any) -> Tensor | None:
    """Return the sum of the gradients of a parameter and of its copy, where the parameter is."""
    if of_copy is None:
        return gradient
    there = of_copy.to(parameter.device)
    return there if gradient is None else gradient + there


@functools.cache
def after_interruptions(forget: Callable[[], None]) -> None:
    """Call `forget` when the next backward begins after one that raised, and no other one runs."""
    # Not when it raises: a step that follows uses the gradients that there are, as AdamW does.
    interrupted, running, beginning = False, set[object](), threading.Lock()

    def run(run_backward: Callable[..., Any], *arguments: Any, accumulate_grad: bool, **rest: Any) -> Any:
        nonlocal interrupted
        if not accumulate_grad:
            return run_backward(*arguments, accumulate_grad=False, **rest)
        this = object()  # not the thread, which runs one within another where a checkpoint is reentrant
        try:
            with beginning:  # else another thread's backward would begin meanwhile, and lose what it writes
                if interrupted and not running:
                    forget()
                    interrupted = False
                running.add(this)
            return run_backward(*arguments, accumulate_grad=True, **rest)
        except BaseException:
            interrupted = True
            raise
        finally:
            running.discard(this)

    replace_run_backward(run)
