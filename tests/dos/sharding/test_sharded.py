"""DOSAdam under FSDP2, HSDP and tensor parallelism: the unsharded run's bits, on any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import assert_close, assert_equal, dos_adam, mesh_of, model, shard, train, values

# The same batch on each rank: gradients are averaged over a power of two, which is exact.


def run_alone(settings: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    alone = model(dtype=dtype)
    train(alone, dos_adam(alone.parameters(), **settings), micro_batches=2)
    return values(alone)


def build_divided(size: int, replicas: int, dtype: torch.dtype, compute: torch.dtype | None) -> nn.Sequential:
    more = {} if compute is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=dtype)}
    return shard(model(dtype=dtype), mesh_of(size, replicas), **more)


@functools.cache
def run_adamw(size: int, replicas: int, dtype: torch.dtype, compute: torch.dtype | None) -> list[Tensor]:
    theirs = build_divided(size, replicas, dtype, compute)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), micro_batches=2)
    return values(theirs)


def run_divided(size: int, replicas: int, settings: dict[str, Any], alone: dict[torch.dtype, list[Tensor]]) -> None:
    """The parameters are those of one process, and AdamW's under the same sharding."""
    for dtype, compute in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        ours = build_divided(size, replicas, dtype, compute)
        train(ours, dos_adam(ours.parameters(), **settings), micro_batches=2)
        if compute is None:
            assert_equal(values(ours), alone[dtype])
        if dtype == torch.float32:
            assert_close(values(ours), run_adamw(size, replicas, dtype, compute))


@pytest.mark.parametrize(
    ("size", "replicas", "policy", "offload"),
    [
        (4, 1, "cpu", True),
        (4, 1, "adaptive", False),
        (4, 1, "resident", True),
        (4, 1, "stride:2", False),
        (1, 1, "cpu", True),
        (2, 1, 0.5, True),
        (2, 2, "adaptive", True),
        (2, 2, "cpu", False),
    ],
)
def test_bits_are_those_of_one_process(
    ranks: Ranks,
    one_kernel_thread: None,
    size: int,
    replicas: int,
    policy: str | float,
    offload: bool,
) -> None:
    settings = {"policy": policy, "offload_gradients": offload}
    alone = {dtype: run_alone(settings, dtype) for dtype in (torch.float32, torch.bfloat16)}
    ranks.run(run_divided, size, replicas, settings, alone)


@functools.cache
def parallel_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "parallel"))


def with_tensor_parallel(policy: str | float, offload: bool, shards: int) -> None:
    whole_mesh = parallel_mesh()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(0)),
        "down": RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(0)),
    }

    class Parallel(nn.Module):
        """Residual-free, so that activations are what the plan says."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(self.norm(x))))

    def build() -> nn.Module:
        found = parallelize_module(Parallel(), whole_mesh["parallel"], plan)
        return fully_shard(found, mesh=whole_mesh["shard"]) if shards > 1 else found

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        place = whole_mesh["parallel"].get_local_rank()
        for step in range(3):
            rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).chunk(2)[place]
            model(rows).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    first = build()
    expected = run(first, torch.optim.AdamW(first.parameters(), lr=1e-2))
    second = build()
    found = run(second, dos_adam(second.parameters(), policy=policy, offload_gradients=offload))
    assert_close(found, expected)
    third = build()
    assert_equal(run(third, dos_adam(third.parameters(), policy="cpu")), found)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("policy", "offload"), [("adaptive", False), ("cpu", True), ("cpu", False), ("resident", True)]
)
def test_tensor_and_sequence_parallel(ranks: Ranks, pair: Ranks, policy: str, offload: bool, shards: int) -> None:
    (pair if shards == 1 else ranks).run(with_tensor_parallel, policy, offload, shards)


@pytest.mark.parametrize(
    ("policy", "what"),
    [("cpu", "gradients"), ("cpu", "negated"), ("cpu", "clipped"), ("cpu", "parameters"), ("stride:2", "parameters")],
)
@on_pair
def test_writes_that_no_version_counts(policy: str, what: str) -> None:
    def build() -> nn.Module:
        return shard(model(), mesh_of())

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        def change(step: int) -> None:
            parameters = list(model.parameters())
            versions = [p._version for p in parameters], [p.grad._version for p in parameters]
            if what == "gradients":
                torch._foreach_mul_([p.grad for p in parameters], 0.5)
            elif what == "negated":
                torch._foreach_neg_([p.grad for p in parameters])
            elif what == "clipped":
                torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True)
            elif step == 2:
                torch._foreach_mul_([p.detach() for p in parameters], 0.5)
            if what != "clipped":
                assert versions == ([p._version for p in parameters], [p.grad._version for p in parameters])

        train(model, optimizer, before_step=torch.no_grad()(change))
        return values(model)

    first, second = build(), build()
    expected = run(first, torch.optim.AdamW(first.parameters(), lr=1e-2, foreach=True))
    assert_close(run(second, dos_adam(second.parameters(), policy=policy)), expected)
