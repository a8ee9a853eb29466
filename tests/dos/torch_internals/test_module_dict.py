"""What dos/torch_internals/module_dict.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn

from dos.torch_internals.module_dict import set_first

CHANGED = "torch has changed what dos/torch_internals/module_dict.py relies on"
LOG: list[str] = []


class First:
    def __reduce__(self) -> tuple[Any, ...]:
        LOG.append("first")
        return First, ()


class Logged(nn.Parameter):
    def __deepcopy__(self, memo: Any) -> Any:
        LOG.append("parameter")
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        LOG.append("parameter")
        return super().__reduce_ex__(protocol)


def log_state_dict(*_: object) -> None:
    LOG.append("state dict")


def test_what_is_first_is_copied_and_pickled_before_the_parameters() -> None:
    """And no hook on the state dict is called."""
    module = nn.Module()
    module.weight = Logged(torch.ones(2))
    module.register_state_dict_pre_hook(log_state_dict)
    set_first(module, "_ours", First())
    assert next(iter(vars(module))) == "_ours", CHANGED
    for read in (copy.deepcopy, pickle.dumps):
        LOG.clear()
        read(module)
        assert LOG[:2] == ["first", "parameter"], CHANGED
        assert "state dict" not in LOG, "a hook can take the place of module_dict.py"
    assert [name for name, _ in module.named_parameters()] == ["weight"]
