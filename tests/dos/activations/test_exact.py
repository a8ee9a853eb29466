"""Saved tensors that leave and come back change no bit, in any way of using autograd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from perfmodel import Op
from tests.support.activations import Net, later, optimizer_of, saved, transfers
from tests.support.devices import Copying
from tests.support.inside import offload_of
from tests.support.training import bits, train

SHARES = [1.0, 0.5, 0.0, 20_000]


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x).float()


def with_evaluation_inside(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block(x).abs().mean()
    return block(x) * scale


def through_functional_call(block: nn.Module, x: Tensor) -> Tensor:
    return functional_call(block, {name: 2 * p for name, p in block.named_parameters()}, (x,))


@pytest.mark.parametrize(
    ("run", "activations"),
    [
        *((None, share) for share in SHARES),
        *((run, 1.0) for run in (reentrant, not_reentrant, autocast, with_evaluation_inside, through_functional_call)),
    ],
)
def test_training_is_the_same_to_the_bit(run: Any, activations: Any) -> None:
    def trained(activations: Any) -> tuple[list[bytes], int]:
        model = Net()
        if run is not None:
            model.run = run
        optimizer = optimizer_of(model, activations)
        losses = train(model, optimizer, 3)
        optimizer.synchronize()
        return bits([torch.tensor(losses), *model.parameters()]), saved(optimizer)

    found, left = trained(activations)
    assert found == trained(None)[0]
    assert (left > 0) == (activations != 0.0)


@pytest.mark.parametrize("run", [reentrant, not_reentrant])
def test_with_checkpointing_inputs_of_blocks_alone_leave_and_blocks_are_computed_again(run: Any) -> None:
    model, computed = Net(), [0]
    model.run = run
    optimizer = optimizer_of(model, 1.0)
    for block in model.blocks:
        block.both.register_forward_hook(lambda *_: computed.__setitem__(0, computed[0] + 1))
    x = torch.randn(8, 24, requires_grad=True)
    loss = model(x).square().mean()
    left = transfers(optimizer)
    assert left == [x.nbytes, *(len(model.blocks) + 1) * [8 * 16 * 4]], "what the first, the blocks and the last take"
    loss.backward()
    assert computed[0] == 2 * len(model.blocks)
    assert saved(optimizer) == sum(left), "nothing leaves that is computed again"


def gradients(activations: Any, way: Callable[[Callable[[Tensor], Tensor], Tensor, Net], list[Tensor]]) -> list[bytes]:
    """What a way of using autograd gives."""
    model = Net()
    optimizer = optimizer_of(model)
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        if activations is None:
            return model(x)
        with optimizer.offload_activations(activations):
            return model(x)

    found = bits(way(forward, x, model))
    assert (saved(optimizer) > 0) == (activations is not None)
    return found


def retain_graph(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    loss = forward(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward(retain_graph=True)
    loss.backward()
    return once + [p.grad for p in model.parameters()]


def in_two_parts(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    found = forward(x)
    one = torch.autograd.grad(found[0].sum(), list(model.parameters()), retain_graph=True)
    return [*one, *torch.autograd.grad(found[1].sum(), list(model.parameters()))]


def double_backward(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    (slope,) = torch.autograd.grad(forward(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def two_forwards(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    (forward(x) * forward(2 * x)).mean().backward()
    return [p.grad for p in model.parameters()]


def backwards_in_other_order(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    first, second = forward(x).mean(), forward(2 * x).square().mean()
    first.backward()
    second.backward()
    return [p.grad for p in model.parameters()]


def a_forward_that_is_dropped(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    dropped = forward(3 * x)
    kept = forward(x)
    del dropped
    forward(2 * x)
    kept.mean().backward()
    return [p.grad for p in model.parameters()]


def without_graph_inside(forward: Any, x: Tensor, model: Net) -> list[Tensor]:
    with torch.no_grad():
        target = forward(x)
    with torch.inference_mode():
        forward(x)
    (forward(x) - target - 1).square().mean().backward()
    return [p.grad for p in model.parameters()]


WAYS = [
    retain_graph,
    in_two_parts,
    double_backward,
    two_forwards,
    backwards_in_other_order,
    a_forward_that_is_dropped,
    without_graph_inside,
]


@pytest.mark.parametrize("activations", [1.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_using_autograd_gives_the_same_bits(way: Any, activations: Any) -> None:
    assert gradients(activations, way) == gradients(None, way)


class Remembers(torch.autograd.Function):
    """Saves what it is given, and gives it in backward to its readers."""

    found: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        Remembers.found[:] = ctx.saved_tensors
        return gradients[0], *(None for _ in ctx.saved_tensors)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[3:30],
    lambda x: x[:, 5:9],
    lambda x: x[::2, ::3],
    lambda x: x.expand(3, *x.shape),
    lambda x: x[0].expand(50, -1),
    lambda x: x.unfold(0, 8, 4),
    lambda x: x.view(-1).view(torch.int32)[7:],
    lambda x: x.contiguous(memory_format=torch.preserve_format).permute(1, 0)[:, None],
    lambda x: x[1, 1],
    lambda x: x[:0],
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_tensors_of_any_layout_come_back_in_it(number: int) -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    whole = torch.randn(40, 30)
    values, layout = VIEWS[number](whole).clone(), VIEWS[number](whole).stride()
    x = torch.ones((), requires_grad=True)
    with optimizer.offload_activations(1.0):
        y = Remembers.apply(x, VIEWS[number](whole), VIEWS[number](whole))
        for _ in range(4):  # so that the first leave the device
            y = Remembers.apply(y, torch.randn(40, 30))
    del whole
    y.backward()
    for found in Remembers.found:
        assert torch.equal(found, values)
        assert found.stride() == layout
        assert found.dtype == values.dtype


@pytest.mark.parametrize("activations", [1.0, 0.0])
@pytest.mark.parametrize("least_bytes", [64, 10**6])
@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.t()[0].zero_(), lambda t: t.detach().zero_()])
def test_a_tensor_that_was_written_to_raises_as_in_torch(activations: float, least_bytes: int, write: Any) -> None:
    def words(context: Callable[[], AbstractContextManager[None]]) -> list[str]:
        with context():
            z = torch.randn(40, 30, requires_grad=True).exp()
            end = z.sigmoid().square() * torch.randn(40, 30)
            for _ in range(4):  # so that the first leave the device
                end = end.sin()
        write(z)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            end.sum().backward()
        return re.split(r", which is output 0 of \w+,|, check_nan=False", str(raised.value))

    optimizer = optimizer_of(nn.Linear(2, 2))
    offload_of(optimizer).least_bytes = least_bytes
    assert "".join(words(lambda: optimizer.offload_activations(activations))) == "".join(words(nullcontext))


def test_a_tensor_that_is_saved_again_after_it_was_written_to_leaves_again() -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    x = torch.ones((), requires_grad=True)
    t = torch.randn(40, 30)
    with optimizer.offload_activations(1.0):
        one = Remembers.apply(x, t)
        other = Remembers.apply(x, x)  # the copy of `t` begins
        t.add_(1)
        y = Remembers.apply(x, t, t.view(-1))
    expected = t.clone()
    y.backward()
    del one, other
    assert torch.equal(Remembers.found[0], expected)
    assert transfers(optimizer) == 2 * [t.nbytes]


def test_parameters_buffers_and_views_of_them_stay() -> None:
    model = Net()
    device = Copying()
    _optimizer = optimizer_of(model, 1.0, device)
    lasting = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sources: list[int] = []
    copy = device.copy

    def noted(op: Op, subgroup: int, copies: Any, after: Any = ()) -> Any:
        if op is Op.SAVE:
            sources.extend(source.untyped_storage().data_ptr() for _, source in copies)
        return copy(op, subgroup, copies, after)

    device.copy = noted
    model(torch.randn(8, 24))
    assert sources
    assert lasting.isdisjoint(sources)


def written_through_data(context: AbstractContextManager[None]) -> Tensor:
    x, w = torch.ones(40, 30), torch.ones(40, 30, requires_grad=True)
    with context:
        _ = torch.ones(40, 30, requires_grad=True) * x
        alias = x.data  # whose writes x does not count
        alias.mul_(3)
        end = (w * alias).sum() + later()
    end.backward()
    return w.grad


def emptied_and_filled_again(context: AbstractContextManager[None], under_way: bool = False) -> Tensor:
    """As by FSDP2 with gathered parameters, and by Megatron with outputs that it computes again.

    under_way: whether the copy has begun when it is emptied.
    """
    x = torch.ones(40, 30, requires_grad=True)
    with context:
        y = x.exp()
        values, memory = y.detach().clone(), y.untyped_storage()
        nbytes = memory.nbytes()
        end = y.sin().sum()
        if under_way:
            end = end.sin()
            time.sleep(0.1)  # a copy on an emulated device reads memory that is there
        memory.resize_(0)
        end = end + later()
    memory.resize_(nbytes)
    with torch.autograd._unsafe_preserve_version_counter(y), torch.no_grad():
        y.copy_(2 * values)  # which tells them from those that left
    end.backward()
    return x.grad


def emptied_under_way(context: AbstractContextManager[None]) -> Tensor:
    return emptied_and_filled_again(context, under_way=True)


def of_several_lengths(context: AbstractContextManager[None]) -> Tensor:
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(40, 3)], requires_grad=True)
    with context:
        end = torch.nested.to_padded_tensor(x.sin() * x, 0.0).sum()
    end.backward()
    return torch.nested.to_padded_tensor(x.grad, 0.0)


def of_another_layout(context: AbstractContextManager[None]) -> Tensor:
    x = torch.ones(40, 30, requires_grad=True)
    with context:
        end = (x.to_mkldnn().relu().to_dense() * x.to_sparse().to_dense()).sum()
    end.backward()
    return x.grad


def of_forward_mode(context: AbstractContextManager[None]) -> Tensor:
    """Its tangents are tensors without an address where they are zero, and are saved for backward."""
    x, w = torch.ones(40, 30, requires_grad=True), torch.ones(30, 30, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.full((40, 30), 0.5))
        with context:
            found = forward_ad.unpack_dual(torch.sin(dual @ w) * dual + w.sum())
            end = later()
        (found.primal.sum() + found.tangent.sum() + end).backward()
    return torch.cat([x.grad, w.grad])


def of_vmap(context: AbstractContextManager[None]) -> Tensor:
    x, w = torch.ones(40, 30, requires_grad=True), torch.ones(30, 30, requires_grad=True)
    with context:
        end = torch.func.vmap(lambda row: torch.sin(row * 3) @ w)(x).sum() + later()
    end.backward()
    return x.grad


def of_a_graph_of_fx(context: AbstractContextManager[None]) -> Tensor:
    with context:
        found, linear = torch.func.linearize(lambda x: x.sin() * x, torch.ones(40, 30))
        graph = make_fx(lambda x: torch.autograd.grad(x.sin().exp().sum(), x))(torch.ones(40, 30, requires_grad=True))
    return found + linear(torch.ones(40, 30)) + graph(torch.ones(40, 30, requires_grad=True))[0]


@pytest.mark.parametrize(
    "way",
    [
        written_through_data,
        emptied_and_filled_again,
        emptied_under_way,
        of_several_lengths,
        of_another_layout,
        of_forward_mode,
        of_vmap,
        of_a_graph_of_fx,
    ],
)
def test_odd_tensors_give_the_same_bits(way: Callable[[AbstractContextManager[None]], Tensor]) -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    assert torch.equal(way(optimizer.offload_activations(1.0)), way(nullcontext()))
