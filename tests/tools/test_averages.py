"""Averages of weights that other libraries keep, of an attached model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.training import SLOW, assert_close_ulp, loss_of, maker, mlp


def with_diffusers(model: nn.Module, _: Any) -> tuple[Callable[[], None], list[Tensor]]:
    """Return what updates the average, and the averages."""
    average = pytest.importorskip("diffusers.training_utils").EMAModel(model.parameters(), decay=0.5)
    return lambda: average.step(model.parameters()), average.shadow_params


def with_torch_ema(model: nn.Module, _: Any) -> tuple[Callable[[], None], list[Tensor]]:
    average = pytest.importorskip("torch_ema").ExponentialMovingAverage(model.parameters(), decay=0.5)
    return lambda: average.update(model.parameters()), average.shadow_params


def with_torch_ema_of_kept(model: nn.Module, optimizer: Any) -> tuple[Callable[[], None], list[Tensor]]:
    """With the parameters that it has kept, before which `synchronize()` comes."""
    average = pytest.importorskip("torch_ema").ExponentialMovingAverage(model.parameters(), decay=0.5)

    def update() -> None:
        if isinstance(optimizer, DOSAdam):
            optimizer.synchronize()
        average.update()

    return update, average.shadow_params


@pytest.mark.parametrize("averaged", [with_diffusers, with_torch_ema, with_torch_ema_of_kept])
def test_an_average_is_that_of_adamw(averaged: Callable[[nn.Module, Any], Any]) -> None:
    ends = []
    for make in (maker("cpu", machine=SLOW, lr=0.01), lambda parameters: torch.optim.AdamW(parameters, lr=0.01)):
        model = mlp()
        optimizer = make(model.parameters())
        if isinstance(optimizer, DOSAdam):
            optimizer.attach(model)
        update, averages = averaged(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            update()
        ends.append(averages)
    assert_close_ulp(*ends, 256)
