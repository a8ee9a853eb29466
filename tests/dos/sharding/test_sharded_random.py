"""Random meshes, plans, accumulation and checkpoints: always the bits of the run that is not divided."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dos import DOSAdam
from tests.support.random_plans import RandomPlans
from tests.support.ranks import Ranks
from tests.support.sharded import assert_close, assert_equal, batch, dos_adam, mesh_of, model, shard, values

STEPS = 4
FULL = StateDictOptions(full_state_dict=True)


class Run(NamedTuple):
    """What is drawn. policy: that name or share, or the seed of plans that change from step to step."""

    mesh: tuple[int, int]
    policy: str | float
    subgroup_size: int
    offload: bool
    clip: float | None
    dtype: torch.dtype
    micro_batches: int
    attach: bool
    reads: tuple[str, ...]
    moves_to: tuple[int, int]
    width: int


def drawn() -> st.SearchStrategy[Run]:
    mesh = st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2), (1, 4)])
    policy = st.sampled_from(["cpu", "adaptive", "resident", "stride:2", 0.5]) | st.integers(0, 99)
    return st.builds(
        Run,
        mesh=mesh,
        policy=policy,
        subgroup_size=st.sampled_from([7, 100, 10**6]),
        offload=st.booleans(),
        clip=st.none() | st.just(0.05),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        micro_batches=st.integers(1, 3),
        attach=st.booleans(),
        reads=st.tuples(*[st.sampled_from(["nothing", "state", "state dict", "norm", "move"])] * STEPS),
        moves_to=mesh,
        width=st.sampled_from([1, 3, 8, 11]),
    )


def follow(run: Run, divided: bool) -> list[Tensor]:
    def build(mesh: tuple[int, int]) -> tuple[nn.Module, DOSAdam]:
        found = model(run.width, dtype=run.dtype)
        if divided:
            shard(found, mesh_of(*mesh))
        optimizer = dos_adam(
            found.parameters(),
            policy=RandomPlans(run.policy, slots=2) if type(run.policy) is int else run.policy,
            subgroup_size=run.subgroup_size + (torch.distributed.get_rank() if divided else 0),  # they need not agree
            offload_gradients=run.offload,
            max_grad_norm=run.clip,
        )
        if run.attach:
            optimizer.attach(found)
        return found, optimizer

    module, optimizer = build(run.mesh)
    for step, reads in enumerate(run.reads):
        for micro_batch in range(run.micro_batches):
            rows = batch(10 * step + micro_batch, run.width, run.dtype)
            module(rows).float().pow(2).mean().backward()
        if reads == "norm":
            optimizer.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
        if reads == "state":
            assert all(entry["step"] == step + 1 for entry in optimizer.state.values())
        elif reads == "state dict":
            optimizer.state_dict()
        elif reads == "move" and divided:
            state = get_optimizer_state_dict(module, optimizer, options=FULL)
            weights = values(module)
            module, optimizer = build(run.moves_to)
            for p, value in zip(module.parameters(), weights, strict=True):
                p.data.copy_(torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements))
            set_optimizer_state_dict(module, optimizer, state, options=FULL)
    optimizer.synchronize()
    return values(module)


@pytest.mark.usefixtures("one_kernel_thread")
@settings(
    max_examples=int(os.environ.get("DOS_RANKS", "6")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(run=drawn())
def test_bits_are_those_of_one_process(ranks: Ranks, run: Run) -> None:
    alone = follow(run, False)
    for found in ranks.run(follow, run, True):
        if run.clip is None:
            assert_equal(found, alone)
        else:
            assert_close(found, alone, 1e-6 if run.dtype == torch.float32 else 1e-2)
