"""DOSAdam under FSDP2, HSDP and tensor parallelism: the unsharded run's bits, on any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dos import DOSAdam
from tests.support.random_plans import RandomPlans
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import (
    adamw,
    assert_close,
    assert_equal,
    batch,
    dos_adam,
    mesh_of,
    model,
    on_host,
    shard,
    trained,
    values,
    whole,
)

# The same batch on each rank: gradients are averaged over a power of two, which is exact.
# The random runs below have the formats without codes.

WIDTH = 128
CODED = {"state_format": "int8", "subgroup_size": 5000, "policy": "adaptive"}


def coded(build: Callable[[], nn.Module]) -> list[Tensor]:
    return trained(lambda p: dos_adam(p, **CODED), build, micro_batches=2)


def run_coded(alone: dict[torch.dtype, list[Tensor]]) -> None:
    for dtype, expected in alone.items():
        ours = shard(model(WIDTH, 1, dtype), mesh_of())
        optimizer = dos_adam(ours.parameters(), **CODED)
        assert_equal(trained(lambda _, o=optimizer: o, lambda m=ours: m, micro_batches=2), expected)
        entry = optimizer.state[ours[0].up.weight]
        assert {"exp_avg_codes", "exp_avg_scales"} <= entry.keys()
        assert isinstance(entry["exp_avg_scales"], DTensor)
        assert entry["exp_avg_scales"].shape == (2 * WIDTH, 1)
        assert "exp_avg" in optimizer.state[ours[0].up.bias], "of one axis, so that its blocks depend on the ranks"
        assert_equal(coded(functools.partial(on_host, width=WIDTH, blocks=1, dtype=dtype)), expected)


def test_codes_are_those_of_one_process(pair: Ranks, one_kernel_thread: None) -> None:
    """On the device as on the host."""
    pair.run(run_coded, {d: coded(lambda d=d: model(WIDTH, 1, d)) for d in (torch.float32, torch.bfloat16)})


@functools.cache
def parallel_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "parallel"))


class Parallel(nn.Module):
    """Residual-free, so that activations are what the plan says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.chunk(2)[parallel_mesh()["parallel"].get_local_rank()]
        return self.down(torch.tanh(self.up(self.norm(rows))))


def with_tensor_parallel(policy: str | float, offload: bool, shards: int) -> None:
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(0)),
        "down": RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(0)),
    }

    def build() -> nn.Module:
        found = parallelize_module(Parallel(), parallel_mesh()["parallel"], plan)
        return fully_shard(found, mesh=parallel_mesh()["shard"]) if shards > 1 else found

    def make(parameters: Iterable[Tensor]) -> DOSAdam:
        nonlocal optimizer
        optimizer = dos_adam(parameters, policy=policy, offload_gradients=offload)
        return optimizer

    def whole_norm(module: nn.Module, _: int) -> None:
        expected.append(torch.stack([whole(p.grad).norm() for p in module.parameters()]).norm())

    norms, expected = list[Tensor](), list[Tensor]()
    optimizer: DOSAdam
    found = trained(make, build, before_step=lambda *_: norms.append(optimizer.grad_norm()))
    assert_close(found, trained(adamw, build, before_step=whole_norm))
    assert_close(norms, expected)
    assert_equal(trained(lambda p: dos_adam(p, policy="cpu"), build), found)


@pytest.mark.parametrize(("policy", "offload", "shards"), [("adaptive", False, 2), ("cpu", True, 1)])
def test_tensor_and_sequence_parallel(ranks: Ranks, pair: Ranks, policy: str, offload: bool, shards: int) -> None:
    (pair if shards == 1 else ranks).run(with_tensor_parallel, policy, offload, shards)


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
@on_pair
def test_writes_that_no_version_counts(policy: str) -> None:
    @torch.no_grad()
    def change(model: nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters]
        if step == 4:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True)
            return
        versions = [t._version for t in (*parameters, *gradients)]
        if step == 1:
            torch._foreach_neg_(gradients)
        elif step == 2:
            torch._foreach_mul_(gradients, 0.5)
        elif step == 3:
            torch._foreach_mul_([p.detach() for p in parameters], 0.5)
        assert versions == [t._version for t in (*parameters, *gradients)]

    def run(make: Callable[[Any], Any]) -> list[Tensor]:
        return trained(make, before_step=change, steps=range(5))

    assert_close(run(lambda p: dos_adam(p, policy=policy)), run(lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)))


# Random meshes, plans, accumulation and checkpoints.

STEPS = 4
FULL = StateDictOptions(full_state_dict=True)


class Run(NamedTuple):
    """What is drawn. policy: that name or share, or the seed of plans that change from step to step.

    updates: with which a divided model is attached, where nothing needs a norm.
    """

    mesh: tuple[int, int]
    policy: str | float
    subgroup_size: int
    offload: bool | str
    clip: float | None
    dtype: torch.dtype
    micro_batches: int
    attach: bool
    updates: str
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
        updates=st.sampled_from(["step", "backward"]),
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
            norm = run.clip is not None or "norm" in run.reads or not divided
            optimizer.attach(found, updates="step" if norm else run.updates)
        return found, optimizer

    module, optimizer = build(run.mesh)
    for step, reads in enumerate(run.reads):
        for micro_batch in range(run.micro_batches):
            rows = batch(10 * step + micro_batch, run.width, run.dtype)
            last = micro_batch == run.micro_batches - 1
            with contextlib.nullcontext() if last else optimizer.no_update():
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
