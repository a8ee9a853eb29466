"""Hooks of user code on parameters whose weights stream, and gradients of such parameters beside their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.blocks import loss, net, start
from tests.support.training import bits

pytestmark = pytest.mark.usefixtures("one_core")
WEIGHTS: tuple[Any, ...] = (0, 3, 6, "auto")


@pytest.mark.parametrize("when", ["before", "after", "between forward and backward"])
def test_hooks_on_gradients_run_on_those_of_copies(when: str) -> None:
    """With the values of gradients of parameters that do not stream, also where weights stream in another way later."""

    def run(weights: Any, streams: bool = True) -> tuple[list[tuple[int, bytes]], list[bytes]]:
        model, seen = net(torch.float32), list[tuple[int, bytes]]()

        def register() -> list[Any]:
            def hook(number: int, gradient: Tensor) -> Tensor:
                seen.append((number, *bits([gradient])))
                return gradient.sign()

            chosen = enumerate(model.parameters())
            return [p.register_hook(lambda g, i=i: hook(i, g)) for i, p in chosen if i % 3 == 0]

        handles = register() if when == "before" else []
        optimizer = start(model, weights) if streams else DOSAdam(model.parameters(), lr=1e-2)
        handles += register() if when == "after" else []
        for step in range(3):
            result = loss(model, step)
            handles += register() if step == 1 and when.startswith("between") else []
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                for handle in handles:
                    handle.remove()
        return sorted(seen), bits(model.parameters())

    expected = run(None, streams=False)
    assert expected[0]
    for weights in WEIGHTS:
        assert run(weights) == expected, weights


def test_hooks_that_would_find_no_gradient_in_the_parameter_are_refused() -> None:
    def hook(parameter: Tensor) -> None:
        raise AssertionError("not called")

    model = net()
    chosen = next(model.blocks[2].parameters())
    handle = chosen.register_post_accumulate_grad_hook(hook)
    before = [(p.device, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"register_post_accumulate_grad_hook\(\), .* use parameter\.register_hook"):
        start(model, 0)
    assert before == [(p.device, p.data_ptr()) for p in model.parameters()], "nothing has changed"
    handle.remove()
    optimizer = start(model, 3)
    for block in (0, 1):  # one that streams, and one that stays
        handle = next(model.blocks[block].parameters()).register_post_accumulate_grad_hook(hook)
        with pytest.raises(ValueError, match=r"which would find no p\.grad"):
            loss(model, 0)
        handle.remove()
    loss(model, 0).backward()
    optimizer.step()


def test_hooks_that_count_parameters_are_refused() -> None:
    model = net()
    optimizer = start(model, 3)
    some, norms = [block.out.weight for block in model.blocks[:2]], list[Tensor]()
    handle = torch.autograd.graph.register_multi_grad_hook(some, lambda gradients: norms.append(torch.ones(())))
    with pytest.raises(ValueError, match=r"of a block has a hook of register_multi_grad_hook\(\), which counts"):
        loss(model, 0)
    handle.remove()
    torch.autograd.graph.register_multi_grad_hook(some, lambda gradient: norms.append(gradient.norm()), mode="any")
    loss(model, 0).backward()
    optimizer.step()
    assert len(norms) == 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_hooks_that_would_run_on_parts_of_a_gradient_are_refused(weights: Any) -> None:
    """Of parameters that are in the graph beside their copies: a hook that is not linear would give other values."""
    for each in (behind, before):
        model = net(torch.float32)
        optimizer = start(model, weights)
        handle = model.blocks[2].bias.register_hook(torch.sign)
        loss(model, 0).backward()
        alone(model, 1).backward()  # one part in a backward is all of it
        for found in (loss(model, 0), alone(model, 1)):
            torch.autograd.grad(found, list(model.parameters()))
        with pytest.raises(
            RuntimeError, match=r"of shape \(1, 16\) of a block has a hook of register_hook\(\), and the loss"
        ):
            each(model, 2).backward()
        with pytest.raises(
            RuntimeError, match=r"has run on each of two gradients and not on their sum; use optimizer.e"
        ):
            torch.autograd.grad(each(model, 3), list(model.parameters()))
        handle.remove()
        optimizer.zero_grad()
        each(model, 2).backward()
        optimizer.step()


def penalty(model: nn.Module) -> Tensor:
    return 1e-2 * sum(p.float().square().sum() for p in model.parameters())


def before(model: nn.Module, step: int) -> Tensor:
    """Made before the forward, so that backward comes to it last."""
    return penalty(model) + loss(model, step)


def behind(model: nn.Module, step: int) -> Tensor:
    return loss(model, step) + penalty(model)


def alone(model: nn.Module, step: int) -> Tensor:
    return penalty(model)


def unreached(model: nn.Module, step: int) -> Tensor:
    """The graph has the homes, and no gradient comes to them."""
    return loss(model, step) + _Nothing.apply(*model.parameters())


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("losses", [(behind, alone, loss), (loss, before, behind, unreached, alone, before)])
def test_parameters_in_the_graph_beside_their_copies(weights: Any, losses: Sequence[Callable[..., Tensor]]) -> None:
    """As a penalty on all weights, in some micro-batches: a backward's gradients add up before those of others."""
    ends = []
    for streams in (True, False):
        model = net(torch.float32)
        optimizer = start(model, weights) if streams else DOSAdam(model.parameters(), lr=1e-2)
        for step in range(2):
            for number, each in enumerate(losses):
                each(model, 10 * step + number).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]
