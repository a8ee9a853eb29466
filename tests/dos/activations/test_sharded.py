"""Saved tensors of models that ranks divide: the same bits, and gathered parameters stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dos import DOSAdam
from perfmodel import Op
from tests.support.devices import Copying
from tests.support.ranks import Ranks
from tests.support.sharded import assert_equal, dos_adam, mesh_of, model, shard, train, values
from tests.support.training import bits


def divided(way: str) -> nn.Sequential:
    if way == "fsdp":
        return shard(model(blocks=3), mesh_of())
    if way == "fsdp in two precisions":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return shard(model(blocks=3), mesh_of(), mp_policy=policy)
    whole = model(width=12, blocks=3)[:-1]
    for block in whole:
        parallelize_module(block, mesh_of(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return whole


def same_bits(way: str, activations: Any) -> tuple[int, int]:
    """Bytes that left at most for the host in a transfer, and of the largest parameter, gathered."""
    found = []
    for amount in (None, activations):
        module = divided(way)
        optimizer = dos_adam(module.parameters(), device=Copying())
        optimizer.attach(module, activations=amount)
        if amount is not None:
            optimizer._session.on_device.activations.least_bytes = 16
        train(module, optimizer)
        optimizer.synchronize()
        found.append(values(module))
    assert_equal(*found)
    assert isinstance(optimizer, DOSAdam)
    left = [asked.nbytes for asked in optimizer._device.asked if asked.op is Op.SAVE]
    return max(left, default=0), max(p.numel() * 2 for p in module.parameters())


@pytest.mark.parametrize("activations", [1.0, 0.5])
@pytest.mark.parametrize("way", ["fsdp", "fsdp in two precisions", "tensor parallel"])
def test_sharded_training_is_the_same_to_the_bit(pair: Ranks, way: str, activations: float) -> None:
    for most, gathered in pair.run(same_bits, way, activations):
        assert 0 < most < gathered, "gathered parameters stay"


def distributed_tensors() -> bool:
    """DTensors that are saved are unwrapped, and wrapped again."""

    def gradients(activations: float) -> list[bytes]:
        x = distribute_tensor(torch.linspace(-1, 1, 64).view(8, 8), mesh_of(), [Shard(0)]).requires_grad_()
        optimizer = DOSAdam(nn.Linear(2, 2).parameters(), device=Copying())
        with optimizer.offload_activations(activations):
            optimizer._session.on_device.activations.least_bytes = 16
            y = x
            for _ in range(5):
                y = torch.tanh(3 * y) * y
        y.sum().backward()
        assert isinstance(x.grad, DTensor)
        assert (activations > 0) == any(asked.op is Op.SAVE for asked in optimizer._device.asked)
        return bits([x.grad.to_local()])

    assert gradients(1.0) == gradients(0.0)
    return True


def test_distributed_tensors_come_back_as_such(pair: Ranks) -> None:
    assert all(pair.run(distributed_tensors))


def written() -> str:
    x = distribute_tensor(torch.ones(8, 8), mesh_of(), [Shard(0)]).requires_grad_()
    optimizer = DOSAdam(nn.Linear(2, 2).parameters(), device=Copying())
    with optimizer.offload_activations(1.0):
        optimizer._session.on_device.activations.least_bytes = 16
        y = (x * 2).exp()
        z = y.sin().sin().sin().sum()
    with torch.no_grad():
        y.add_(1)
    try:
        z.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_distributed_tensors_that_were_written_to_raise(pair: Ranks) -> None:
    for message in pair.run(written):
        assert "modified by an inplace operation" in message
