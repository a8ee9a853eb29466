"""Changes that user code makes to a parameter, or its gradient, while DOSAdam waits for other gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def in_other_strides(p: Tensor) -> None:
    assert p.grad is not None, "it waits"
    p.grad.data = (2 * p.grad).t().contiguous().t()


def negated(p: Tensor) -> None:
    assert p.grad is not None, "it waits"
    p.grad.data = torch._neg_view(2 * p.grad)  # no public function makes such a view


def written(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def in_other_memory(p: Tensor) -> None:
    p.data = p.data.clone()
