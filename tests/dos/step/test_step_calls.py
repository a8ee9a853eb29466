"""The cost of `step()` before its first work, and of hooks in backward, in calls of Python for each parameter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.step.host_lane import Turns
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.training import FAST

SIZE, EACH = 256, 8
"""Elements of a parameter, and parameters of a subgroup."""
FEW, MANY = 5 * EACH, 15 * EACH


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Finalizers that the collector calls would count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls(parameters: int, device: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls until the first turn of the CPU lane is handed over, in a step whose gradients have all left.

    With those of C. The last steps look at all parameters at once; the fewest count, because threads that wait call
    more. Without those that make a schedule, which most steps take from the last one: here times vary by too much.
    """
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(parameters))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    found, give = 0, Turns.give

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call") and "/perfmodel/" not in frame.f_code.co_filename

    def given(turns: Turns, turn: Any) -> None:
        sys.setprofile(None)
        give(turns, turn)

    least = sys.maxsize
    for step in range(7):
        sum(p.square().sum() for p in model).backward()
        optimizer.synchronize()
        found = 0
        with monkeypatch.context() as patched:
            patched.setattr(Turns, "give", given)
            sys.setprofile(count if step >= 4 else None)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
        optimizer.zero_grad()
        least = min(least, found) if step >= 4 else least
    return least


@pytest.mark.parametrize(("queues", "most"), [(True, 11), (False, 23)])
def test_calls_before_the_first_work_of_a_step(queues: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three for each parameter, the others for its subgroup; bits are compared where the device does not queue."""
    device = FakeCudaDevice(install(monkeypatch, seed=None)) if queues else EmulatedDevice(FAST, 10**9)
    few, many = (calls(parameters, device, monkeypatch) for parameters in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= most


def calls_in_backward(parameters: int, updates: str, device: Any) -> int:
    """The fewest calls of a whole backward, whose gradients leave or are updated."""
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(parameters))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    optimizer.attach(model, updates=updates)
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call"

    least = sys.maxsize
    for step in range(7):
        loss = sum(p.square().sum() for p in model)
        optimizer.synchronize()
        found = 0
        sys.setprofile(count if step >= 4 else None)
        try:
            loss.backward()  # hooks run on this thread
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
        least = min(least, found) if step >= 4 else least
    return least


@pytest.mark.parametrize(
    ("updates", "queues", "most"),
    [("step", False, 33), ("step", True, 44), ("backward", False, 45), ("backward", True, 38)],
)
def test_calls_of_a_gradients_hooks(updates: str, queues: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the share of a gradient in what its subgroup takes. In backward mode a thread queues copies."""
    device = FakeCudaDevice(install(monkeypatch, seed=None)) if queues else EmulatedDevice(FAST, 10**9)
    few, many = (calls_in_backward(parameters, updates, device) for parameters in (10 * EACH, 30 * EACH))
    assert (many - few) / (20 * EACH) <= most
