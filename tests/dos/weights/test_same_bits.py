"""Weights that stream change no bit: in every format and policy, with checkpointing, clipping and all else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.activations import Net
from tests.support.blocks import RUNS, HomesTouched, inputs, loss, net, start, train, trained
from tests.support.training import FAST, bits, everything

pytestmark = pytest.mark.usefixtures("one_core")

CLIPS = {
    "not": lambda model, optimizer: None,
    "by us": lambda model, optimizer: optimizer.clip_grad_norm_(0.05),
    "by torch": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
}
FORMATS = (None, "float32", "int8")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
POLICIES = ("cpu", 0.5, "stride:1", "resident", "adaptive")


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    weights=st.sampled_from([0, 1, 3, 0.5, 1.0, "auto"]),
    policy=st.sampled_from(POLICIES),
    dtype=st.sampled_from(DTYPES),
    state_format=st.sampled_from(FORMATS),
    run=st.sampled_from(RUNS),
    clip=st.sampled_from(list(CLIPS)),
    micro_batches=st.integers(1, 3),
    activations=st.sampled_from([None, 1.0, 0.4]),
    master_weights=st.booleans(),
)
def test_any_program_has_the_bits_of_one_with_all_weights_on_the_device(
    weights: Any, run: Any, dtype: torch.dtype, clip: str, **options: Any
) -> None:
    found = [trained(net(dtype, run=run), each, clip=CLIPS[clip], profile=FAST, **options) for each in (weights, None)]
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["cpu", "stride:1", 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_on_disk(policy: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Windows have no weights, and what stays on the host when state goes to disk does."""

    def run(weights: Any) -> list[bytes]:
        model = Layers(dtype)
        memory = 400_000 if dtype == torch.float32 else 300_000
        optimizer = start(model, weights, policy=policy, disk=tmp_path, host_memory=memory, subgroup_size=4096)
        train(model, optimizer, 4)
        optimizer.synchronize()
        assert optimizer.metrics()["disk_held_bytes"] > 0
        return everything(model, optimizer)

    assert run(0) == run(2) == run(None)


class Attention(nn.Module):
    """Blocks that read the weights of a module which never runs: torch's attention does so with its projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first = nn.Linear(24, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(0)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [700, 5000])
def test_blocks_with_weights_that_are_read_past_their_modules(policy: Any, size: int) -> None:
    def run(weights: Any) -> list[bytes]:
        model = Attention()
        return trained(model, weights, policy=policy, subgroup_size=size, profile=FAST)

    assert run(0) == run(2) == run("auto") == run(None)


class Layers(nn.Module):
    """Large enough for some subgroups of whole pages."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first = nn.Linear(24, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.last = nn.Linear(64, 7)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def frozen(model: Net) -> None:
    """Whole blocks, parts of one, and what comes before all."""
    for part in (model.blocks[0], model.blocks[3], model.blocks[4].both, model.first):
        part.requires_grad_(False)


def tied(model: Net) -> None:
    """Between blocks, within one, and a block that is there twice."""
    model.blocks[3].out.weight = model.blocks[1].out.weight
    model.blocks[2].out.bias = model.blocks[2].bias = nn.Parameter(torch.zeros_like(model.blocks[2].out.bias))
    model.blocks[5] = model.blocks[4]


@pytest.mark.parametrize("change", [frozen, tied])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("weights", [0, 2])
def test_frozen_and_tied_parameters(change: Any, run: Any, weights: int) -> None:
    found = []
    for each in (weights, None):
        model = net(run=run)
        change(model)
        found.append(trained(model, each))
    assert found[0] == found[1]


def test_two_blocks_in_one_checkpoint() -> None:
    """The first of them is recomputed, waits for the second, and is still there in backward. One is frozen."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.net.blocks[2].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.net.first(x)
            for i in range(0, 6, 2):
                pair = nn.Sequential(self.net.blocks[i], self.net.blocks[i + 1])
                x = RUNS[2](pair, x)
            return self.net.last(x)

    assert trained(Pairs(), 0) == trained(Pairs(), None)


@pytest.mark.parametrize("order", ["together", "first", "last"])
@pytest.mark.parametrize("run", RUNS)
def test_two_forwards_before_a_backward(order: str, run: Any) -> None:
    """No gradient counts as final too early: both forwards add to it."""

    def train_twice(weights: Any) -> list[bytes]:
        model = net(run=run)
        optimizer = start(model, weights)
        for step in range(3):
            one, other = loss(model, 2 * step), loss(model, 2 * step + 1)
            for each in {"together": [one + other], "first": [one, other], "last": [other, one]}[order]:
                each.backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert train_twice(0) == train_twice(None)


@pytest.mark.parametrize("weights", [0, 3])
def test_evaluation_between_steps(weights: int) -> None:
    def evaluated(weights: Any) -> list[bytes]:
        model, found = net(), []
        optimizer = start(model, weights)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            model.eval()
            with torch.no_grad():
                found.append(model(inputs(5, model)))
            with torch.inference_mode():
                found.append(model(inputs(6, model)).clone())
            model.train()
        return bits(found) + everything(model, optimizer)

    assert evaluated(weights) == evaluated(None)


def test_checkpoints_go_into_another_number_of_blocks() -> None:
    model = net()
    optimizer = start(model, 0, policy=0.5)
    train(model, optimizer, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2, first=2)
    expected = everything(model, optimizer)
    for blocks in (None, 0, 3, 1.0):
        for before in (0, 1):
            model = net()
            optimizer = start(model, blocks)
            train(model, optimizer, before)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(model, optimizer, 2, first=2)
            assert everything(model, optimizer) == expected, (blocks, before)


def test_attached_again_with_another_number_of_blocks() -> None:
    """By the same optimizer, and by one that takes its place."""
    model, other = net(), net()
    optimizer, reference = start(model, 0), start(other, None)
    for step, weights in enumerate((3, 0.5, 0)):
        train(model, optimizer, 1, first=step)
        train(other, reference, 1, first=step)
        optimizer.attach(model, weights=weights)
    assert everything(model, optimizer) == everything(other, reference)
    state = optimizer.state_dict()
    del optimizer
    optimizer = start(model, 1)
    optimizer.load_state_dict(state)
    train(model, optimizer, 2, first=3)
    train(other, reference, 2, first=3)
    assert everything(model, optimizer) == everything(other, reference)


def test_user_code_writes_to_weights_at_home() -> None:
    def written(weights: Any) -> list[bytes]:
        model = net()
        optimizer = start(model, weights)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            optimizer.synchronize()
            with torch.no_grad():
                model.blocks[2].out.weight.mul_(0.5)
                model.blocks[3].bias.add_(1)
        return everything(model, optimizer)

    assert written(0) == written(None)


def test_memory_is_released_between_steps() -> None:
    def released(weights: Any) -> list[bytes]:
        model = net()
        optimizer = start(model, weights, policy="adaptive", profile=FAST)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            optimizer.release_memory()
        return everything(model, optimizer)

    assert released(0) == released(None)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layers = nn.ModuleList(nn.GRU(24, 24, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 4, -1)
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_modules_that_keep_a_list_of_their_weights() -> None:
    assert trained(Recurrent(), 0) == trained(Recurrent(), None)


@pytest.mark.parametrize("run", RUNS)
def test_no_operation_inside_a_block_touches_a_home(run: Any) -> None:
    model = net(run=run)
    optimizer = start(model, 0)
    touched = HomesTouched(model)
    with touched:
        found = loss(model, 0)
    with touched.backward():
        found.backward()
    assert not touched.found
    optimizer.step()
    with touched.backward():
        model.blocks[0].bias.sum()
    assert touched.found  # it would be noticed
