"""A rank that dies: the others say so, nothing is half written, and a checkpoint resumes to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import DIED, Ranks
from test_sharded import assert_equal, batch, dos_adam, model, train, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dos import DOSAdam

WORLD = 2


def build() -> tuple[nn.Module, DOSAdam]:
    found = model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in found[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(found, mesh=mesh)
    return found, dos_adam(found.parameters(), policy="stride:2", max_grad_norm=1.0)


def saves_and_goes_on(folder: str) -> list[Tensor]:
    module, optimizer = build()
    train(module, optimizer, steps=range(2))
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    train(module, optimizer, steps=range(2, 5))
    return values(module)


def loses_a_rank() -> str:
    module, optimizer = build()
    train(module, optimizer, steps=range(3))
    module(batch(30)).pow(2).mean().backward()
    if dist.get_rank() == 1:
        os._exit(1)
    before = [p.to_local().clone() for p in module.parameters()]
    with pytest.raises(Exception, match=r"(?i)connection|peer|closed|timed out") as caught:
        optimizer.step()
    for p, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), value)
    assert all(float(entry["step"]) == 3 for entry in optimizer.state.values())
    return str(caught.value)


def resumes(folder: str) -> list[Tensor]:
    module, optimizer = build()
    weights, state = get_state_dict(module, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(module, optimizer, steps=range(2, 5))
    return values(module)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    first, second = Ranks(WORLD), Ranks(WORLD)
    try:
        expected = first.run(saves_and_goes_on, str(tmp_path))
        said, died = first.run(loses_a_rank)
        assert died == DIED
        assert said
        first.stop()
        for found in second.run(resumes, str(tmp_path)):
            assert_equal(found, expected[0])
    finally:
        first.stop()
        second.stop()
