"""A module of an attached model that user code replaces, without telling the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import loss_of, maker, mlp

WARNING = (
    r"no optimizer has \(3\.weight, 3\.bias\), and DOSAdam has some that are not in the model, of shapes \(7, 40\)"
)


def train(model: nn.Module, *optimizers: Any, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a module was replaced")
        yield


PLACES = [
    pytest.param("host", {}, id="host"),
    pytest.param("cpu", {}, id="device"),
    pytest.param("cpu", {"offload_gradients": True}, id="offloaded"),
]


@pytest.mark.parametrize(("place", "settings"), PLACES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_head_that_was_replaced_after_attach_is_noticed_once(
    place: Any, settings: dict[str, Any], steps: int
) -> None:
    model = mlp()
    optimizer = maker(place, **settings)(model.parameters())
    optimizer.attach(model)
    train(model, optimizer, steps=steps)
    kept, model[3] = model[3], nn.Linear(40, 7)
    with pytest.warns(UserWarning, match=WARNING):
        train(model, optimizer)
    with no_warning():
        train(model, optimizer)
    del kept


def test_a_head_that_was_replaced_before_attach_is_noticed_once() -> None:
    model = mlp()
    optimizer = maker("cpu")(model.parameters())
    model[3] = nn.Linear(40, 7)
    with pytest.warns(UserWarning, match=WARNING):
        optimizer.attach(model)
    with no_warning():
        train(model, optimizer)


def told(model: nn.Sequential, optimizer: Any) -> None:
    model[3] = nn.Linear(40, 7)
    optimizer.add_param_group({"params": list(model[3].parameters())})


def with_another_optimizer(model: nn.Sequential, _: Any) -> None:
    model[3] = nn.Linear(40, 7)
    model.other = torch.optim.SGD(model[3].parameters(), lr=0.01)  # type: ignore[assignment]


def frozen(model: nn.Sequential, _: Any) -> None:
    model[3] = nn.Linear(40, 7).requires_grad_(False)


def removed(model: nn.Sequential, _: Any) -> None:
    model[2] = nn.Identity()


def added(model: nn.Sequential, _: Any) -> None:
    model.append(nn.Linear(7, 7))


@pytest.mark.parametrize("change", [told, with_another_optimizer, frozen, removed, added])
def test_other_changes_are_not_taken_for_it(change: Callable[[Any, Any], None]) -> None:
    model = mlp()
    optimizer = maker("cpu")(model.parameters())
    optimizer.attach(model)
    train(model, optimizer)
    change(model, optimizer)
    with no_warning():
        train(model, optimizer)
        optimizer.attach(model)


def test_several_optimizers_of_one_model_and_one_of_several_are_not_taken_for_it() -> None:
    model, elsewhere = mlp(), nn.Linear(3, 3)
    parameters = list(model.parameters())
    with no_warning():
        one, other = maker("cpu")([*parameters[:2], *elsewhere.parameters()]), torch.optim.SGD(parameters[2:], lr=0.1)
        one.attach(model)
        train(model, one, other)
        subset = maker("cpu")(parameters[:2])  # the rest requires gradients that nobody uses
        del other
        subset.attach(model)
        train(model, subset)
