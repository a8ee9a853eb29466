"""What dos/torch_internals/fsdp2.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dos.torch_internals.fsdp2 import (
    end_waiting,
    modules_of,
    reduced_before_hooks,
    sharded_groups,
    wait_before_gathering,
)
from dos.torch_internals.modes import in_backward
from tests.support.ranks import on_pair
from tests.support.sharded import batch, mesh_of, model, on_host, shard

CHANGED = "torch has changed what dos/torch_internals/fsdp2.py relies on"


class Waits:
    """gathered: of each time, the ids of the parameters."""

    def __init__(self) -> None:
        self.gathered: list[set[int]] = []

    def before_gathering(self, parameters: Sequence[Tensor]) -> None:
        self.gathered.append(set(map(id, parameters)))


def waiting_on(divided: nn.Module) -> tuple[Waits, list[Any]]:
    waits, groups = Waits(), sharded_groups(divided)
    for group in groups:
        wait_before_gathering(group, waits)
    return waits, groups


@on_pair
def test_each_call_of_fully_shard_makes_a_group() -> None:
    divided = shard(model(blocks=2), mesh_of())
    groups = sharded_groups(divided)
    assert len(groups) == 3, CHANGED
    of_blocks = [{each for each in block.modules() if [*each.parameters(recurse=False)]} for block in divided[:-1]]
    assert [*map(modules_of, groups)] == [{divided[-1]}, *of_blocks], CHANGED
    assert sharded_groups(nn.Linear(2, 2)) == [], CHANGED


@on_pair
def test_hooks_of_shards_find_reduced_gradients() -> None:
    """One by one, while backward runs. Under CPUOffloadPolicy a hook makes the copy of each gradient blocking."""
    divided, alone = shard(model(), mesh_of()), model()
    rank, found, running = dist.get_rank(), dict[int, Tensor](), list[bool]()

    def hook(p: Tensor) -> None:
        found[id(p)] = p.grad.full_tensor()
        running.append(in_backward())

    for p in divided.parameters():
        p.register_post_accumulate_grad_hook(hook)
    divided(batch(rank)).square().mean().backward()
    (alone(batch(0)).square().mean() / 2 + alone(batch(1)).square().mean() / 2).backward()
    assert [*found] != sorted(found, key=[*map(id, divided.parameters())].index), CHANGED
    for one, other in zip(divided.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found[id(one)], other.grad, msg=CHANGED)
    assert all(running), CHANGED
    assert reduced_before_hooks(divided) == {*found}, CHANGED
    assert not reduced_before_hooks(on_host()), CHANGED


@on_pair
def test_shards_are_gathered_in_one_place() -> None:
    """By forward, by what is prefetched from there, and by hand: with the parameters that the optimizer has."""
    divided = shard(model(blocks=3), mesh_of())
    waits, groups = waiting_on(divided)
    of_groups = [{id(p) for each in modules_of(group) for p in each.parameters(recurse=False)} for group in groups]
    for layer, following in itertools.pairwise(divided[:-1]):
        layer.set_modules_to_forward_prefetch([following])
    with torch.no_grad():
        divided(batch(0))
    assert all(mine in waits.gathered for mine in of_groups), CHANGED
    divided[0].reshard()
    waits.gathered.clear()
    divided[0].unshard()
    assert waits.gathered, CHANGED
    assert all(each == of_groups[1] for each in waits.gathered), CHANGED
    for group in groups:
        end_waiting(group, waits)
        assert "unshard" not in vars(group), CHANGED
