"""What dos/torch_internals/loading_hooks.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dos.torch_internals.loading_hooks import after_loading, before_loading

CHANGED = "torch has changed what dos/torch_internals/loading_hooks.py relies on"


def test_the_hooks_are_those_that_torch_calls() -> None:
    optimizer, calls = torch.optim.AdamW([nn.Parameter(torch.ones(2))]), []

    def replaces(of: Any, state_dict: Any) -> Any:
        calls.append("replaces")
        return {**state_dict, "further": 1}

    def looks(of: Any, state_dict: Any) -> None:
        calls.append("looks")
        assert state_dict["further"] == 1

    optimizer.register_load_state_dict_pre_hook(replaces)
    optimizer.register_load_state_dict_pre_hook(looks)
    optimizer.register_load_state_dict_post_hook(lambda of: calls.append("after"))
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    theirs = calls.copy()
    calls.clear()
    assert before_loading(optimizer, state_dict)["further"] == 1, CHANGED
    after_loading(optimizer)
    assert calls == theirs == ["replaces", "looks", "after"], CHANGED


def test_torch_rounds_what_it_loads() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    state = {0: {"step": torch.ones(()), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    found = optimizer.state[parameter]["exp_avg"].dtype
    assert found is torch.bfloat16, "torch's load_state_dict can take the place of loading_hooks.py"
