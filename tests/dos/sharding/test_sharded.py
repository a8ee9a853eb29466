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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import adamw, assert_close, assert_equal, dos_adam, mesh_of, model, on_host, shard, trained

# The same batch on each rank: gradients are averaged over a power of two, which is exact.

CODED = {"state_format": "int8", "subgroup_size": 5000}
WIDTH = 128


def shape(settings: dict[str, Any]) -> dict[str, int]:
    return {"width": WIDTH, "blocks": 1} if "state_format" in settings else {}


def run_alone(settings: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    return trained(lambda p: dos_adam(p, **settings), lambda: model(**shape(settings), dtype=dtype), micro_batches=2)


@functools.cache
def run_adamw(size: int, replicas: int, compute: torch.dtype | None) -> list[Tensor]:
    return trained(adamw, lambda: divided(size, replicas, {}, torch.float32, compute), micro_batches=2)


def divided(
    size: int, replicas: int, settings: dict[str, Any], dtype: torch.dtype, compute: torch.dtype | None
) -> nn.Sequential:
    more = {} if compute is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=dtype)}
    return shard(model(**shape(settings), dtype=dtype), mesh_of(size, replicas), **more)


def run_divided(size: int, replicas: int, settings: dict[str, Any], alone: dict[torch.dtype, list[Tensor]]) -> None:
    """The parameters are those of one process, also if they are on the host, and AdamW's under the same sharding."""
    coded = "state_format" in settings
    dtypes = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
    for dtype, compute in dtypes[: 2 if coded else 3]:
        ours = divided(size, replicas, settings, dtype, compute)
        optimizer = dos_adam(ours.parameters(), **settings)
        found = trained(lambda _, o=optimizer: o, lambda m=ours: m, micro_batches=2)
        if compute is None:
            assert_equal(found, alone[dtype])
        if not coded:
            if dtype == torch.float32:
                assert_close(found, run_adamw(size, replicas, compute))
            continue
        entry = optimizer.state[ours[0].up.weight]
        assert {"exp_avg_codes", "exp_avg_scales"} <= entry.keys()
        assert isinstance(entry["exp_avg_scales"], DTensor)
        assert entry["exp_avg_scales"].shape == (2 * WIDTH, 1)
        assert "exp_avg" in optimizer.state[ours[0].up.bias], "of one axis, so that its blocks depend on the ranks"
        in_place = functools.partial(on_host, size, dtype=dtype, **shape(settings))
        assert_equal(trained(lambda p: dos_adam(p, **CODED), in_place, micro_batches=2), alone[dtype])


@pytest.mark.parametrize(
    ("size", "replicas", "policy", "more"),
    [
        (4, 1, "cpu", {"offload_gradients": "native"}),
        (4, 1, "resident", {"offload_gradients": True}),
        (4, 1, "stride:2", {}),
        (2, 2, "adaptive", {"offload_gradients": True}),
        (2, 1, "adaptive", CODED),
        (4, 1, "cpu", CODED),
    ],
)
def test_bits_are_those_of_one_process(
    ranks: Ranks, one_kernel_thread: None, size: int, replicas: int, policy: str | float, more: dict[str, Any]
) -> None:
    settings = {"policy": policy, **more}
    alone = {dtype: run_alone(settings, dtype) for dtype in (torch.float32, torch.bfloat16)}
    ranks.run(run_divided, size, replicas, settings, alone)


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

    found = trained(lambda p: dos_adam(p, policy=policy, offload_gradients=offload), build)
    assert_close(found, trained(adamw, build))
    assert_equal(trained(lambda p: dos_adam(p, policy="cpu"), build), found)


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
    @torch.no_grad()
    def change(model: nn.Module, step: int) -> None:
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

    expected = trained(lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), before_step=change)
    assert_close(trained(lambda p: dos_adam(p, policy=policy), before_step=change), expected)
