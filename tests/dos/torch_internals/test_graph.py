"""What dos assumes of the graph of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dos.torch_internals.graph import uses_of_leaves


class Doubled(torch.autograd.Function):
    """A node in Python, with an attribute of the name that a leaf's node has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = x
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * slopes[0]


def test_backward_runs_nodes_in_the_order_of_their_numbers() -> None:
    """From the highest one, whatever the shape of the graph."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    a, b = x * y, x.exp()
    result = Doubled.apply(a.sin() + b) * x * x + y.cos() * b
    ran: list[str] = []
    uses = uses_of_leaves([result.sum()])
    numbers: dict[str, int] = {}
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        name = f"{node.name()} {node._sequence_nr()}"
        numbers[name] = node._sequence_nr()
        node.register_hook(lambda *_, name=name: ran.append(name))
        waiting += [following for following, _ in node.next_functions]
    result.sum().backward()
    assert ran == sorted(numbers, key=lambda name: -numbers[name])
    assert len(ran) == len(set(numbers.values())) == 10
    assert [len(uses[id(each)]) for each in (x, y)] == [4, 2]
    assert set(uses) == {id(x), id(y)}
    assert set(uses[id(x)]) | set(uses[id(y)]) <= set(numbers.values())


def test_a_leaf_that_one_node_uses_twice() -> None:
    x = torch.ones(3, requires_grad=True)
    assert [len(each) for each in uses_of_leaves([(x * x).sum(), x.sum()]).values()] == [3]
    assert len(set(uses_of_leaves([(x * x).sum()])[id(x)])) == 1
    edge = torch.autograd.graph.get_gradient_edge(x.exp())
    assert [len(each) for each in uses_of_leaves([edge]).values()] == [1]
