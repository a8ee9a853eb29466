"""Gradients that wait for others of their subgroup, with which they are sent to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.gradients.departures import Departures
from tests.support.changes import in_other_memory, in_other_strides, negated, written
from tests.support.training import FAST, everything, mlp, train


def replaced(p: Tensor) -> None:
    assert p.grad is not None, "it waits"
    p.grad = 2 * p.grad


def dropped(p: Tensor) -> None:
    p.grad = None


def added_to(p: Tensor) -> None:
    assert p.grad is not None, "it waits"
    p.grad += 1e-3


CHANGES = [replaced, dropped, added_to, in_other_strides, negated, written, in_other_memory]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_a_gradient_waits_is_trained_on(change: Any) -> None:
    def everything_after(policy: str) -> list[bytes]:
        model = mlp()
        optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=10**6, device=EmulatedDevice(FAST, 10**9))
        first, *_, last = [p for p in model.parameters() if p.ndim == 2]
        for step in range(6):
            if step == 3:
                first.register_hook(lambda _: change(last))
            train(model, optimizer, 1, first_step=step)
        return everything(model, optimizer)

    assert everything_after("cpu") == everything_after("resident")


def test_a_gradient_in_another_order_than_its_parameter_is_sent_in_the_parameters() -> None:
    def everything_after(policy: str) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))
        model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=10**6, device=EmulatedDevice(FAST, 10**9))
        for _ in range(4):
            model[1].weight.grad = torch.zeros(9, 9)  # to which backward adds
            model(torch.arange(9.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert everything_after("cpu") == everything_after("resident")


def test_most_gradients_of_a_subgroup_wait_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wait = list[bool](), Departures.wait

    def noted(departures: Departures, *arguments: Any) -> bool:
        waited.append(wait(departures, *arguments))
        return waited[-1]

    monkeypatch.setattr(Departures, "wait", noted)
    model = nn.ParameterList(torch.randn(16) for _ in range(9))
    model.append(torch.empty(0))  # which has no place in a subgroup
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=10**6, device=EmulatedDevice(FAST, 10**9))
    for _ in range(3):
        waited.clear()
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert waited == [False, *[True] * 7], "all but the first one, which makes the plan, and the last one, not asked"
