"""Libraries that average parameters write to them through `.data`, for an evaluation and for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training import Make, assert_close_ulp, loss_of, maker, mlp


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
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            average.update()
            with average.in_place(), torch.no_grad():
                loss_of(model, step)
            if step in (2, 4):
                average.copy()
        return list(model.parameters())

    assert_close_ulp(run(maker(place, lr=0.01)), run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))
