"""Saved tensors of models that ranks divide: the same bits, and gathered parameters stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.activations import Writes, optimizer_of, transfers
from tests.support.devices import Copying
from tests.support.inside import offload_of
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import assert_equal, dos_adam, mesh_of, model, shard, train, values
from tests.support.training import bits


def divided(way: str) -> nn.Sequential:
    if way == "fsdp":
        return shard(model(blocks=3), mesh_of())
    if way == "fsdp in two precisions":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return shard(model(blocks=3), mesh_of(), mp_policy=policy)
    whole = model(width=12, blocks=3)[:-1]
    both = mesh_of(1, replicas=2) if way == "both" else None
    for block in whole:
        mesh = mesh_of() if both is None else both["shard"]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if both is not None:
            fully_shard(block, mesh=both["replicate"])
    return whole


def same_bits(way: str, activations: Any) -> tuple[int, int]:
    """Bytes that left at most for the host in a transfer, and of the largest parameter, gathered."""
    found = []
    for amount in (None, activations):
        module = divided(way)
        optimizer = dos_adam(module.parameters(), device=Copying())
        optimizer.attach(module, activations=amount)
        if amount is not None:
            offload_of(optimizer).least_bytes = 16
        train(module, optimizer)
        optimizer.synchronize()
        found.append(values(module))
    assert_equal(*found)
    left = transfers(optimizer)
    return max(left, default=0), max(p.numel() * 2 for p in module.parameters())


@pytest.mark.parametrize(
    ("way", "activations"),
    [("fsdp", 1.0), ("fsdp in two precisions", 0.5), ("tensor parallel", 1.0), ("both", 1.0), ("both", 0.5)],
)
def test_sharded_training_is_the_same_to_the_bit(pair: Ranks, way: str, activations: float) -> None:
    for most, gathered in pair.run(same_bits, way, activations):
        assert 0 < most < gathered, "gathered parameters stay"


@on_pair
def test_distributed_tensors_come_back_as_such() -> None:
    """DTensors that are saved are unwrapped, and wrapped again."""

    def gradients(activations: float) -> list[bytes]:
        x = distribute_tensor(torch.linspace(-1, 1, 64).view(8, 8), mesh_of(), [Shard(0)]).requires_grad_()
        optimizer = optimizer_of(nn.Linear(2, 2))
        with optimizer.offload_activations(activations):
            y = x
            for _ in range(5):
                y = torch.tanh(3 * y) * y
        y.sum().backward()
        assert (activations > 0) == bool(transfers(optimizer))
        return bits([x.grad.to_local()])

    assert gradients(1.0) == gradients(0.0)


@on_pair
def test_a_distributed_tensor_that_was_written_to_is_saved_anew() -> None:
    """Of a DTensor that is written to and saved again."""

    def gradient(activations: float) -> Tensor:
        t, w = (distribute_tensor(torch.ones(8, 8), mesh_of(), [Shard(0)]) for _ in range(2))
        w.requires_grad_()
        optimizer = optimizer_of(nn.Linear(2, 2))
        with optimizer.offload_activations(activations):
            _ = (torch.ones_like(w, requires_grad=True) * t).sin()  # whose copy begins before the write
            t.mul_(3)
            y = w * t
            for _ in range(5):  # so that the first leave the device
                y = y.sin()
        y.sum().backward()
        return w.grad.to_local()

    assert torch.equal(gradient(1.0), gradient(0.0))


@pytest.mark.parametrize("in_backward", [False, True])
@on_pair
def test_distributed_tensors_that_were_written_to_raise(in_backward: bool) -> None:
    x = distribute_tensor(torch.ones(8, 8), mesh_of(), [Shard(0)]).requires_grad_()
    optimizer = optimizer_of(nn.Linear(2, 2))
    with optimizer.offload_activations(1.0):
        y = (x * 2).exp()
        z = y.sin()
        if in_backward:
            z = z + Writes.apply(y)
        z = z.sin().sin().sin().sum()
    if not in_backward:
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
