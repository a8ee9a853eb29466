"""Forward and backward around a step, as a saved timeline shows them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.step.iteration import Iteration
from perfmodel import Op
from tests.support.training import FAST, mlp, profile

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

VERY_SLOW = profile(cpu_update_rate=5e3)
"""An update on the host takes long enough for another forward to begin meanwhile, however late that is."""
FORWARD_S, BACKWARD_S = 0.02, 0.03


def iterate(model: nn.Module, optimizer: DOSAdam) -> None:
    """One iteration of a model that computes for a while."""
    optimizer.zero_grad()
    loss = model(torch.ones(2, 24)).square().mean()
    time.sleep(FORWARD_S)
    loss.backward()
    time.sleep(BACKWARD_S)
    optimizer.step()


def test_without_a_step_on_an_accelerator_a_timeline_says_why_it_is_empty(tmp_path: Path) -> None:
    model = mlp()
    emulated = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**7))
    assert not emulated.timeline()
    on_host = DOSAdam(model.parameters())
    iterate(model, on_host)
    found = on_host.timeline()
    assert not found
    assert "those on the host are updated there, in place" in found.missing
    with pytest.warns(UserWarning, match=r"trace\.json shows nothing: no step has updated parameters on an accel"):
        found.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"missing": found.missing}


@pytest.mark.parametrize("attach", [False, True])
def test_an_iteration_and_the_forward_after_it(attach: bool) -> None:
    model = mlp()
    device = EmulatedDevice(FAST, 10**7)
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    if attach:
        optimizer.attach(model)
    for device.profile in (FAST, FAST, VERY_SLOW):
        iterate(model, optimizer)
    optimizer.synchronize()
    assert optimizer.timeline()
    forward, backward = optimizer.timeline().beside
    assert (forward.op, backward.op) == (Op.FORWARD, Op.BACKWARD)
    assert forward.end == backward.start
    assert backward.end == 0, "at step()"
    assert forward.duration >= FORWARD_S
    assert backward.duration >= BACKWARD_S
    model(torch.ones(2, 24)).square().mean().backward()
    before, during, after = optimizer.timeline().beside
    assert (before, during, after.op) == (forward, backward, Op.FORWARD)
    ends = max(span.end for span in optimizer.timeline().spans)
    assert (after.start < ends) == attach, "an attached model's forward begins before the update ends, no other's does"
    assert after.end > after.start


def test_the_first_step_has_no_forward_and_gradients_by_hand_tell_of_neither() -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=EmulatedDevice(FAST, 10**7))
    iterate(model, optimizer)
    assert [span.op for span in optimizer.timeline().beside] == [Op.BACKWARD]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.timeline().beside == ()


def test_they_last_until_the_device_has_come_there() -> None:
    """A GPU's caller issues its work long before it is done."""
    at = time.perf_counter()
    queued = [at + 10, at + 17]

    def mark(seconds: float | None) -> SimpleNamespace:
        return SimpleNamespace(at=lambda: seconds)

    device = SimpleNamespace(mark=lambda: mark(queued.pop(0)))
    iteration = Iteration(device, Iteration(device))
    iteration.backward, iteration.step = mark(at + 13), mark(at + 16)
    following = Iteration(device, iteration)

    def found() -> list[tuple[Op, float, float]]:
        return [(span.op, round(span.start, 6), round(span.end, 6)) for span in iteration.spans(at + 16)]

    assert found() == [(Op.FORWARD, -6, -3), (Op.BACKWARD, -3, 0)]
    following.backward = mark(None)
    assert found() == [(Op.FORWARD, -6, -3), (Op.BACKWARD, -3, 0)], "the device has not come there"
    following.backward = mark(at + 21)
    assert found() == [(Op.FORWARD, -6, -3), (Op.BACKWARD, -3, 0), (Op.FORWARD, 1, 5)]
