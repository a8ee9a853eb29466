"""Averages of weights that other libraries keep: of an attached model, and written to parameters through `.data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.training import SLOW, Make, assert_close_ulp, loss_of, maker, mlp, train


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
            train(model, optimizer, 1, first_step=step)
            update()
        ends.append(averages)
    assert_close_ulp(*ends, 256)


class Diffusers:
    """Of diffusers' `EMAModel`."""

    def __init__(self, model: nn.Module) -> None:
        library = pytest.importorskip("diffusers.training_utils")
        self.parameters, self.average = list(model.parameters()), library.EMAModel(model.parameters(), decay=0.6)

    def update(self) -> None:
        self.average.step(self.parameters)

    def copy(self) -> None:
        self.average.copy_to(self.parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.average.store(self.parameters)
        self.copy()
        yield
        self.average.restore(self.parameters)


class TorchEma(Diffusers):
    """Of torch_ema's `ExponentialMovingAverage`."""

    def __init__(self, model: nn.Module) -> None:
        library: Any = pytest.importorskip("torch_ema")
        self.parameters = list(model.parameters())
        self.average = library.ExponentialMovingAverage(self.parameters, decay=0.6)

    def update(self) -> None:
        self.average.update()


@pytest.mark.parametrize("kind", [Diffusers, TorchEma])
@pytest.mark.parametrize("place", ["cpu", "resident", "stride:2", "host"])
def test_an_average_is_evaluated_and_then_trained_on(kind: type[Diffusers], place: str) -> None:
    def run(make: Make) -> list[Tensor]:
        model = mlp()
        optimizer, average = make(model.parameters()), kind(model)
        for step in range(6):
            train(model, optimizer, 1, first_step=step)
            average.update()
            with average.in_place(), torch.no_grad():
                loss_of(model, step)
            if step in (2, 4):
                average.copy()
        return list(model.parameters())

    assert_close_ulp(run(maker(place, lr=0.01)), run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))
