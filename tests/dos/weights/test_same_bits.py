"""Weights that stream change no bit: in every format and policy, with checkpointing, clipping and all else."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support import ways
from tests.support.activations import Net
from tests.support.blocks import RUNS, WIDE, HomesTouched, inputs, loss, net, start, train, trained
from tests.support.crossings import crossed
from tests.support.fake_ranks import fake_ranks
from tests.support.training import FAST, SLOW, bits, everything

pytestmark = pytest.mark.usefixtures("one_core")

CLIPS = {
    "not": lambda model, optimizer: None,
    "by us": lambda model, optimizer: optimizer.clip_grad_norm_(0.05),
    "by torch": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
}
FORMATS = (None, "float32", "int8")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
POLICIES = ("cpu", 0.5, "stride:1", "resident", "adaptive")


@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=list(HealthCheck))
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


@pytest.mark.parametrize(("policy", "dtype"), crossed(["cpu", "stride:1", 0.5], [torch.bfloat16, torch.float32]))
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


def test_blocks_that_stay_while_the_host_has_no_room_for_them(tmp_path: Path) -> None:
    """Each forward leaves out another block, so that the order of use would move some home."""

    def run(**options: Any) -> list[bytes]:
        model = net(torch.float32, blocks=4, width=WIDE)
        optimizer = start(model, **options)
        for step in range(5):
            skipped = model.blocks[step % 4]
            model.run = lambda block, x, skipped=skipped: x if block is skipped else block(x)
            train(model, optimizer, 1, first=step)
        return everything(model, optimizer)

    assert run(weights=2, disk=tmp_path, host_memory=400_000) == run(weights=None)


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


@pytest.mark.parametrize(
    ("size", "policy"),
    [
        (700, "cpu"),
        (5000, "adaptive"),
        *(pytest.param(700, policy, marks=pytest.mark.slow) for policy in ("stride:1", "resident", 0.5, "adaptive")),
    ],
)
def test_blocks_with_weights_that_are_read_past_their_modules(policy: Any, size: int) -> None:
    def run(weights: Any) -> list[bytes]:
        model = Attention()
        return trained(model, weights, policy=policy, subgroup_size=size, profile=FAST)

    assert run(0) == run(2) == run("auto") == run(None)


class Past(nn.Module):
    """Reads the weights of modules which never run: backward still needs one when it has the other's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(nn.functional.linear(x, part.weight, part.bias))
        return x


class AllPast(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.blocks, self.run = nn.ModuleList(Past() for _ in range(5)), run

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: self.run(block, x), self.blocks, x.requires_grad_())


@pytest.mark.parametrize("run", RUNS[1:])
def test_a_graph_from_before_a_step_is_recomputed_with_weights_that_are_read_past_their_modules(run: Any) -> None:
    def end(weights: Any) -> list[bytes]:
        model = AllPast(run)
        optimizer = start(model, weights)
        for step in range(3):
            older = loss(model, 2 * step)
            loss(model, 2 * step + 1).backward()
            optimizer.step()
            older.backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert end(0) == end(2) == end(None)


class Looks(nn.Module):
    """Reads the weight of a module that runs later, past it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(x * self.part.weight.norm()))


@pytest.mark.parametrize("kind", [Looks, ways.Recurrent])
def test_blocks_that_stay_wait_where_a_weight_is_read_before_its_module_runs(kind: Callable[[], nn.Module]) -> None:
    """Modules wait one by one for updates, which run on into the forward."""

    def run(weights: Any) -> list[bytes]:
        return trained(ways.Stack(kind), weights, device=EmulatedDevice(SLOW, 10**8), steps=2, micro_batches=1)

    assert run(1.0) == run("auto") == run(None)


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


def frozen(run: Any) -> Net:
    """Whole blocks, parts of one, and what comes before all."""
    model = net(run=run)
    for part in (model.blocks[0], model.blocks[3], model.blocks[4].both, model.first):
        part.requires_grad_(False)
    return model


def tied(run: Any) -> Net:
    """Between blocks, within one, and a block that is there twice."""
    model = net(run=run)
    model.blocks[3].out.weight = model.blocks[1].out.weight
    model.blocks[2].out.bias = model.blocks[2].bias = nn.Parameter(torch.zeros_like(model.blocks[2].out.bias))
    model.blocks[5] = model.blocks[4]
    return model


class Pairs(nn.Module):
    """Two blocks in one checkpoint: the first is recomputed, waits, and is there in backward. One is frozen."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.net, self.run = net(), run
        self.net.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.first(x)
        for i in range(0, 6, 2):
            x = self.run(nn.Sequential(self.net.blocks[i], self.net.blocks[i + 1]), x)
        return self.net.last(x)


class Recurrent(nn.Module):
    """Its modules keep a list of their weights."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layers = nn.ModuleList(nn.GRU(24, 24, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 4, -1)
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize(
    ("build", "run"), [*itertools.product((frozen, tied), RUNS), (Pairs, RUNS[2]), (Recurrent, RUNS[0])]
)
def test_models_of_other_kinds(build: Callable[[Any], nn.Module], run: Any) -> None:
    assert trained(build(run), 0) == trained(build(run), 2) == trained(build(run), None)


@pytest.mark.parametrize("weights", [0, 3])
def test_beside_other_ranks(weights: int) -> None:
    """Without DistributedDataParallel: gradients of copies leave in backward, those in p.grad do not."""
    with fake_ranks(2):
        assert trained(net(), weights) == trained(net(), None)


def two_forwards(order: str, model: Any, optimizer: DOSAdam) -> None:
    """No gradient counts as final too early: both forwards add to it."""
    for step in range(3):
        one, other = loss(model, 2 * step), loss(model, 2 * step + 1)
        for each in {"together": [one + other], "first": [one, other], "last": [other, one]}[order]:
            each.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation(model: Any, optimizer: DOSAdam) -> list[Tensor]:
    found = []
    for step in range(3):
        train(model, optimizer, 1, first=step)
        model.eval()
        with torch.no_grad():
            found.append(model(inputs(5, model)))
        with torch.inference_mode():
            found.append(model(inputs(6, model)).clone())
        model.train()
    return found


def writes_to_homes(model: Any, optimizer: DOSAdam) -> None:
    for step in range(3):
        train(model, optimizer, 1, first=step)
        optimizer.synchronize()
        with torch.no_grad():
            model.blocks[2].out.weight.mul_(0.5)
            model.blocks[3].bias.add_(1)


def writes_between_micro_batches(model: Any, optimizer: DOSAdam) -> None:
    """The home is fetched anew."""
    loss(model, 0).backward()
    with torch.no_grad():
        model.blocks[0].both.weight.mul_(0.5)
    loss(model, 1).backward()
    optimizer.step()


def memory_is_released(model: Any, optimizer: DOSAdam) -> None:
    for step in range(3):
        train(model, optimizer, 1, first=step)
        optimizer.release_memory()


LOOPS = [evaluation, writes_to_homes, writes_between_micro_batches, memory_is_released]
TWICE = [functools.partial(two_forwards, order) for order in ("together", "first", "last")]


@pytest.mark.parametrize(
    ("loop", "run", "weights"),
    [*itertools.product(LOOPS, RUNS[:1], (0, 3)), *crossed(TWICE, [(run, 0) for run in RUNS])],
)
def test_loops_of_other_kinds(loop: Callable[..., list[Tensor] | None], run: Any, weights: int) -> None:
    ends = []
    for each in (weights, None):
        model = net(run=run)
        optimizer = start(model, each, policy="adaptive" if weights else "cpu", profile=FAST)
        ends.append([*bits(loop(model, optimizer) or []), *everything(model, optimizer)])
    assert ends[0] == ends[1]


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


@pytest.mark.parametrize(
    ("policy", "dtype"), [("adaptive", torch.float32), (0.5, torch.bfloat16), ("cpu", torch.float16)]
)
def test_attached_again_with_another_number_of_blocks(policy: Any, dtype: torch.dtype) -> None:
    """By the same optimizer, and by one that takes its place. A block stays, moves, or has been home before."""
    model, other = net(dtype), net(dtype)
    optimizer, reference = start(model, 2, policy=policy), start(other, None, policy=policy)
    for step, weights in enumerate((3, 1, 2, 2, 1.0, 0, 3)):
        train(model, optimizer, 2, first=2 * step, micro_batches=1)
        train(other, reference, 2, first=2 * step, micro_batches=1)
        optimizer.attach(model, weights=weights)
    assert everything(model, optimizer) == everything(other, reference)
    state = optimizer.state_dict()
    del optimizer
    optimizer = start(model, 1, policy=policy)
    optimizer.load_state_dict(state)
    train(model, optimizer, 2, first=20)
    train(other, reference, 2, first=20)
    assert everything(model, optimizer) == everything(other, reference)


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
