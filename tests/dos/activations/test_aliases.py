"""Saved tensors that share memory, or are written to: backward reads in each what it had when it was saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.activations import Writes, later, optimizer_of, saved, saves, transfers
from tests.support.devices import Copying, CopyingAtOnce, synchronize_devices
from tests.support.inside import offload_of
from tests.support.training import bits

Context = AbstractContextManager[None]


def gradients(program: Callable[[Context], Tensor], leaves: list[Tensor], activations: float | None) -> list[bytes]:
    """What backward gives for the leaves. program: gives the loss, of operations in a context."""
    optimizer = optimizer_of(nn.Linear(2, 2), device=CopyingAtOnce())
    torch.default_generator.manual_seed(0)
    loss = program(nullcontext() if activations is None else optimizer.offload_activations(activations))
    assert (saved(optimizer) > 0) == bool(activations)
    return bits(torch.autograd.grad(loss, leaves))


def assert_same_gradients(program: Callable[[Context], Tensor], *leaves: Tensor) -> None:
    expected = gradients(program, list(leaves), None)
    for activations in (1.0, 0.0):
        assert gradients(program, list(leaves), activations) == expected


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell])
def test_recurrent_networks_give_the_same_bits(kind: Any) -> None:
    """On the CPU their gates are pieces of one tensor, which are written one after the other."""
    network = kind(16, 16)
    x = torch.randn(8, 16) if issubclass(kind, nn.RNNCellBase) else torch.randn(5, 8, 16)

    def program(context: Context) -> Tensor:
        with context:
            found = network(x)
            return (found[0] if isinstance(found, tuple) else found).square().sum() + later()

    assert_same_gradients(program, *network.parameters())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("split", [torch.unsafe_chunk, torch.unsafe_split])
def test_pieces_that_are_written_one_after_the_other_give_the_same_bits(split: Any, dim: int, apart: bool) -> None:
    """apart: whether the copy of the first begins before the second is written."""
    x = torch.randn(40, 40, requires_grad=True)

    def program(context: Context) -> Tensor:
        with context:
            one, other = split(2 * x, 2 if split is torch.unsafe_chunk else 20, dim)
            found = one.sigmoid_()
            end = later() if apart else 0
            return (found * other.tanh_()).sum() + end + later()

    assert_same_gradients(program, x)


@pytest.mark.parametrize("alias_of", [lambda x: x.data, lambda x: torch.from_numpy(x.numpy())])
@pytest.mark.parametrize("apart", [False, True])
def test_an_alias_with_a_counter_of_its_own_is_saved_with_what_was_written_through_it(
    apart: bool, alias_of: Callable[[Tensor], Tensor]
) -> None:
    w = torch.ones(40, 30, requires_grad=True)

    def program(context: Context) -> Tensor:
        x = torch.ones(40, 30)
        x.mul_(2)
        with context:
            _ = torch.ones(40, 30, requires_grad=True) * x
            end = later() if apart else 0
            alias = alias_of(x)
            alias.mul_(3)  # now both count one write
            return (w * alias).sum() + end + later()

    assert_same_gradients(program, w)


def test_pieces_that_are_saved_in_turn_leave_in_one_copy() -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    x = torch.randn(40, 40, requires_grad=True)
    with optimizer.offload_activations(1.0):
        y = 2 * x
        graph = [piece.tanh_() for piece in torch.unsafe_chunk(y, 4, 1)]
    assert transfers(optimizer) == [y.nbytes]
    del graph


class Twice(nn.Module):
    """Saves the same memory twice, by tensors of which it cannot be known that they count all writes alike."""

    def __init__(self, after: int) -> None:
        """after: how much is saved after the second time."""
        super().__init__()
        self.linear = nn.Linear(30, 30)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z = y
        for _ in range(4):
            z = z.sin()
        z = z * y.detach()
        for _ in range(self.after):
            z = z.sin()
        return z


def test_memory_that_two_copies_are_of_is_freed_and_counted_once() -> None:
    held = []
    for activations in (0, 1 << 20):
        model = Twice(after=3)
        device = Copying()
        optimizer = optimizer_of(model, activations, device)
        for _ in range(2):
            optimizer.step()
            device.asked.clear()
            loss = model(torch.randn(40, 30)).sum()
            assert loss.requires_grad, "its graph is there"
            synchronize_devices()  # a copy that has just ended may still refer to memory that was released
            held.append(device.usage().occupied)
            moved = saved(optimizer)
            loss.backward()
    optimizer.step()
    optimizer.synchronize()
    each = 4 * 40 * 30
    assert moved == 9 * each, "the batch, what exp gives, what six of the sines read, and again what exp gives"
    assert optimizer.metrics()["activation_bytes"] == 8 * each
    assert held[1] - held[3] == 6 * each, "the last two are on their way"


def test_all_leaves_of_which_the_last_is_a_second_copy() -> None:
    model = Twice(after=0)
    optimizer = optimizer_of(model, 1.0)
    for _ in range(2):
        assert model(torch.randn(40, 30)).requires_grad
        assert saves(optimizer) == 6 * [4 * 40 * 30]


def of_rrelu(x: Tensor) -> Tensor:
    return nn.functional.rrelu(x, training=True)


def of_a_module(x: Tensor) -> Tensor:
    return nn.RReLU(inplace=True)(x * 1)


def of_noise_that_is_there(x: Tensor) -> Tensor:
    return torch.ops.aten.rrelu_with_noise(x, torch.zeros_like(x), 0.1, 0.3, True)


def of_backward(x: Tensor) -> Tensor:
    """To a tensor that nothing else reads."""
    return Writes.apply(x * 2)


@pytest.mark.parametrize("writes", [of_rrelu, of_a_module, of_noise_that_is_there, of_backward])
def test_an_operation_may_write_to_what_it_has_saved(writes: Callable[[Tensor], Tensor]) -> None:
    """It leaves as it is then, after its operation has run."""
    x = torch.randn(40, 30, requires_grad=True)

    def program(context: Context) -> Tensor:
        with context:
            return writes(x).sum() + later()

    assert_same_gradients(program, x)


READERS: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    lambda x: x.t().square(),
    lambda x: x[3:].sin(),
    lambda x: x.detach() * torch.ones(40, 30, requires_grad=True),
    Writes.apply,
]


@pytest.mark.parametrize("number", range(len(READERS)))
@pytest.mark.parametrize("activations", [1.0, 0.0])
@pytest.mark.parametrize("least_bytes", [64, 10**6])
def test_what_backward_wrote_to_raises_for_other_readers_as_in_torch(
    activations: float, least_bytes: int, number: int
) -> None:
    def words(context: Context) -> str:
        with context:
            x = torch.randn(40, 30, requires_grad=True) * 2
            end = READERS[number](x).sum() + Writes.apply(x).sum() + later()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            end.backward()
        return re.sub(r", which is output 0 of \w+,|, check_nan=False", "", str(raised.value))

    optimizer = optimizer_of(nn.Linear(2, 2))
    offload_of(optimizer).least_bytes = least_bytes
    assert words(optimizer.offload_activations(activations)) == words(nullcontext())


@pytest.mark.parametrize("activations", [None, 1.0])
def test_what_backward_wrote_to_raises_in_another_backward(activations: float | None) -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    with nullcontext() if activations is None else optimizer.offload_activations(activations):
        end = Writes.apply(torch.randn(40, 30, requires_grad=True) * 2).sum() + later()
    end.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()
