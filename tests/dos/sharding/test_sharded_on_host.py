"""FSDP2's CPUOffloadPolicy: shards, gradients and state on the host, updated in place."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from dos import DOSAdam
from dos.step import in_place
from dos.step.work import SubgroupUpdate
from tests.support.ranks import on_pair
from tests.support.sharded import assert_close, assert_equal, batch, mesh_of, model, shard, train, values

UPDATE_S = 0.02


def offloaded(size: int | None = None, dtype: torch.dtype = torch.float32, blocks: int = 2) -> nn.Sequential:
    return shard(model(dtype=dtype, blocks=blocks), mesh_of(size), offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize(
    ("size", "settings", "dtype"),
    [
        (1, {}, torch.float32),
        (1, {"max_grad_norm": 0.05}, torch.bfloat16),
        (None, {}, torch.bfloat16),
        (None, {"max_grad_norm": 0.05}, torch.float32),
    ],
)
@on_pair
def test_updates_in_place(size: int | None, settings: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = offloaded(size, dtype), offloaded(size, torch.float32)
    optimizer = DOSAdam(ours.parameters(), lr=1e-2, subgroup_size=100, **settings)
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters()), "their presence makes copies blocking"
    attached = offloaded(size, dtype)
    late = DOSAdam(attached.parameters(), lr=1e-2, subgroup_size=100, **settings)
    late.attach(attached)
    train(ours, optimizer, micro_batches=2)
    train(attached, late, micro_batches=2)
    late.synchronize()
    assert_equal(values(attached), values(ours))
    if dtype == torch.float32:
        reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        clip = settings.get("max_grad_norm")
        train(
            theirs,
            reference,
            micro_batches=2,
            before_step=lambda step: clip and torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip),
        )
        assert_close(values(ours), values(theirs))
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())


plain_apply = in_place._apply


@on_pair
def test_updates_run_into_the_next_forward() -> None:
    quick = offloaded(blocks=3)
    train(quick, DOSAdam(quick.parameters(), lr=1e-2, subgroup_size=100), steps=range(4))
    late = offloaded(blocks=3)
    optimizer = DOSAdam(late.parameters(), lr=1e-2, subgroup_size=100)
    optimizer.attach(late)
    entered = threading.Event()
    late[0].register_forward_pre_hook(lambda *_: entered.set())
    last_block = {id(p) for p in late[2].parameters()}
    awaited = []

    def slow_apply(update: SubgroupUpdate) -> None:
        if last_block.issuperset(id(piece.record.parameter) for piece in update.pieces):
            # It would not, if `step` waited for the last block's updates, or the first layer did.
            assert entered.wait(60), "the next forward did not begin"
            awaited.append(update)
        time.sleep(UPDATE_S)
        plain_apply(update)

    in_place._apply = slow_apply
    try:
        for step in range(4):
            late(batch(10 * step)).pow(2).mean().backward()
            if step > 0:  # the first step cannot know which layers will wait
                entered.clear()
            optimizer.step()
            optimizer.zero_grad()
        entered.set()
        optimizer.synchronize()
    finally:
        in_place._apply = plain_apply
    assert_equal(values(late), values(quick))
    assert awaited


@on_pair
def test_a_failure_is_said() -> None:
    late = offloaded()
    optimizer = DOSAdam(late.parameters(), lr=1e-2, subgroup_size=100)
    optimizer.attach(late)
    train(late, optimizer, steps=[0, 1])
    optimizer.synchronize()

    def breaks(update: SubgroupUpdate) -> None:
        raise OSError("the memory is broken")

    in_place._apply = breaks
    try:
        train(late, optimizer, steps=[2])
        with pytest.raises(RuntimeError, match="the memory is broken"):
            optimizer.synchronize()
    finally:
        in_place._apply = plain_apply
    with pytest.raises(RuntimeError, match="an earlier step failed part way"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_pair
def test_checkpoints(dtype: torch.dtype) -> None:
    through = offloaded(dtype=dtype)
    first = DOSAdam(through.parameters(), lr=1e-2)
    train(through, first, steps=range(2))
    state = copy.deepcopy(get_optimizer_state_dict(through, first))
    resumed = offloaded(dtype=dtype)
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    second = DOSAdam(resumed.parameters(), lr=1e-2)
    set_optimizer_state_dict(resumed, second, state)
    train(through, first, steps=range(2, 4))
    train(resumed, second, steps=range(2, 4))
    assert_equal(values(resumed), values(through))
