"""Thousands of parameters: the work on each does not grow with their number. Counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from tests.support.inside import session_of
from tests.support.training import FAST, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture
def searches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons run lines of Python: those of a search through a list, which is one line, are counted, too."""
    for kind in (ParameterRecord, Piece, Subgroup):
        monkeypatch.setattr(kind, "__eq__", lambda self, other: self is other)


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that `work` runs, comprehensions' turns included."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3,), float(i % 7))) for i in range(count)]


PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "cpu": {"policy": "cpu"},
    "stride": {"policy": "stride:2", "subgroup_size": 100},
    "resident": {"policy": 0.0},
    "offloaded": {"policy": "cpu", "offload_gradients": True},
}


def phases(count: int, settings: dict[str, Any]) -> dict[str, int]:
    """Lines of construction, and of the backwards and steps after it."""
    ps, found = parameters(count), {}
    optimizers = []
    if settings:
        settings = {**settings, "device": EmulatedDevice(FAST, capacity=10**8)}

    def construct() -> None:
        optimizers.append(DOSAdam(ps, **settings))

    def backward() -> None:
        sum(p.sum() for p in ps).backward()

    found["construction"] = lines_run(construct)
    for iteration in ("first", "second", "third"):
        found[f"{iteration} backward"] = lines_run(backward)
        found[f"{iteration} step"] = lines_run(optimizers[0].step)
        found[f"{iteration} zero_grad"] = lines_run(optimizers[0].zero_grad)
    return found


@pytest.mark.usefixtures("searches_count")
@pytest.mark.parametrize("place", PLACES)
def test_the_work_is_linear(place: str) -> None:
    few, many = phases(150, PLACES[place]), phases(600, PLACES[place])
    # What costs the same whatever their number makes the ratio smaller; one search through all would make it 16.
    over = {name: many[name] / few[name] for name in few if many[name] > 4.8 * few[name]}
    assert not over


def test_subgroups_far_too_small_are_warned_of() -> None:
    """Each takes time of the host, also where planning for many is as fast as for few."""
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(1001)]
    device = EmulatedDevice(FAST, capacity=10**6)
    optimizer = DOSAdam(parameters, device=device, subgroup_size=8)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    message = "subgroup_size=8 makes 1,001 subgroups of 8,008 parameters.*choose 9 or more"
    with pytest.warns(UserWarning, match=message) as found:
        optimizer.step()
    assert {warning.filename for warning in found} == {__file__}, "where user code called"


@pytest.mark.parametrize("device", [None, "emulated"])
def test_records_have_no_more_attributes_than_python_keeps_beside_an_instance(device: str | None) -> None:
    """30 in CPython 3.11; of each of many parameters a step reads a dozen."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**9) if device else None)
    train(model, optimizer, 2)
    assert all(len(vars(record)) <= 30 for record in session_of(optimizer).registry.records.values())
