"""Moments in codes under FSDP2: the bits of one process, and checkpoints on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.ranks import Ranks, on_ranks
from tests.support.sharded import assert_equal, dos_adam, load, mesh_of, model, save, shard, values

WIDTH = 128


def built(dtype: torch.dtype) -> nn.Sequential:
    return model(WIDTH, blocks=1, dtype=dtype)


def learn(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(network.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        network(torch.randn(4, WIDTH, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_alone(dtype: torch.dtype) -> list[Tensor]:
    alone = built(dtype)
    learn(alone, dos_adam(alone.parameters(), state_format="int8", subgroup_size=5000), range(3))
    return values(alone)


def run_divided(size: int, policy: str, alone: dict[torch.dtype, list[Tensor]]) -> None:
    for dtype, expected in alone.items():
        divided = shard(built(dtype), mesh_of(size))
        optimizer = dos_adam(divided.parameters(), state_format="int8", policy=policy, subgroup_size=5000)
        learn(divided, optimizer, range(3))
        assert_equal(values(divided), expected)
        in_place = shard(built(dtype), mesh_of(size), offload_policy=CPUOffloadPolicy(pin_memory=False))
        learn(in_place, dos_adam(in_place.parameters(), state_format="int8"), range(3))
        assert_equal(values(in_place), expected)
        entry = optimizer.state[divided[0].up.weight]
        assert {"exp_avg_codes", "exp_avg_scales"} <= entry.keys()
        assert isinstance(entry["exp_avg_scales"], DTensor)
        assert entry["exp_avg_scales"].shape == (2 * WIDTH, 1)
        assert "exp_avg" in optimizer.state[divided[0].up.bias], "of one axis, so that its blocks depend on the ranks"


@pytest.mark.parametrize(("size", "policy"), [(1, "stride:1"), (2, "adaptive"), (4, "cpu")])
def test_bits_are_those_of_one_process(ranks: Ranks, one_kernel_thread: None, size: int, policy: str) -> None:
    alone = {dtype: run_alone(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ranks.run(run_divided, size, policy, alone)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
@on_ranks
def test_resume_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    through = shard(built(torch.bfloat16), mesh_of(before))
    first = dos_adam(through.parameters(), state_format="int8", policy="resident")
    learn(through, first, range(2))
    save(tmp_path, through, first, "save")
    learn(through, first, range(2, 4))
    resumed = shard(built(torch.bfloat16), mesh_of(after))
    second = dos_adam(resumed.parameters(), state_format="int8", policy="cpu")
    load(tmp_path, resumed, second)
    learn(resumed, second, range(2, 4))
    assert_equal(values(resumed), values(through))


def full_state_into_divided_blocks(alone: list[dict[str, Tensor]]) -> None:
    """Of parameters that have codes alone, and none where ranks divide their blocks."""
    for shape, entry in zip(SHAPES, alone, strict=True):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh_of(4), [Shard(0)]))
        optimizer = dos_adam([parameter], state_format="int8")
        parameter.grad = distribute_tensor(torch.zeros(shape), mesh_of(4), [Shard(0)])
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {0: entry["codes"]}})
        optimizer.step()
        found = optimizer.adamw_state(parameter)["exp_avg"]
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), 0.9 * entry["exp_avg"], rtol=2e-2, atol=2e-2)


SHAPES = (96, 200), (4480,), (67, 128)  # the last is divided between blocks


def test_full_state_loads_where_ranks_divide_blocks(ranks: Ranks, one_kernel_thread: None) -> None:
    alone = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer = dos_adam([parameter], state_format="int8")
        optimizer.step()
        codes = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
        assert "exp_avg_codes" in codes
        alone.append({"codes": codes, "exp_avg": optimizer.adamw_state(parameter)["exp_avg"]})
    ranks.run(full_state_into_divided_blocks, alone)
