"""What dos/torch_internals/live_objects.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dos.torch_internals.live_objects import parameters_of_all_modules
from tests.support.ranks import on_pair
from tests.support.sharded import mesh_of, model, shard

CHANGED = "torch has changed what dos/torch_internals/live_objects.py relies on"


def test_parameters_of_modules_are_found_wherever_these_are() -> None:
    linear, begun = nn.Linear(2, 2), nn.Linear.__new__(nn.Linear)  # of the other the constructor has not run
    alone = nn.Parameter(torch.ones(2))
    found = {id(p) for p in parameters_of_all_modules()}
    assert found.issuperset(map(id, linear.parameters())), CHANGED
    assert id(alone) not in found
    assert "_parameters" not in vars(begun), CHANGED


@on_pair
def test_no_hook_tells_that_fully_shard_replaces_parameters() -> None:
    whole, told = model(), []
    before = {id(p) for p in whole.parameters()}
    with_hook = register_module_parameter_registration_hook(lambda *args: told.append(args))
    try:
        divided = shard(whole, mesh_of())
    finally:
        with_hook.remove()
    assert before.isdisjoint(map(id, divided.parameters())), CHANGED
    assert told == [], "a hook on registration can take the place of live_objects.py"
