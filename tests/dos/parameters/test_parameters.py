"""Parameters of every shape and layout, on the host and accelerated."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dos import DOSAdam, EmulatedDevice
from dos.rules.adamw import AdamW
from dos.state.arena import Arena
from dos.state.record import make_records
from dos.state.subgroup import split
from tests.support.training import FAST, assert_close_ulp, on

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
    state = rule.format(parameters[0], accelerated=True, extra=())
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
    with pytest.raises(TypeError, match=r"parameter 1 .* expected a plain tensor or a DTensor, found TwoTensor"):
        optimizer.step()


def test_a_default_device_elsewhere_does_not_matter() -> None:
    weight = nn.Parameter(torch.ones(300))
    optimizer = DOSAdam([weight], policy="stride:1", device=EmulatedDevice(FAST, 10**9), max_grad_norm=1.0)
    with torch.device("meta"):
        for _ in range(3):
            weight.grad = torch.ones(300, device="cpu")
            optimizer.step()
    assert weight.mean() < 1
