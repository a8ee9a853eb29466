"""DOSAdam under FSDP2, HSDP and tensor parallelism: the unsharded run's bits, on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import (
    adamw,
    assert_close,
    assert_equal,
    dos_adam,
    mesh_of,
    model,
    on_host,
    shard,
    trained,
    whole,
)

# The same batch on each rank: gradients are averaged over a power of two, which is exact.
# test_sharded_random.py has the formats without codes.

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
