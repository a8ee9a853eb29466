"""On a GPU: weights that stream between host and device, with copies and compute that really run at once."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices.cuda import CudaDevice
from perfmodel import Op
from tests.support import ROOT
from tests.support.blocks import RUNS
from tests.support.gpu import DEVICE, NEEDS_GPU, SHRINK, SIMULATED, free_memory, late
from tests.support.training import bits, plan_anew

pytestmark = NEEDS_GPU

NUMEL = 600_000 // SHRINK
"""Of a block's larger weight: more than what is copied together with its neighbours."""
BLOCKS = 6
POLICIES: tuple[Any, ...] = ("cpu", "stride:1", 0.5, "adaptive")


class Wave(nn.Module):
    """As much weight to move for as little computation as possible; backward needs all of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(NUMEL, generator=generator).bfloat16())
        self.small = nn.Parameter(torch.randn(1000 + seed, generator=generator).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.weight * x) + (self.small * self.small).sum()


class Waves(nn.Module):
    def __init__(self, run: Any = RUNS[0]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Wave, range(BLOCKS)))
        self.last = nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.last
        for block in self.blocks:
            x = self.run(block, x)
        return x.float().square().mean()


def start(weights: Any, policy: Any = "cpu", run: Any = RUNS[0], **options: Any) -> tuple[Waves, DOSAdam]:
    """A model built on the host, and its optimizer. weights: None: all are on the device."""
    model = Waves(run) if weights is not None else Waves(run).to(DEVICE)
    options = {"lr": 1e-2, "policy": policy, "subgroup_size": 500_000 // SHRINK, "profile": "h100", **options}
    optimizer = DOSAdam(model.parameters(), device=DEVICE, offload_gradients=True, **options)
    optimizer.attach(model, weights=weights)
    return model, optimizer


def batch(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def iteration(model: Waves, optimizer: DOSAdam, step: int = 0, micro_batches: int = 1) -> None:
    for micro_batch in range(micro_batches):
        model(batch(100 * step + micro_batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def on_host(tensors: Any) -> list[Tensor]:
    return [t.detach().cpu().clone() for t in tensors]


Training = Callable[[Waves, DOSAdam], list[Tensor]]


def trained(train: Training, weights: Any, *arguments: Any, **options: Any) -> list[bytes]:
    """What `train` returns, and parameters and state after it, to the bit."""
    model, optimizer = start(weights, *arguments, **options)
    found = train(model, optimizer)
    optimizer.synchronize()
    state = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return bits(on_host([*found, *model.parameters(), *state]))


def steps(model: Waves, optimizer: DOSAdam, count: int = 4, micro_batches: int = 1) -> list[Tensor]:
    for step in range(count):
        iteration(model, optimizer, step, micro_batches)
    return []


def in_micro_batches(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    return steps(model, optimizer, micro_batches=3)


def with_two_forwards_before_each_backward(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    for step in range(4):
        losses = [model(batch(2 * step + i)) for i in range(2)]
        if step % 2:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward()
            losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def under_plans_that_change(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    for step in range(4):
        iteration(model, optimizer, step)
        plan_anew(optimizer)
    return []


def with_evaluation(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    found = []
    for step in range(3):
        iteration(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            found.append(model(batch(50 + step)))
        with torch.inference_mode():
            found.append(model(batch(60 + step)).clone())
        model.train()
    return found


def with_evaluation_before_each_step(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Its fetches are late; the host has the gradients, and could update the homes that are yet to be read."""
    found = []
    for step in range(3):
        model(batch(step)).backward()
        torch.cuda.synchronize()
        with torch.no_grad():
            late(Op.WEIGHTS)
            found.append(model(batch(50 + step)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def with_weights_read_after_each_step(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    found = []
    for step in range(3):
        iteration(model, optimizer, step)
        late(Op.FLUSH)
        if model.blocks[0].weight.device.type != "cpu":
            optimizer.synchronize()
        if step % 2:
            found += on_host(model.state_dict().values())
        else:
            found += on_host(block.weight for block in model.blocks)
    return found


def with_weights_written_after_each_forward(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """As an average of weights, or a checkpoint that is loaded, whose forward the device has yet to run."""
    found = []
    for step in range(3):
        for write in (through_module, through_references):
            references = [*model.parameters()]
            with torch.no_grad():
                late(Op.WEIGHTS)
                found.append(model(batch(50 + step)))
            write(model, optimizer, references)
        iteration(model, optimizer, step)
    return found


@torch.no_grad()
def through_module(model: Waves, optimizer: DOSAdam, references: list[Tensor]) -> None:
    for block in model.blocks:
        block.weight.mul_(0.5)


@torch.no_grad()
def through_references(model: Waves, optimizer: DOSAdam, references: list[Tensor]) -> None:
    optimizer.synchronize()
    for parameter in references:
        parameter.add_(0.25)


def on_several_streams(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Device memory is of the stream of the first step, and used by others."""
    last = torch.cuda.current_stream()
    streams = [torch.cuda.Stream(), last, torch.cuda.Stream()]
    for step in range(6):
        stream = streams[step % 3]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            iteration(model, optimizer, step, micro_batches=2)
        last = stream
    torch.cuda.current_stream().wait_stream(last)
    return []


def with_a_forward_on_a_side_stream(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Whose backward autograd runs there, too, while the optimizer's owner is the other one."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(4):
        x = batch(step)
        side.wait_stream(current)
        x.record_stream(side)
        with torch.cuda.stream(side):
            loss = model(x)
        current.wait_stream(side)
        loss.record_stream(current)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def with_forwards_in_vain(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Of which a block is fetched that nothing uses, and freed before its copy has begun; others get the memory."""
    x = batch(7)
    side = torch.cuda.Stream()
    for step in range(3):
        for stream in (side, torch.cuda.current_stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                late(Op.WEIGHTS, 0.02)
                model.blocks[1](x)  # and block 2 is on its way
                optimizer.release_memory() if False else model.blocks[0](x)
            torch.cuda.current_stream().wait_stream(stream)
        iteration(model, optimizer, step)
    return []


def assert_as_on_device(train: Training, weights: Any = 0, policy: Any = "cpu", run: Any = RUNS[0]) -> None:
    """Training has the same bits as with all weights on the device."""
    assert trained(train, weights, policy, run) == trained(train, None, "cpu", run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("weights", [0, 2, "auto"])
def test_training(weights: Any, policy: Any) -> None:
    assert_as_on_device(steps, weights, policy)


@pytest.mark.parametrize("policy", ["cpu", "stride:1"])
@pytest.mark.parametrize("run", RUNS[1:])
@pytest.mark.parametrize("train", [in_micro_batches, with_two_forwards_before_each_backward])
def test_checkpointing(train: Training, run: Any, policy: Any) -> None:
    assert_as_on_device(train, 0, policy, run)


OTHERS = (
    in_micro_batches,
    with_two_forwards_before_each_backward,
    under_plans_that_change,
    with_evaluation,
    with_evaluation_before_each_step,
    with_weights_read_after_each_step,
    with_weights_written_after_each_forward,
    on_several_streams,
    with_a_forward_on_a_side_stream,
    with_forwards_in_vain,
)


@pytest.mark.parametrize("policy", ["cpu", "stride:1"])
@pytest.mark.parametrize("train", OTHERS)
def test_what_else_users_do(train: Training, policy: Any) -> None:
    assert_as_on_device(train, 0, policy)
