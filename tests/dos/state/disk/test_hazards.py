"""What is under way while state goes to disk is neither lost nor overwritten."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from perfmodel import Op, Placement, Plan, SubgroupLoad, Workload
from perfmodel.plan import Tier
from perfmodel.schedule import SubgroupState, schedule_step
from tests.support.fake_cuda import FakeCudaDevice, FakeStream, install
from tests.support.random_plans import all_in
from tests.support.training import Make, bits, leaving_early, maker


def _with_a_newcomer(make: Make) -> list[Tensor]:
    """Parameters after steps, from the third of which on others are updated, too, whose state is larger."""
    old, new = nn.Parameter(torch.randn(32768)), nn.Parameter(torch.randn(16384))
    optimizer = make([old])
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [new], "amsgrad": True})
        ((old.sin() * step).sum() + (new.cos().sum() if step >= 2 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [old, new]


def test_gradients_that_left_for_a_home_which_goes_to_disk_are_sent_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"subgroup_size": 2048, "disk": tmp_path, "host_memory": 400_000}
    with torch.random.fork_rng():
        expected = bits(_with_a_newcomer(DOSAdam))
    with leaving_early() as early:
        found = bits(_with_a_newcomer(maker("cpu", **settings)))
    assert early
    assert found == expected


def test_state_may_be_in_more_windows_than_there_are_to_be() -> None:
    """Gradients that add up on the host from some step on leave room for fewer."""
    load = SubgroupLoad(10, 20, 20, 120, host_bytes=160)
    work = Workload((load,) * 2, host_free_bytes=0, windows=1, reverses=True)
    found = SubgroupState(Tier.HOST, Tier.DEVICE, 10, 20, 20)
    plan = Plan((Placement.CPU,) * 2, (0, 1), 0, on_disk=frozenset({0, 1}))
    made = schedule_step(plan, work, [found._replace(window=1), found._replace(state=Tier.DISK)], [])
    assert made.kept == {0: 1, 1: 0}
    assert [task.subgroup for task in made.tasks if task.op is Op.READ] == [1]


def test_homes_of_what_comes_to_the_device_are_given_back_by_steps_that_only_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = install(monkeypatch, None)
    runtime.caller = FakeStream(runtime)
    parameter = nn.Parameter(torch.ones(16384))
    settings = {"subgroup_size": 2048, "disk": tmp_path, "host_memory": 1_000_000}
    resident = functools.partial(all_in, Placement.GPU_RESIDENT)
    optimizer = DOSAdam([parameter], device=FakeCudaDevice(runtime), policy=resident, **settings)  # type: ignore[arg-type]
    host = optimizer._session.registry.host_store
    for step in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step == 1:
            optimizer.state_dict()
            assert host.nbytes
    optimizer.synchronize()
    assert not host.nbytes
