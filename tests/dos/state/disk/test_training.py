"""State that exceeds the host's budget rests on disk: how it travels. `test_stateful.py` compares the bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from perfmodel import Op
from tests.support.devices import LateDevice, jittery_device
from tests.support.disk import TWO_WINDOWS, bytes_on_disk, dos_adam, wide
from tests.support.inside import plan_anew
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, assert_close_ulp, ended_steps, everything, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")


def test_most_state_is_on_disk_and_comes_and_goes_with_every_step(tmp_path: Path) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path)
    for step in range(3):
        train(model, optimizer, 1, first_step=step)
        assert optimizer.plan().on_disk
        assert {Op.READ, Op.WRITE} <= {span.op for span in optimizer.timeline().spans}
        assert bytes_on_disk(tmp_path) > 0


def test_state_that_user_code_shares_between_processes(tmp_path: Path) -> None:
    """That moves its memory, which the optimizer then neither pins nor releases when the state moves to disk."""
    ends = []
    for disk in (None, tmp_path):
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(6)))
        for number, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        optimizer = dos_adam(model.parameters(), disk, policy="adaptive", host_memory=600_000)
        for step in range(6):
            model(torch.ones(8, 100) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if disk is not None and step in (1, 3):
                optimizer.state[model[step].weight]["exp_avg"].share_memory_()
            if step == 4:
                optimizer.release_memory()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def replace_codes(optimizer: DOSAdam) -> DOSAdam:
    for entry in optimizer.state.values():
        entry["exp_avg_codes"] = entry["exp_avg_codes"].flip(0)
    return optimizer


def load_adamw_state(optimizer: DOSAdam) -> DOSAdam:
    """One parameter after the other."""
    parameters = enumerate(optimizer.param_groups[0]["params"])
    state = {number: optimizer.adamw_state(p) for number, p in parameters if p in optimizer.state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return optimizer


@pytest.mark.parametrize(
    ("policy", "dtype", "then"),
    [
        ("cpu", torch.float32, copy.deepcopy),
        ("stride:2", torch.bfloat16, load_adamw_state),
        (0.5, torch.bfloat16, replace_codes),
    ],
)
def test_codes(tmp_path: Path, policy: str | float, dtype: torch.dtype, then: Callable[[DOSAdam], DOSAdam]) -> None:
    """Of subgroups of 131,072 parameters, whose scales fill a page. then: what users do after the first two steps."""
    ends = []
    for disk in (None, tmp_path):
        weights = [nn.Parameter(torch.linspace(-1, 1, 131072).view(1024, 128).to(dtype)) for _ in range(7)]
        optimizer = dos_adam(weights, disk, policy=policy, state_format="int8", host_memory=2 * 131072 * 13)
        generator = torch.Generator().manual_seed(0)
        for step in range(3):
            for number, weight in enumerate(optimizer.param_groups[0]["params"]):
                gradient = torch.randn(weight.shape, generator=generator).to(dtype)
                weight.grad = None if (number + step) % 4 == 0 else gradient
            optimizer.step()
            optimizer = then(optimizer) if step == 1 else optimizer
        ends.append(everything(nn.ParameterList(optimizer.param_groups[0]["params"]), optimizer))
    assert ends[0] == ends[1]
    assert bytes_on_disk(tmp_path) > 0


@pytest.mark.parametrize(
    ("policy", "room", "slow"),
    [
        ("cpu", 0, None),
        ("stride:1", 90_000, Op.READ),
        ("stride:1", 90_000, Op.FLUSH),
        ((2, 3), 0, Op.READ),
        ((2, 3), 0, Op.PREFETCH),
        ((1, 2), 90_000, Op.FLUSH),
        ((1, 3), 90_000, None),
        ((1, 3), 0, Op.WRITE),
    ],
)
def test_lanes_that_overtake_each_other(tmp_path: Path, policy: Any, room: int, slow: Op | None) -> None:
    """slow: the one that is. room: for state on the host. policy: a name, or the seed and slots of random plans."""
    late = jittery_device(5) if slow is None else LateDevice(lambda op: 4e-3 if op is slow else 0.0)
    ends = []
    for disk, device in ((None, EmulatedDevice(FAST, 10**9)), (tmp_path, late)):
        model, chosen = wide(torch.bfloat16), RandomPlans(*policy) if isinstance(policy, tuple) else policy
        optimizer = dos_adam(model.parameters(), disk, policy=chosen, device=device, host_memory=TWO_WINDOWS + room)
        optimizer.attach(model)
        for step in range(4):
            plan_anew(optimizer)
            train(model, optimizer, 1, first_step=step)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_streams_keep_the_order_of_the_schedule(tmp_path: Path) -> None:
    """What waits for a read is not overtaken by what comes after it."""
    model, late = wide(torch.bfloat16), LateDevice(lambda op: 4e-3 if op is Op.READ else 0.0)
    policy = "stride:1"
    optimizer = dos_adam(model.parameters(), tmp_path, policy=policy, device=late, host_memory=TWO_WINDOWS + 90_000)
    ended = ended_steps(optimizer)
    for step in range(4):
        train(model, optimizer, 1, first_step=step)
        optimizer.synchronize()
        schedule, ran = ended[-1].schedule, ended[-1].ran
        for op in (Op.READ, Op.PREFETCH, Op.FLUSH):
            spans = [span.subgroup for span in ran.spans if span.op is op]
            assert spans == [task.subgroup for task in schedule.tasks if task.op is op]


def test_state_four_times_both_budgets_trains_as_adamw(tmp_path: Path) -> None:
    model, twin = mlp(width=2000), mlp(width=2000)
    device_bytes, host_bytes = 40_000, 80_000
    assert 8 * sum(p.numel() for p in model.parameters()) > 4 * (device_bytes + host_bytes)
    optimizer = dos_adam(
        model.parameters(), tmp_path, policy="adaptive", memory_budget=device_bytes, host_memory=host_bytes
    )
    losses = train(model, optimizer, 6)
    theirs = train(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), 6)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert_close_ulp(model.parameters(), twin.parameters())
    assert optimizer.metrics()["host_held_bytes"] <= host_bytes
