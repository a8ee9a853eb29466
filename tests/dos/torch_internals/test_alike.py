"""What dos/torch_internals/alike.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from dos.torch_internals.alike import alike

CHANGED = "torch has changed what dos/torch_internals/alike.py relies on"

OTHERS = {
    "strides": torch.ones(4, 4).t(),
    "shape": torch.ones(2, 8),
    "dtype": torch.ones(4, 4, dtype=torch.bfloat16),
    "sign": torch._neg_view(torch.ones(4, 4)),
    "no memory": torch._efficientzerotensor(4, 4),
    "layout": torch.ones(4, 4).to_sparse(),
    "class": nn.Parameter(torch.ones(4, 4), requires_grad=False),
    "leaf": torch.ones(4, 4, requires_grad=True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_each_difference_is_noticed(other: Tensor) -> None:
    first = torch.zeros(3)
    are_alike = alike([first, torch.ones(4, 4)])
    assert are_alike(first, torch.zeros(4, 4)), CHANGED
    assert not are_alike(first, other), CHANGED


def test_tensors_are_not_kept() -> None:
    tensor = torch.ones(3)
    are_alike, reference = alike([tensor]), weakref.ref(tensor)
    del tensor
    assert reference() is None, CHANGED
    assert are_alike(torch.ones(3)), CHANGED


def test_no_public_function_compares_many_tensors() -> None:
    assert not [name for name in dir(torch) if "guard" in name and not name.startswith("_")], (
        "torch may have become sufficient"
    )
