"""When blocks are fetched and released: a block that is used is there, and others take no memory and no transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dos import DOSAdam
from dos.weights.backward import BackwardHooks
from tests.support.blocks import RUNS, inputs, loss, net, recomputed, start, train
from tests.support.crossings import crossed
from tests.support.devices import Watched, synchronize_devices
from tests.support.inside import StoppedError, session_of
from tests.support.training import bits, everything
from tests.support.ways import Parts, Slope, Stack, twice_in_a_row, twice_within

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture
def optimizers() -> list[DOSAdam]:
    """Keeps optimizers until the test ends."""
    return []


def watched(model: nn.Module, optimizers: list[DOSAdam]) -> Watched:
    """The device of a model whose blocks stream, after two iterations, which has noted nothing yet."""
    device = Watched()
    optimizers.append(start(model, 0, device=device))
    train(model, optimizers[0], 2, micro_batches=1)
    optimizers[0].synchronize()
    device.most = 0
    device.fetched.clear()
    return device


def test_the_block_before_one_that_runs_twice_in_a_row_is_fetched_while_that_is_in_backward(
    optimizers: list[DOSAdam],
) -> None:
    model = Stack(Parts, twice_in_a_row)
    device = watched(model, optimizers)
    begun: dict[int, list[int]] = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda *found, number=number: (
                found[-1].register_hook(lambda _: begun.update({number: list(device.fetched)})) and None
            )
        )
    found = loss(model, 2)
    device.fetched.clear()
    found.backward()
    assert begun[2] == [1]  # the last two are there yet when backward begins
    assert begun[1] == [1, 0]


def recomputed_in_a_row(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(lambda y: block(block(y)), x, use_reentrant=False)


@pytest.mark.parametrize("run", [twice_in_a_row, twice_within(False), twice_within(True), recomputed_in_a_row])
def test_blocks_that_run_twice_are_released_as_others_are(run: Any, optimizers: list[DOSAdam]) -> None:
    model = Stack(Parts, run)
    device = watched(model, optimizers)
    train(model, optimizers[0], 1, first=2)
    assert device.most == 2


def test_backward_of_another_graph_keeps_the_blocks_that_the_last_forward_has_left(optimizers: list[DOSAdam]) -> None:
    model = net()
    device = watched(model, optimizers)
    found = loss(model, 2)
    model.blocks[0](torch.ones(8, 16, dtype=torch.bfloat16)).sum().backward()
    device.fetched.clear()
    found.backward()
    assert device.fetched == [3, 2, 1]


def test_a_backward_that_raised_keeps_no_block_in_the_next_one(optimizers: list[DOSAdam]) -> None:
    """Of a graph that was there before, so that no forward comes between. Blocks were recomputed, and wait."""
    model = net(run=recomputed)
    device = watched(model, optimizers)
    fails = [True]

    def fail(*_: object) -> None:
        if fails:
            fails.clear()
            raise StoppedError

    model.blocks[3].out.register_full_backward_pre_hook(fail)
    one, other = loss(model, 2), loss(model, 3)
    with pytest.raises(StoppedError):
        one.backward()
    device.most = 0
    other.backward()
    assert device.most == 3  # with one that was fetched ahead


class Again(torch.autograd.Function):
    """Runs a block again in backward, on the leaf itself if its input is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.x, ctx.block = x, block
        with torch.no_grad():
            found: Tensor = block(x)
        return found

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.x if ctx.x.is_leaf else ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, slopes[0])
        return None if ctx.x.is_leaf else x.grad, None


def again(block: nn.Module, x: Tensor) -> Any:
    return Again.apply(x, block)


@pytest.mark.parametrize("run", [RUNS[0], RUNS[1], recomputed, again])
def test_inputs_that_user_code_keeps_get_no_hooks_for_good(run: Callable[..., Any]) -> None:
    """Such as a prompt that is trained: one hook for each iteration would run in each."""

    for prompt in (nn.Parameter(torch.ones(8, 16)), torch.ones(8, 16, requires_grad=True)):
        ends = []
        for weights in (0, None):
            model = Stack(Parts, run)
            model.first = nn.Identity()
            optimizer, prompt.grad = start(model, weights), None
            for _ in range(3):
                found = model(prompt).square().mean()
                assert not prompt._backward_hooks
                found.backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([*everything(model, optimizer), *bits([prompt.grad])])
            assert not prompt._backward_hooks
        assert ends[0] == ends[1]


def test_a_backward_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks it uses."""
    model, ended, ends = net(run=recomputed), list[int](), BackwardHooks._end
    optimizer = start(model, 0)

    def end(hooks: BackwardHooks, number: int) -> None:
        ended.append(number)
        ends(hooks, number)

    monkeypatch.setattr(BackwardHooks, "_end", end)
    for step in range(2):
        loss(model, step).backward()
    optimizer.step()
    assert len(ended) == len(set(ended)) == 2


@pytest.mark.parametrize(("use_reentrant", "again"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2, 3, 4, 5])])
def test_a_model_that_is_recomputed_with_what_is_around_it(use_reentrant: bool, again: list[int]) -> None:
    """Its forward in backward makes no micro-batch of its own, and releases no block.

    Both first blocks are there when the second micro-batch begins, and both last ones when its backward does, unless
    its forward made no graph.
    """
    model, device = net(), Watched()
    optimizer = start(model, 0, device=device)
    for step in range(2):
        for number in range(2):
            device.fetched.clear()
            x = inputs(2 * step + number, model).requires_grad_()
            found = checkpoint(lambda x: model(x.sin()).cos(), x, use_reentrant=use_reentrant)
            found.float().sum().backward()
        assert device.fetched == [2, 3, 4, 5, *again]
        optimizer.step()
        optimizer.zero_grad()
    assert session_of(optimizer).assembly.on_device.facts().workload.micro_batches == 2


def test_what_a_block_returns_in_a_recomputation_gets_no_hook() -> None:
    """The block is there, and backward comes to it next."""
    model, seen = net(run=RUNS[1]), list[bool]()
    optimizer = start(model, 0)
    model.blocks[2].register_forward_hook(lambda *found: seen.append(bool(found[-1]._backward_hooks)))
    loss(model, 0).backward()
    assert seen == [False, False]
    model.run = RUNS[0]
    loss(model, 1).backward()
    assert seen[2:] == [True]
    optimizer.step()


def test_saved_weights_that_user_code_reads_outside_of_backward() -> None:
    model = Stack(Parts)
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    outputs: list[Tensor] = []
    model.blocks[1].one.register_forward_hook(lambda *found: outputs.append(found[-1]))
    result = loss(model, 1)
    expected = model.blocks[1].one.weight.detach().clone()
    assert torch.equal(outputs[0].grad_fn._saved_mat2, expected.t())
    result.backward()
    optimizer.step()


class Method(nn.Module):
    """Its own forward is never called, as that of a LightningModule; its parts are called by methods."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack(Parts)
        self.blocks = self.net.blocks

    def encode(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def perturb(model: nn.Module, references: list[Tensor], by: float) -> None:
    """Write to the weights through references that user code has kept, which no hook sees."""
    synchronize_devices()  # such a write waits for nothing
    with torch.no_grad():
        for p in references:
            p.add_(p.sign(), alpha=by)


def swap(model: nn.Module, references: list[Tensor], by: float) -> None:
    """As averages do, which no version counts."""
    synchronize_devices()
    for p in references:
        p.data.mul_(1 + by)


@pytest.mark.parametrize(("write", "weights"), crossed([perturb, swap], [0, 1, 2, "auto"]))
def test_weights_that_are_written_between_calls_of_a_method(write: Callable[..., None], weights: Any) -> None:
    """Copies that one call, or its backward, has left are not what the next one uses."""

    def end(weights: Any) -> list[bytes]:
        model, seen = Method(), list[Tensor]()
        optimizer, references = start(model, weights), list(model.parameters())
        for step in range(3):
            for by in (0.01, -0.01):
                found = model.encode(inputs(step, model)).square().mean()
                seen.append(found.detach())
                if write is perturb:
                    found.backward()
                write(model, references, by)
            with torch.no_grad():
                seen.append(model.encode(inputs(step, model)))
            perturb(model, references, 0.05)
            seen.append(model.blocks[1](model.blocks[0](torch.ones(3, 16))))
            perturb(model, references, -0.05)  # the next block was fetched ahead
            seen.append(model.blocks[3](model.blocks[2](torch.ones(3, 16))))
            if write is perturb:
                optimizer.step()
                optimizer.zero_grad()
        return [*bits(seen), *bits(model.parameters())]

    assert end(weights) == end(None)


def test_weights_that_are_written_after_blocks_have_run_by_themselves() -> None:
    """Of which no hook tells that they have ended."""

    def end(weights: Any) -> list[bytes]:
        model, seen = Stack(Parts), list[Tensor]()
        optimizer, references = start(model, weights), list(model.parameters())
        train(model, optimizer, 1)
        optimizer.synchronize()
        for _ in range(2):
            x = model.first(inputs(0, model))
            for block in model.blocks:
                x = block(x)
            seen.append(x.detach())
            swap(model, references, 0.1)
        return bits(seen)

    assert end(2) == end(0) == end(None)


def test_weights_that_are_written_after_a_forward_that_ran_a_backward() -> None:
    """Which is not the one of that forward: both blocks are there yet, and not what the next forward uses."""

    def end(weights: Any) -> list[bytes]:
        model, seen = Stack(Slope), list[Tensor]()
        model.blocks = model.blocks[:2]
        optimizer, references = start(model, weights), list(model.parameters())
        for step in range(2):
            seen.append(loss(model, step).detach())
            swap(model, references, 0.1)
        optimizer.synchronize()
        return bits(seen)

    assert end(0) == end(None)


def test_a_forward_within_another_leaves_the_order_of_blocks_as_it_is() -> None:
    """As where a handler of a signal evaluates the model."""
    model, device = net(), Watched()
    optimizer = start(model, 0, device=device)

    def evaluate(*_: object) -> None:
        handle.remove()
        with torch.no_grad():
            model(inputs(9, model))

    handle = model.blocks[2].register_forward_hook(evaluate)
    train(model, optimizer, 2, micro_batches=1)
    device.fetched.clear()
    train(model, optimizer, 1, micro_batches=1)
    assert device.fetched == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]
    device.fetched.clear()
    with torch.no_grad():
        model(inputs(9, model))
    assert device.fetched == [0, 1, 2, 3, 4, 5]


def test_a_method_fetches_blocks_ahead_in_each_call_and_none_in_vain() -> None:
    model, device = Method(), Watched()
    optimizer = start(model, 0, device=device)
    for step in range(3):
        device.fetched.clear()
        model.encode(inputs(step, model)).square().mean().backward()
        assert device.fetched[-6:] == [0, 1, 2, 3, 1, 0]
        assert device.most == 2
        optimizer.step()
        optimizer.zero_grad()
    for step in range(3):
        with torch.no_grad():
            device.fetched.clear()
            model.encode(inputs(step, model))
        assert device.fetched == [0, 1, 2, 3]
        assert not device.filled  # no backward needs the last window


def test_a_transfer_that_begins_while_another_one_is_waited_for_is_waited_for_next() -> None:
    """Backward's thread may fetch the block again, before user code writes to its home."""
    model = net(torch.float32)
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    homes = session_of(optimizer).assembly.weights
    assert homes is not None
    block, waited = homes.stream.blocks[0], list[str]()

    class Transfer:
        def __init__(self, name: str, successor: Any = None) -> None:
            self.name, self.successor = name, successor

        def wait(self) -> None:
            waited.append(self.name)
            block._reading = self.successor or block._reading

    block._reading = Transfer("first", Transfer("second"))
    for _ in range(3):
        block.finish_reading()
    assert waited == ["first", "second"]
