"""Parameters that are exchanged while training, as where a model is pruned or grows: bits, and memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam
from dos.machine import host_memory
from tests.support.disk import TWO_WINDOWS, bytes_on_disk
from tests.support.training import FAST, assert_close_ulp, backward, bits, mlp, on

pytestmark = pytest.mark.usefixtures("one_core")

NUMEL = 30_000


class Points(nn.Module):
    """Two tensors with a row for each point, a layer that stays, and a parameter that joins later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Parameter(torch.randn(NUMEL // 3, 3))
        self.sizes = nn.Parameter(torch.randn(NUMEL // 3, 1))
        self.last = nn.Linear(3, 1)
        self.more = nn.Parameter(torch.ones(1))

    def forward(self) -> torch.Tensor:
        return (self.last(self.places) * self.sizes * self.more).square().mean()


def made(place: str | float, model: Points, **settings: Any) -> DOSAdam:
    groups = [{"params": [model.places]}, {"params": [model.sizes]}, {"params": list(model.last.parameters())}]
    return DOSAdam(groups, lr=1e-2, **on(place, 24 * NUMEL, profile=FAST, subgroup_size=3_000, **settings))


def exchange(model: Points, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    """Keep some points, and their state, as programs for Gaussian splatting do."""
    for group, name in zip(optimizer.param_groups, ("places", "sizes"), strict=False):
        old = group["params"][0]
        new = nn.Parameter(old.detach()[kept].clone())
        entry = optimizer.state.pop(old)
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key][kept]
        group["params"][0] = new
        optimizer.state[new] = entry
        setattr(model, name, new)


def trained(model: Points, optimizer: torch.optim.Optimizer) -> list[weakref.ref[nn.Parameter]]:
    """Exchanged after every second step; the parameters that were there. One joins by hand."""
    seen = []
    for step in range(9):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if step == 4:
            optimizer.param_groups[2]["params"].append(model.more)
        if step % 2:
            if isinstance(optimizer, DOSAdam):
                optimizer.synchronize()
            seen.append(weakref.ref(model.places))
            count = len(model.places)
            exchange(model, optimizer, torch.randperm(count, generator=torch.Generator().manual_seed(step)))
    return seen


PLACES = ("host", "cpu", 0.5, "stride:2", "adaptive")


@pytest.mark.parametrize(
    ("place", "where"),
    [*((place, where) for place in PLACES for where in ("", "offloaded gradients")), ("cpu", "state on disk")],
)
def test_bits_are_the_same_and_nothing_stays_behind(place: str | float, where: str, tmp_path: Path) -> None:
    twin = Points()
    trained(twin, made("host", twin))
    model = Points()
    offload_gradients, on_disk = where == "offloaded gradients", where == "state on disk"
    disk: dict[str, Any] = {"disk": tmp_path, "host_memory": 2 * TWO_WINDOWS} if on_disk else {}
    optimizer = made(place, model, offload_gradients=offload_gradients, **disk)
    if not offload_gradients:
        optimizer.attach(model)
    seen = trained(model, optimizer)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())
    gc.collect()
    assert [old() for old in seen] == [None] * len(seen)
    held = optimizer.metrics()
    assert held.get("memory_held_bytes", 0) <= 24 * NUMEL
    assert held.get("host_held_bytes", 0) <= 24 * NUMEL
    assert on_disk == (0 < bytes_on_disk(tmp_path) <= 24 * NUMEL)
    plan = optimizer.plan()
    assert plan is None or len(plan) <= 18


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_offloaded_gradients_of_what_is_gone_do_not_count_for_clipping(whole: bool, by_step: bool) -> None:
    """whole: whether all that shared its memory is gone."""
    moments = []
    for settings in ({"offload_gradients": True}, {}):
        model = Points()
        optimizer = made("cpu", model, max_grad_norm=1e-3 if by_step else None, **settings)
        for step in range(2):
            model().backward()
            if step and whole:
                exchange(model, optimizer, torch.arange(len(model.places)))
            elif step:
                del optimizer.state[model.last.bias]
                model.last.bias = nn.Parameter(torch.zeros(1))
                optimizer.param_groups[2]["params"][1] = model.last.bias
            if not by_step:
                optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
        moments.append(optimizer.state[model.last.weight]["exp_avg"])
    torch.testing.assert_close(*moments, rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", ["host", "cpu"])
def test_no_memory_is_asked_for_what_is_gone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first gradient, as where a framework exchanges what a group was built with, or after."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 40 * NUMEL)  # a parameter's state takes 8 or 16
    optimizer = DOSAdam([nn.Parameter(torch.zeros(NUMEL))], **on(place))
    for _ in range(6):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(NUMEL))]})
        weight = nn.Parameter(torch.zeros(NUMEL))
        weight.grad = torch.ones(NUMEL)
        optimizer.param_groups[1]["params"] = [weight]
        optimizer.step()
        optimizer.state.clear()
        del optimizer.param_groups[0]


@pytest.mark.parametrize("place", ["host", "stride:2", "resident"])
def test_state_that_is_kept_stays(place: str | float) -> None:
    """A parameter that leaves its group for a while, with its entry left in the state."""
    found = []
    for where in ("host", place):
        model = Points()
        optimizer = made(where, model)
        for step in range(6):
            optimizer.zero_grad()
            model().backward()
            optimizer.param_groups[1]["params"] = [] if step in (2, 3) else [model.sizes]
            optimizer.step()
        found.append(bits([*model.parameters(), optimizer.state[model.sizes]["exp_avg"]]))
        assert optimizer.state[model.sizes]["step"] == 4
    assert found[0] == found[1]


def _offloading(parameters: list[nn.Parameter]) -> DOSAdam:
    return DOSAdam(parameters, lr=1e-2, **on("stride:2", offload_gradients=True, subgroup_size=300))


def _plain(parameters: list[nn.Parameter]) -> DOSAdam:
    return DOSAdam(parameters, lr=1e-2, **on("cpu", subgroup_size=300))


def _doubled(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(2)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("whole", "edited"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("makers", [(_offloading, _offloading), (_offloading, _plain), (_plain, _offloading)])
def test_parameters_that_two_optimizers_exchange_keep_their_gradients(
    makers: tuple[Any, Any], whole: bool, edited: bool, first: int
) -> None:
    """Between backward and step. whole: all parameters, with their state. first: which optimizer steps first."""
    found = []
    for make in ((_plain, _plain), makers):
        model = mlp()
        parameters = list(model.parameters())
        optimizers = [make[0](parameters[:2]), make[1](parameters[2:])]
        for step in range(5):
            backward(model, step, micro_batches=2)
            if step == 2:
                lists = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
                if whole:
                    states = [[each.state.pop(p) for p in own] for each, own in zip(optimizers, lists, strict=True)]
                    for optimizer, own, state in zip(optimizers, lists[::-1], states[::-1], strict=True):
                        optimizer.param_groups[0]["params"] = [*own]
                        optimizer.state.update(zip(own, state, strict=True))
                else:
                    lists[0][0], lists[1][0] = lists[1][0], lists[0][0]
            for optimizer in (optimizers[first], optimizers[1 - first]):
                if edited:
                    optimizer.edit_gradients(_doubled)
                    optimizer.clip_grad_norm_(1e-3)
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in parameters])
    assert_close_ulp(found[1], found[0], 64 if edited else 0)  # norms on the host are rounded once


@pytest.mark.parametrize("make", [_plain, _offloading])
def test_gradients_of_a_parameter_that_leaves_its_group_for_a_while_add_up(make: Any) -> None:
    found = []
    for maker in (torch.optim.AdamW, make):
        model = mlp()
        optimizer = maker(list(model.parameters()))
        optimizer.param_groups[0]["lr"] = 1e-2
        group = optimizer.param_groups[0]["params"]
        for step in range(4):
            backward(model, step)
            if step == 1:
                away = group.pop(0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                group.append(away)
        found.append([p.detach().clone() for p in model.parameters()])
    assert_close_ulp(found[1], found[0])
