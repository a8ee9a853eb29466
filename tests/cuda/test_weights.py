"""On a GPU: weights that stream between host and device, with copies and compute that really run at once."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices.cuda import CudaDevice
from perfmodel import Op, Placement
from perfmodel.hardware import HardwareProfile
from tests.support import ROOT
from tests.support.blocks import RUNS
from tests.support.gpu import DEVICE, NEEDS_GPU, SHRINK, SIMULATED, free_memory, late
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import InTurn
from tests.support.scales import StoppedError, stop
from tests.support.training import bits
from tests.support.ways import WAYS, Parts, Recurrent, Stack, compiled

pytestmark = NEEDS_GPU

NUMEL = 600_000 // SHRINK
"""Of a block's larger weight: more than what is copied together with its neighbours."""
BLOCKS = 6
POLICIES: tuple[Any, ...] = ("cpu", "stride:1", 0.5, "adaptive")
NOT_SIMULATED = (Recurrent, compiled)
"""Blocks whose operations the simulated accelerator does not have."""


class Wave(nn.Module):
    """As much weight to move for as little computation as possible; backward needs all of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(NUMEL, generator=generator).bfloat16())
        self.small = nn.Parameter(torch.randn(1000 + seed, generator=generator).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.weight * x) + (self.small * self.small).mean()


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


def start(
    weights: Any, policy: Any = "cpu", run: Any = RUNS[0], updates: str = "step", **options: Any
) -> tuple[Waves, DOSAdam]:
    """A model built on the host, and its optimizer. weights: None: all are on the device."""
    model = Waves(run) if weights is not None else Waves(run).to(DEVICE)
    options = {"lr": 1e-2, "policy": policy, "subgroup_size": 500_000 // SHRINK, "profile": "h100", **options}
    optimizer = DOSAdam(model.parameters(), device=DEVICE, offload_gradients=True, **options)
    optimizer.attach(model, weights=weights, updates=updates)
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


def added_up(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Of two micro-batches each, of which the last one updates where backward does."""
    for step in range(5):
        with optimizer.no_update():
            model(batch(100 * step + 1)).backward()
        iteration(model, optimizer, step)
    return []


@pytest.mark.parametrize("policy", [*POLICIES, "resident"])
@pytest.mark.parametrize("run", RUNS)
def test_updates_in_backward(policy: Any, run: Any) -> None:
    expected = trained(added_up, None)
    for weights in (0, 2, 1.0):
        assert trained(added_up, weights, policy, run, updates="backward") == expected


def edited(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """With gradients that user code sets, of weights that the loss uses beside their block, with hooks and edits."""
    for parameter in list(model.parameters())[::3]:
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda gradient: gradient.sign())
    for step in range(3):
        model(batch(step)).backward()
        sum(1e-2 * p.float().square().sum().to(DEVICE) for p in model.parameters()).backward()
        optimizer.edit_gradients(lambda _, gradient: gradient.clamp_(-1e-3, 1e-3))
        optimizer.step()
        (optimizer if step else model).zero_grad()
    return []


@pytest.mark.parametrize("weights", [0, 3])
def test_gradients_that_user_code_sets_and_edits(weights: int) -> None:
    assert trained(edited, weights) == trained(edited, None)


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
        model(batch(step)).backward()
        for op in (Op.FLUSH, Op.PARAMETER):
            late(op, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if model.blocks[0].weight.device.type != "cpu":
            optimizer.synchronize()
        if step % 2:
            found += on_host(model.state_dict().values())
        else:
            found += on_host([*(block.weight for block in model.blocks), model.last])
    return found


def with_weights_written_after_each_forward(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """As an average of weights, or a checkpoint that is loaded, whose forward the device has yet to run."""
    found = []
    for step in range(3):
        for write in (through_module, through_references):
            references = [*model.parameters()]
            optimizer.synchronize()
            with torch.no_grad():
                late(Op.WEIGHTS)
                found.append(model(batch(50 + step)))
            write(model, optimizer, references)
        iteration(model, optimizer, step)
    return found


def with_blocks_called_by_themselves(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """Each lets the next one be fetched, before what the step and user code write to that."""
    found, x = [], batch(9)
    for step in range(3):
        model(batch(step)).backward()
        with torch.no_grad():
            found.append(model.blocks[1](x))
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.blocks[0](x))
            optimizer.synchronize()
            found.append(model.blocks[1](x))
            model.blocks[0].weight.mul_(0.5)
            found.append(model.blocks[0](x))
    return found


def with_backwards_that_raise(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
    """What they have fetched is older than what user code writes then."""
    found = []
    for step in range(3):
        handle = model.blocks[1].register_forward_hook(lambda block, args, output: output.register_hook(stop) and None)
        with pytest.raises(StoppedError):
            model(batch(step)).backward()
        handle.remove()
        optimizer.zero_grad()
        optimizer.synchronize()
        through_module(model, optimizer, [])
        with torch.no_grad():
            found.append(model(batch(50 + step)))
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
    with_blocks_called_by_themselves,
    with_backwards_that_raise,
    on_several_streams,
    with_a_forward_on_a_side_stream,
)


@pytest.mark.parametrize("policy", ["cpu", "stride:1"])
@pytest.mark.parametrize("train", OTHERS)
def test_what_else_users_do(train: Training, policy: Any) -> None:
    assert_as_on_device(train, 0, policy)


def assert_as_attached_again(
    make: Callable[[], nn.Module], steps: int, backward: Callable[[nn.Module, Tensor], None]
) -> None:
    """Some blocks stay and then none, or the plan says and then all: attached again after each step.

    By policies that look for no plan, which takes most of the time where each step attaches again.
    """

    def end(weights: Any, again: Any = None, policy: str = "cpu") -> list[bytes]:
        model = make() if weights is not None else make().to(DEVICE)
        options = {"lr": 1e-2, "policy": policy, "subgroup_size": 400}
        optimizer = DOSAdam(model.parameters(), device=DEVICE, offload_gradients=True, **options)
        optimizer.attach(model, weights=weights)
        for step in range(steps):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            backward(model, x.to(DEVICE))
            optimizer.step()
            optimizer.zero_grad()
            if again is not None:
                optimizer.attach(model, weights=again)
        optimizer.synchronize()
        return bits(on_host(model.parameters()))

    assert end(1, again=0, policy="stride:1") == end("auto", again=1.0) == end(None)


@pytest.mark.parametrize(("kind", "run"), [way for way in WAYS if way[0] not in NOT_SIMULATED or not SIMULATED])
def test_a_weight_is_reached_in_any_way(kind: Callable[[], nn.Module], run: Any) -> None:
    assert_as_attached_again(lambda: Stack(kind, run), 2, lambda model, x: backward(alone(model, x), []))


def alone(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def with_a_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """On all weights. Autograd computes gradients of homes in another thread than those of copies."""
    return alone(model, x) + 1e-2 * sum(p.square().sum().to(DEVICE) for p in model.parameters())


def by_functional_call(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()


def backward(result: Tensor, parameters: list[Tensor]) -> None:
    result.backward()


def backward_of_inputs(result: Tensor, parameters: list[Tensor]) -> None:
    result.backward(inputs=parameters)


def gradients(result: Tensor, parameters: list[Tensor]) -> None:
    for p, gradient in zip(parameters, torch.autograd.grad(result, parameters), strict=True):
        p.grad = gradient


@pytest.mark.parametrize("way", [backward, backward_of_inputs, gradients])
@pytest.mark.parametrize("loss", [alone, with_a_penalty, by_functional_call])
def test_gradients_are_asked_for_in_any_way(
    loss: Callable[[nn.Module, Tensor], Tensor], way: Callable[[Tensor, list[Tensor]], None]
) -> None:
    def train(model: nn.Module, x: Tensor) -> None:
        late(Op.GRADIENT, 0.01)
        way(loss(model, x), list(model.parameters()))

    assert_as_attached_again(lambda: Stack(Parts), 3, train)


def on_two_streams(block: nn.Module, x: Tensor) -> Tensor:
    """What runs there has waited for the block's input alone."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    late(Op.WEIGHTS, 0.02)
    side.wait_stream(current)
    x.record_stream(side)
    here = block(x)
    with torch.cuda.stream(side):
        there = block(x)
    current.wait_stream(side)
    there.record_stream(current)
    return here + there


def test_what_user_code_writes_to_homes_counts_where_state_moves_home() -> None:
    def train(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
        for step in range(4):
            iteration(model, optimizer, step)
            optimizer.synchronize()
            with torch.no_grad():
                for block in model.blocks:
                    block.weight.mul_(0.5)
        return []

    plans = InTurn(*[Placement.GPU_RESIDENT] * 3, Placement.CPU)
    assert trained(train, 0, plans, state_format="float32") == trained(train, None, state_format="float32")


@pytest.mark.parametrize("policy", ["cpu", "stride:1"])
def test_a_block_is_used_on_two_streams_at_once(policy: str) -> None:
    assert_as_on_device(steps, 0, policy, on_two_streams)


def who_gets_memory_next() -> list[Tensor]:
    """What takes all memory that was just given back by blocks: ones, as long as nothing else writes there."""
    return [torch.ones(2 * NUMEL + 2500, dtype=torch.uint8, device=DEVICE) for _ in range(40)]


@pytest.mark.parametrize("beside", [False, True])
def test_a_block_that_was_fetched_in_vain_is_freed_behind_its_copy(beside: bool) -> None:
    """Whoever gets the memory next, the copy does not write there. beside: forward runs on another stream."""
    model, optimizer = start(0)
    iteration(model, optimizer)
    model.blocks[1].register_forward_pre_hook(stop)  # the third is on its way then
    x, found = batch(0), []
    stream = torch.cuda.Stream() if beside else torch.cuda.current_stream()
    for _ in range(5):
        optimizer.synchronize()
        stream.wait_stream(torch.cuda.current_stream())
        late(Op.WEIGHTS)
        with torch.cuda.stream(stream), torch.no_grad(), pytest.raises(StoppedError):
            model(x)
        found += who_gets_memory_next()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in found)


def test_a_model_goes_while_a_block_that_nothing_waits_for_is_fetched() -> None:
    """As where backward raises, and the notebook's cell runs again."""
    x, found = batch(0), []
    for _ in range(5):
        model, optimizer = start(0)
        iteration(model, optimizer)
        optimizer.synchronize()
        late(Op.WEIGHTS)
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # or what follows would wait for another block
            model.blocks[1](x)
        del model, optimizer
        found += who_gets_memory_next()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in found)


def test_where_weights_are_and_gradients() -> None:
    model, optimizer = start(0, "stride:1")
    inside = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: inside.append({p.device.type for p in block.parameters()}))
    homes = [*model.blocks.parameters()]
    for step in range(2):
        model(batch(step)).backward()
        assert all(p.device.type == "cpu" and p.is_pinned() and p.grad is None for p in homes)
        assert model.last.device.type == DEVICE
        assert [*map(id, model.blocks.parameters())] == [*map(id, homes)]
        optimizer.step()
    weights = session_of(optimizer).assembly.weights
    assert all(copy.grad is None for copy in weights.stream.all_copies())
    assert inside == [{DEVICE}] * 2 * BLOCKS


def test_homes_are_copied_as_a_whole() -> None:
    """A driver refuses copies across borders of what was pinned, such as those of subgroups of whole pages."""
    model, optimizer = start(0, subgroup_size=1 << 14)
    steps(model, optimizer, 2)
    there = {name: p.to(DEVICE) for name, p in model.named_parameters()}
    assert bits(on_host(there.values())) == bits(on_host(model.parameters()))
    model.load_state_dict(there)


def test_device_memory_of_weights_is_given_back() -> None:
    free_memory()
    at_first = torch.cuda.memory_allocated()
    model, optimizer = start(0)
    iteration(model, optimizer)
    optimizer.synchronize()
    x, inside = batch(1), list[int]()
    before = torch.cuda.memory_allocated()
    handles = [
        block.register_forward_pre_hook(lambda *_: inside.append(torch.cuda.memory_allocated()))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(x)
    assert torch.cuda.memory_allocated() == before
    a_block = 2 * NUMEL
    assert all(2 * a_block < nbytes - before < 5 * a_block for nbytes in inside[:-1]), (
        "two blocks, and what is computed"
    )
    assert inside[-1] < inside[0], "there is no next one"
    for handle in handles:
        handle.remove()
    del model, optimizer, x
    free_memory()
    assert torch.cuda.memory_allocated() == at_first


@pytest.mark.parametrize("seed", range(3))
def test_state_gives_way_to_a_block_for_which_there_is_no_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then, to blocks that are needed and to those that come ahead."""
    expected = trained(steps, None)
    refill, random, denied = CudaDevice.refill, Random(seed), [True]

    def deny(device: CudaDevice, buffer: Tensor) -> None:
        denied.append(not denied[-1] and random.random() < 0.4)
        if denied[-1]:
            raise torch.OutOfMemoryError("for a test")
        refill(device, buffer)

    monkeypatch.setattr(CudaDevice, "refill", deny)
    assert trained(steps, 0, "adaptive") == expected
    assert sum(denied) > 3


def test_blocks_move_between_steps_as_memory_changes() -> None:
    weights = 2 * NUMEL * BLOCKS
    rates = ("h2d_bandwidth", "h2d_bandwidth_duplex", "d2h_bandwidth", "d2h_bandwidth_duplex")
    slow = HardwareProfile.builtin("h100").replace(**dict.fromkeys(rates, 1e6))
    budget, staying = 0, list[int]()

    def train(model: Waves, optimizer: DOSAdam) -> list[Tensor]:
        nonlocal budget
        for step in range(15):
            budget = weights // 2 if 5 <= step < 10 else 9 * weights
            model(batch(step)).backward()
            late(Op.WEIGHTS)  # of blocks that come to stay
            optimizer.step()
            optimizer.zero_grad()
            plan = optimizer.plan()
            staying.append(0 if plan is None else len(plan.blocks_on_device))
        return []

    expected = trained(train, None)
    staying.clear()
    assert trained(train, "auto", "adaptive", profile=slow, memory_budget=lambda: budget) == expected
    assert staying[4] > staying[9] < staying[14], staying


@pytest.mark.parametrize("policy", ["cpu", "stride:1"])
@pytest.mark.parametrize("ends", ["forward", "backward", "step"])
def test_an_optimizer_goes_while_weights_travel(ends: str, policy: str) -> None:
    def evaluated(weights: Any) -> list[bytes]:
        model, optimizer = start(weights, policy)
        iteration(model, optimizer)
        for op in (Op.WEIGHTS, Op.FLUSH, Op.GRADIENT):
            late(op)
        loss = model(batch(1))
        if ends != "forward":
            loss.backward()
        if ends == "step":
            optimizer.step()
        if weights is None:
            optimizer.synchronize()
        del optimizer, loss
        gc.collect()
        with torch.no_grad():
            late(Op.WEIGHTS)
            found = model(batch(2))
        del model
        gc.collect()
        return bits([found.cpu()])

    assert evaluated(0) == evaluated(None)


ENDS = """
import atexit, gc, multiprocessing, sys, time
atexit.register(time.sleep, 0.5)  # after all that dos and torch do then
if {simulated}:
    from tests.simdev import plugin
from tests.cuda.test_weights import Op, batch, iteration, late, start, torch
model, optimizer = start(0)
iteration(model, optimizer)
late(Op.WEIGHTS, 0.3)
with torch.no_grad():
    found = model(batch(1))
if {forks}:
    # Until the device's clock is older than a second: a child that ends must not start another, for it has no streams.
    child = multiprocessing.get_context("fork").Process(target=lambda: (gc.collect(), time.sleep(1.1)))
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
    late(Op.WEIGHTS, 0.3)
    with torch.no_grad():
        assert torch.equal(model(batch(1)), found)
    iteration(model, optimizer, 1)
late(Op.WEIGHTS, 0.3)
found = model(batch(1))
if {keeps}:
    sys.modules["kept"] = model, optimizer
print("ended")
"""


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_process_forks_and_ends_while_weights_travel(forks: bool, keeps: bool) -> None:
    code = ENDS.format(simulated=SIMULATED, forks=forks, keeps=keeps)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert "FAULT" not in done.stderr
