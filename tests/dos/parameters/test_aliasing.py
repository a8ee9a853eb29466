"""Parameters that share memory are refused; disjoint views of one buffer are fine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam
from dos.parameters.admission import find_overlap
from tests.support.training import Make, assert_as_adamw, on

PLACES = ["host", "cpu", 0.0]


def give_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("place", PLACES)
def test_shared_memory_is_refused_at_the_first_step(place: str | float) -> None:
    a, b, c = (nn.Parameter(torch.ones(6)) for _ in range(3))
    named = [("first.weight", a), ("norm.weight", c), ("last.weight", b)]
    optimizer = DOSAdam(named, **on(place))
    b.data = a.data
    give_gradients([a, b, c])
    message = r"parameter 'first.weight' and parameter 'last.weight' share memory.*\(b\.weight = a\.weight\).*clone"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert torch.equal(a, torch.ones(6))
        assert all(not entry.get("step", 0) for entry in optimizer.state.values())
    b.data = b.data.clone()
    optimizer.step()
    assert not torch.equal(a, torch.ones(6))
    assert torch.equal(a, b)


@pytest.mark.parametrize("place", PLACES)
def test_memory_that_is_shared_from_a_later_step_on(place: str | float) -> None:
    a, b = (nn.Parameter(torch.ones(6)) for _ in range(2))
    optimizer = DOSAdam([a, b], **on(place))
    give_gradients([a, b])
    optimizer.step()
    before = a.detach().clone()
    b.data = a.data[2:]
    b.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"was .* when the optimizer first updated it"):  # for its shape
        optimizer.step()
    b.data = a.data
    b.grad = None
    optimizer.zero_grad()
    give_gradients([b])  # the other one has state, too, and would not notice
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(6,\) and parameter 1 of shape \(6,\) share memory"):
        optimizer.step()
    assert torch.equal(a, before)


def test_memory_that_is_shared_by_other_strides_at_the_same_address() -> None:
    buffer = torch.arange(8.0)
    a, b = nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:])
    optimizer = DOSAdam([a, b])
    give_gradients([a, b])
    optimizer.step()
    a.data = buffer[::2]
    with pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()


def test_a_parameter_whose_own_elements_share_memory() -> None:
    p = nn.Parameter(torch.zeros(1).expand(4))
    p.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="has elements that share memory, as `expand` makes them"):
        DOSAdam([p]).step()


@pytest.mark.parametrize("place", PLACES)
def test_disjoint_views_of_one_buffer_are_fine(place: str | float) -> None:
    def run(make: Make) -> list[Tensor]:
        buffer = torch.linspace(-1, 1, 36).view(6, 6).clone()
        parts = [buffer[0:2], buffer[2:4, :3], buffer[2:4, 3:], buffer[4:, ::2], buffer[4:, 1::2]]
        parameters = [nn.Parameter(part) for part in parts]
        optimizer = make(parameters)
        for _ in range(3):
            give_gradients(parameters)
            optimizer.step()
        return [buffer]

    assert_as_adamw(run, place)


@st.composite
def windows(draw: st.DrawFn) -> Tensor:
    """A view of 32 elements of a buffer by any strides."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    last = sum(max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return BUFFER.as_strided(shape, strides, draw(st.integers(0, BUFFER.numel() - 1 - last)))


BUFFER = torch.zeros(128)


def addresses(tensor: Tensor) -> list[int]:
    offsets = [tensor.storage_offset()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return offsets


@given(st.lists(windows(), max_size=5))
def test_found_exactly_when_two_elements_have_one_address(tensors: list[Tensor]) -> None:
    found = [set(addresses(t)) for t in tensors]
    alone = [i for i, t in enumerate(tensors) if len(found[i]) < t.numel()]
    pairs = [(i, j) for j in range(len(tensors)) for i in range(j) if found[i] & found[j]]
    answer = find_overlap(tensors)
    assert (answer is None) == (not alone and not pairs)
    if answer is not None:
        assert answer in pairs or (answer[0] == answer[1] and answer[0] in alone)
