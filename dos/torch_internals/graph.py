"""Nodes of autograd's graph: which of them use a leaf, and their numbers. Torch 2.6 to 2.13.

A node's number has no public name. `torch.autograd.graph.Node` has the rest.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_AccumulateGrad: Any = operator.attrgetter("_functions.AccumulateGrad")(torch._C)


def uses_of_leaves(outputs: Sequence[Any]) -> dict[int, list[int]]:
    """Return the numbers of the nodes that use each leaf of a graph, one for each use, by the leaf's id.

    Of the nodes that can run, backward runs the one with the highest number, and adds up a leaf's gradients in this
    order.

    outputs: tensors, or edges of the graph, where backward begins.
    """
    found = defaultdict[int, list[int]](list)
    waiting = [get_gradient_edge(each).node if isinstance(each, Tensor) else each.node for each in outputs]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        following: Any
        for following, _ in node.next_functions:
            if isinstance(following, _AccumulateGrad):
                found[id(following.variable)].append(node._sequence_nr())
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
