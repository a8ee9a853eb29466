"""Weights that are read in the graph beside their block, crossed with what streams, attached once or again.

Against the bits of a model that stays, in each format, and against torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import inputs, loss, start
from tests.support.crossings import crossed
from tests.support.inside import session_of
from tests.support.training import assert_close_ulp, bits, everything
from tests.support.ways import Parts, Stack

pytestmark = pytest.mark.usefixtures("one_core")


def penalty(model: nn.Module, step: int) -> None:
    """On all weights, in all micro-batches but one."""
    for number in range(3):
        found = loss(model, 3 * step + number)
        if number != 1:
            found = found + 1e-2 * sum(p.float().square().sum() for p in model.parameters())
        found.backward()


def hook(model: Any, step: int) -> None:
    """Of user code on blocks, added after attach(): the block has run, and its modules have homes."""

    def add(block: Any, _: object, output: Tensor) -> Tensor:
        return output * block.one.weight.square().mean() + block.norm.bias

    handles = [block.register_forward_hook(add) for block in model.blocks]
    for number in range(2):
        loss(model, 3 * step + number).backward()
    for handle in handles:
        handle.remove()


def auxiliary(model: Any, step: int) -> None:
    """Made before the forward: backward comes to it last."""
    for number in range(2):
        beside = sum((block.one.weight.float() @ block.other.weight.float().t()).sin().mean() for block in model.blocks)
        (beside + loss(model, 3 * step + number)).backward()


def returned(model: Any, step: int) -> None:
    """By torch.autograd.grad, for all parameters, and set as p.grad by user code."""
    parameters = list(model.parameters())
    found = loss(model, step) + 1e-2 * sum(p.float().square().sum() for p in parameters)
    for p, gradient in zip(parameters, torch.autograd.grad(found, parameters), strict=True):
        p.grad = gradient


def doubled(model: Any, step: int) -> None:
    """A penalty on gradients of inputs."""
    x = inputs(step, model).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    (slope.float().square().sum() + loss(model, step)).backward()


WAYS: list[Callable[[Any, int], None]] = [penalty, hook, auxiliary, returned, doubled]


def end(way: Callable[[Any, int], None], weights: Any, again: Any, dtype: torch.dtype, **options: Any) -> list[bytes]:
    model = Stack(Parts).to(dtype)
    optimizer = start(model, weights, policy="adaptive", **options)
    for step in range(2):
        homes = session_of(optimizer).assembly.weights
        if way is doubled and homes is not None and any(block.streams for block in homes.stream.blocks):
            with pytest.raises(RuntimeError, match="create_graph=True reached a block whose weights stream"):
                way(model, step)
            optimizer.zero_grad()
            optimizer.attach(model, weights=1.0)  # as the message says
        way(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if again is not None:
            optimizer.attach(model, weights=again)
    return everything(model, optimizer)


FORMATS = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.bfloat16, "float32")]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("way", "dtype", "state_format"), crossed(WAYS, FORMATS, every=4))
def test_a_weight_beside_its_block_has_the_gradient_of_one_that_stays(
    way: Callable[[Any, int], None], dtype: torch.dtype, state_format: str | None, turn: int
) -> None:
    """turn: how many blocks stay at first, and once attached again."""
    options = {"dtype": dtype, "state_format": state_format}
    expected = end(way, None, None, **options)
    streams, stays = ((0, 2), ("auto", "auto")), ((2, 1.0), (1.0, 0))
    number = (turn + (dtype is torch.bfloat16)) % 2
    for weights, again in (streams[number], stays[number]):
        assert end(way, weights, again, **options) == expected, (weights, again)


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_adamw(way: Callable[[Any, int], None]) -> None:
    model, other = Stack(Parts), Stack(Parts)
    optimizer = start(model, 1.0 if way is doubled else 0, policy="adaptive")
    reference = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for step in range(2):
        for each, its in ((model, optimizer), (other, reference)):
            way(each, step)
            its.step()
            its.zero_grad()
    optimizer.synchronize()
    assert bits([model.first.weight]) != bits([Stack(Parts).first.weight])
    assert_close_ulp(model.parameters(), other.parameters(), 256)


class Twice(Parts):
    """Uses a weight twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.one(self.one(x)))


def square(model: Any) -> Tensor:
    return sum(1e-2 * block.one.weight.float().square().sum() for block in model.blocks)


def elastic(model: Any) -> Tensor:
    return sum(1e-2 * block.one.weight.float().abs().sum() for block in model.blocks) + square(model)


def behind(penalty: Callable[[Any], Tensor], model: Any, step: int) -> Tensor:
    return loss(model, step) + penalty(model)


def before(penalty: Callable[[Any], Tensor], model: Any, step: int) -> Tensor:
    return penalty(model) + loss(model, step)


def around(penalty: Callable[[Any], Tensor], model: Any, step: int) -> Tensor:
    return penalty(model) + loss(model, step) + penalty(model)


SUMS: list[tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[Any], Tensor], bool]] = [
    (Parts, behind, elastic, True),
    (Parts, before, elastic, False),
    (Parts, around, square, False),
    (Twice, behind, square, False),
    (Twice, before, square, True),
    (Twice, before, elastic, False),
]


def by_backward(model: Any, result: Tensor) -> None:
    result.backward()


def by_grad(model: Any, result: Tensor) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(parameters, torch.autograd.grad(result, parameters, allow_unused=True), strict=True):
        p.grad = gradient


@pytest.mark.parametrize(("kind", "place", "penalty", "works", "way"), crossed(SUMS, [by_backward, by_grad]))
def test_sums_of_three_gradients_have_the_order_of_autograd_or_are_refused(
    kind: Callable[[], nn.Module],
    place: Callable[..., Tensor],
    penalty: Callable[[Any], Tensor],
    works: bool,
    way: Callable[[Any, Tensor], None],
) -> None:
    """The message names the weight and the way, which works."""
    ends = []
    for weights in (None, 0, 2, 1.0):
        model = Stack(kind)
        optimizer = start(model, weights)
        refused = weights is not None and not works
        for step in range(2):
            if refused:
                with pytest.raises(RuntimeError, match=r"uses blocks.\d.one.weight, of shape \(16, 16\), beside its"):
                    way(model, place(penalty, model, step))
                optimizer.zero_grad()
            if works:
                way(model, place(penalty, model, step))
            else:
                loss(model, step).backward()
                penalty(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(everything(model, optimizer))
    assert ends[1:] == ends[:1] * 3


def test_three_gradients_would_have_other_bits() -> None:
    """Where they are refused."""
    x = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert not torch.equal((x[0] + x[1]) + x[2], x[0] + (x[1] + x[2]))
