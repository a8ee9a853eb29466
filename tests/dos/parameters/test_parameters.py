"""Parameters of every shape and layout, on the host and accelerated, and those that share memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from dos import DOSAdam, EmulatedDevice
from dos.parameters.admission import find_overlap
from dos.rules.adamw import AdamW
from dos.state.arena import Arena
from dos.state.record import make_records
from dos.state.subgroup import split
from tests.support.training import FAST, Make, assert_as_adamw, assert_close_ulp, on

MAKERS = {
    "plain": lambda: torch.randn(6, 7),
    "zero-dimensional": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 4),
    "one element": lambda: torch.randn(1),
    "transposed": lambda: torch.randn(6, 7).t(),
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "a slice at an odd offset": lambda: torch.randn(50)[3:40],
    "axes of length one": lambda: torch.randn(5, 1, 4).transpose(0, 1),
}


@pytest.mark.parametrize(("size", "cut"), [(1_100_001, 1_101_824), (2**20, 2**20), (999_999, 999_999)])
def test_large_subgroups_begin_where_loads_are_wide(size: int, cut: int) -> None:
    parameters = [torch.zeros(numel) for numel in (1_500_032, 1_280, 710_000)]
    rule = AdamW()
    state = rule.format(parameters[0], extra=())
    arena = Arena(parameters, EmulatedDevice(FAST, 10**9), rule, state)
    subgroups = split(arena, make_records(parameters, arena), size)
    assert [s.numel for s in subgroups] == [cut, cut, arena.numel - 2 * cut][: len(subgroups)]
    aligned = [p.start % 128 == 0 and p.parameter_start % 128 == 0 for s in subgroups for p in s.pieces]
    assert all(aligned) == (cut % 128 == 0)


@pytest.mark.parametrize(
    ("place", "dtype"),
    [("host", torch.bfloat16), ("cpu", torch.float32), ("stride:2", torch.bfloat16), (0.0, torch.float32)],
)
@pytest.mark.parametrize("name", MAKERS)
def test_layouts_agree_with_adamw(name: str, place: str | float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(MAKERS[name]().to(dtype))
    reference = nn.Parameter(parameter.detach().float().clone())
    neighbours = [nn.Parameter(torch.randn(5, dtype=dtype)) for _ in range(2)]
    ours = on(place, subgroup_size=11)
    optimizer = DOSAdam([neighbours[0], parameter, neighbours[1]], lr=1e-2, **ours)
    adamw = torch.optim.AdamW([reference], lr=1e-2)
    layout = parameter.stride()
    for step in range(4):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        if step == 2:  # a gradient laid out otherwise than the parameter
            gradient = gradient.t().contiguous().t() if gradient.ndim == 2 else gradient.contiguous()
        parameter.grad, reference.grad = gradient, gradient.float()
        for neighbour in neighbours:
            neighbour.grad = torch.ones_like(neighbour)
        optimizer.step()
        adamw.step()
    assert parameter.stride() == layout
    expected = [reference.detach().to(dtype)]
    assert_close_ulp([parameter], expected, ulps=64 if dtype == torch.float32 else 2)
    state = optimizer.state[parameter]
    assert state["exp_avg"].shape == parameter.shape
    torch.testing.assert_close(state["exp_avg"], adamw.state[reference]["exp_avg"], rtol=1e-5, atol=1e-7)


def test_state_of_parameters_on_the_host_asks_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    DOSAdam([nn.Parameter(torch.ones(10_000))], disk=tmp_path, host_memory=1000)
    device = EmulatedDevice(FAST, 10**9)
    with pytest.raises(OSError, match=r"needs at least \d+ bytes on disk and 0 are free"):
        DOSAdam([nn.Parameter(torch.ones(10_000))], disk=tmp_path, host_memory=1000, device=device)


def test_frozen_parameters_may_be_of_any_kind() -> None:
    frozen = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = DOSAdam([frozen, weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    DOSAdam(nn.LazyLinear(3).parameters())


def test_a_parameter_that_joins_its_group_later_is_looked_at() -> None:
    optimizer = DOSAdam([nn.Parameter(torch.ones(3))])
    joins = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer.param_groups[0]["params"].append(joins)
    joins.grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"parameter 1 .* a plain tensor, a DTensor, or a wrapper .*found TwoTensor"):
        optimizer.step()


def test_a_default_device_elsewhere_does_not_matter() -> None:
    weight = nn.Parameter(torch.ones(300))
    optimizer = DOSAdam([weight], policy="stride:1", device=EmulatedDevice(FAST, 10**9), max_grad_norm=1.0)
    with torch.device("meta"):
        for _ in range(3):
            weight.grad = torch.ones(300, device="cpu")
            optimizer.step()
    assert weight.mean() < 1


# Parameters that share memory are refused; disjoint views of one buffer are fine.

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
