"""The cost of a gradient's hook, in calls of Python."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.owners.gradients import Gradients
from dos.planning.monitor import MemoryMonitor
from perfmodel import Placement, Plan, Workload
from tests.support.training import FAST

pytestmark = pytest.mark.usefixtures("samples_as_asked")

SIZE = 256


def half_resident(work: Workload) -> Plan:
    """All others are streamed."""
    n = len(work.subgroups)
    placements = [Placement.GPU_RESIDENT, Placement.GPU_STREAMED] * n
    return Plan(tuple(placements[:n]), tuple(range(n)), 2)


def on_host(work: Workload) -> Plan:
    n = len(work.subgroups)
    return Plan((Placement.CPU,) * n, tuple(range(n)), 0)


def calls(policy: Any, parameters: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Calls for each hook of the second half of a backward, while there is no memory for slots.

    Without those of the last hook, which looks at the step.
    """
    monkeypatch.setattr(MemoryMonitor, "spare_in_backward", lambda monitor: 0)
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(parameters))
    optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=SIZE, device=EmulatedDevice(FAST, 10**9))
    found, hooks, gradient_ready = 0, 0, Gradients.gradient_ready

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call"

    def counted(gradients: Gradients, *arguments: Any) -> None:
        nonlocal hooks
        hooks += 1
        sys.setprofile(count if parameters // 2 < hooks < parameters else None)
        try:
            gradient_ready(gradients, *arguments)
        finally:
            sys.setprofile(None)

    def iteration() -> None:
        sum(p.square().sum() for p in model).backward()

    for _ in range(3):
        iteration()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with monkeypatch.context() as patched:
        patched.setattr(Gradients, "gradient_ready", counted)
        iteration()
    assert hooks == parameters
    return found / (parameters - parameters // 2 - 1)


@pytest.mark.parametrize(("policy", "most"), [(half_resident, 30), (on_host, 58)])
def test_calls_of_a_hook_do_not_grow_with_the_number_of_subgroups(
    policy: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (calls(policy, parameters, monkeypatch) for parameters in (22, 62))
    assert many <= few + 2
    assert many <= most
