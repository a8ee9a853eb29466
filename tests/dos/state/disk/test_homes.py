"""State at home on the host leaves for disk where other things need its room, and comes home again."""

from __future__ import annotations

import errno
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy, Job
from dos.machine import host_memory as host_memory_module
from dos.state.disk import DiskError
from dos.state.host_store import HostStore
from perfmodel import Op, Placement, Plan, Workload
from tests.support.devices import LateDevice
from tests.support.disk import SMALL, STATE_BYTES, TWO_WINDOWS, bytes_on_disk, dos_adam, fail_at, wide
from tests.support.fake_cuda import FakeCudaDevice, FakeStream, install
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import all_in
from tests.support.training import (
    FAST,
    Make,
    backward,
    bits,
    everything,
    leaving_early,
    maker,
    mlp,
    train,
)

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.mark.parametrize("loads", [False, True])
def test_nothing_is_on_disk_if_the_host_has_room(tmp_path: Path, loads: bool) -> None:
    """But not for windows besides."""
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, host_memory=17 * 20_400)
    if loads:
        donor = DOSAdam(model.parameters())
        train(model, donor, 1)
        optimizer.load_state_dict(donor.state_dict())
    train(model, optimizer, 2)
    plan = optimizer.plan()
    assert not plan.on_disk
    assert not {Op.READ, Op.WRITE} & {span.op for span in optimizer.timeline().spans}


@pytest.mark.parametrize("state", ["made in the first step", "read", "joined by more"])
def test_an_optimizer_spills_for_what_another_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Both were built before either took any, and users have not said how much each may take."""
    there, ends = 600_000, []
    held = weakref.WeakSet[HostStore]()
    monkeypatch.setattr(host_memory_module, "available_bytes", lambda: there - sum(store.nbytes for store in held))
    for disk in (tmp_path, None):
        pairs: list[tuple[nn.Module, DOSAdam]] = []
        for seed in range(2):
            model = wide(seed=seed)
            *rest, last = model.parameters()
            joins = state == "joined by more"
            optimizer = dos_adam([last] if joins else model.parameters(), disk, host_memory=None)
            held.add(session_of(optimizer).registry.host_store)
            pairs.append((model, optimizer))
            if joins:
                train(model, optimizer, 1)
                optimizer.add_param_group({"params": rest})
        for step in range(1, 3):
            for model, optimizer in pairs:
                if state == "read":
                    assert set(optimizer.state_dict()) == {"state", "param_groups"}
                train(model, optimizer, 1, first_step=step)
        ends.append([everything(*pair) for pair in pairs])
        if disk is not None:
            assert [o.metrics()["disk_held_bytes"] > 0 for _, o in pairs] == [False, True]
            assert sum(store.nbytes for store in held) <= there
            there = 1 << 30
    assert ends[0] == ends[1]


def test_a_limit_above_what_the_host_has_is_said_to_be_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, host_memory=1 << 40)
    monkeypatch.setattr(host_memory_module, "available_bytes", lambda: 100_000)
    with pytest.raises(MemoryError, match="choose less host_memory, so that more rests on disk, or"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("offload", [False, True])
def test_the_host_has_what_there_is_room_for(tmp_path: Path, offload: bool) -> None:
    """Whatever policy users have, which need not know of disks."""

    def policy(workload: Workload) -> Plan:
        n = len(workload.subgroups)
        return Plan((Placement.CPU,) * n, tuple(range(n)), 0)

    model, (state, gradient) = wide(), (12, 4)
    numel = sum(parameter.numel() for parameter in model.parameters())
    limit = TWO_WINDOWS + (state + gradient) * numel * 2 // 3
    optimizer = dos_adam(model.parameters(), tmp_path, policy=policy, host_memory=limit, offload_gradients=offload)
    train(model, optimizer, 3)
    assert bytes_on_disk(tmp_path) > 0
    assert 0 <= limit - optimizer.metrics()["host_held_bytes"] < (state if offload else state + gradient) * SMALL


@pytest.mark.parametrize("state_format", [None, "float32"])
def test_the_process_takes_what_users_allow(tmp_path: Path, state_format: str | None) -> None:
    """Within a fifth, where homes on the host are spread over the state, and read by user code."""
    weights = [nn.Parameter(torch.zeros(9_000_000, dtype=torch.bfloat16))]
    device, limit = EmulatedDevice(FAST, capacity=10**9), 64 << 20
    optimizer = DOSAdam(
        weights, policy="cpu", disk=tmp_path, host_memory=limit, device=device, state_format=state_format
    )
    weights[0].grad = torch.ones_like(weights[0])
    before = anonymous_bytes()
    optimizer.step()
    assert optimizer.state_dict()
    assert anonymous_bytes() - before <= 1.2 * limit
    assert bytes_on_disk(tmp_path) > limit / 2
    assert limit / 2 < optimizer.metrics()["host_held_bytes"] <= limit


def anonymous_bytes() -> int:
    """Of the memory that this process cannot give back."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def test_room_on_disk_goes_back_once_state_has_come_home_for_good(tmp_path: Path) -> None:
    """As where other state has left the host for the device."""
    residents, model = set[int](), wide()

    def policy(workload: Workload) -> Plan:
        n = len(workload.subgroups)
        placements = (Placement.GPU_RESIDENT if i in residents else Placement.CPU for i in range(n))
        return Plan(tuple(placements), tuple(range(n)), 0)

    host_memory = TWO_WINDOWS + 3 * STATE_BYTES // 4
    optimizer = dos_adam(model.parameters(), tmp_path, policy=policy, host_memory=host_memory)
    train(model, optimizer, 3)
    plan = optimizer.plan()
    assert plan.on_disk
    before = optimizer.metrics()["disk_held_bytes"]
    residents |= {i for i in range(len(plan)) if i not in plan.on_disk}
    plan_anew(optimizer)
    train(model, optimizer, 1, first_step=3)
    train(model, optimizer, 6, first_step=4)
    assert 0 < optimizer.metrics()["disk_held_bytes"] < before


@pytest.mark.parametrize(("offload", "reads"), [(False, True), (True, False), (True, True)])
@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch takes no gradient of another dtype")
def test_homes_leave_for_disk_where_gradients_become_wider(tmp_path: Path, offload: bool, reads: bool) -> None:
    ends, held = [], [0]
    for disk in (None, tmp_path):
        model = mlp(torch.bfloat16, width=2000)
        numel = sum(p.numel() for p in model.parameters())
        room = 2 * offload + 7  # half of the state is at home
        optimizer = dos_adam(
            model.parameters(), disk, offload_gradients=offload, host_memory=TWO_WINDOWS + room * numel
        )
        for step in range(4):
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad_dtype = torch.float32
            views = [entry["exp_avg"] for entry in optimizer.state.values()] if reads else []
            backward(model, step, micro_batches=2)
            for view in views:
                view.mul_(0.5)
            if views:  # some state is on disk already, where views can only be read
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            optimizer.zero_grad()
            if disk is not None:
                held.append(bytes_on_disk(disk))
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]
    assert 0 < held[2] < held[4]


def trained_on(
    model: nn.Module, optimizer: DOSAdam, views: Sequence[Tensor], first_step: int, *, loads: bool = False
) -> list[bytes]:
    """What there is in the end, if user code writes to these views between backward and the step, and trains on.

    loads: whether it loads what it has written, as it has to where state was on disk when it read it.
    """
    for view in views:
        view.mul_(0.5)
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 2, first_step=first_step)
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("joins", "reads"), [("group", True), ("unfrozen", True), ("unfrozen", False), ("group", False)]
)
def test_homes_leave_for_disk_where_gradients_of_what_joins_need_their_room(
    tmp_path: Path, joins: str, reads: bool
) -> None:
    """In the middle of backward. reads: user code has views of state meanwhile, and writes to them after backward."""
    ends = []
    for disk in (None, tmp_path):
        model = mlp(width=2000)
        *rest, last = model.parameters()
        first = [last]
        for parameter in rest:
            parameter.requires_grad_(joins == "group")
        optimizer = dos_adam(
            first if joins == "group" else model.parameters(),
            disk,
            offload_gradients=True,
            host_memory=TWO_WINDOWS + 4 * sum(p.numel() for p in model.parameters()),
        )
        train(model, optimizer, 2)
        assert disk is None or not bytes_on_disk(disk)
        if joins == "group":
            optimizer.zero_grad()
            model.zero_grad()
            optimizer.add_param_group({"params": rest})
        for parameter in rest:
            parameter.requires_grad_(True)
        views = [optimizer.state[parameter]["exp_avg"] for parameter in first] if reads else []
        backward(model, 5)
        backward(model, 6)
        ends.append(trained_on(model, optimizer, views, first_step=7))
    assert ends[0] == ends[1]
    assert bytes_on_disk(tmp_path) > 0


@pytest.mark.parametrize("fails", [None, MemoryError, DiskError])
def test_homes_leave_for_disk_where_windows_need_their_room(
    tmp_path: Path, fails: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had it while the device had the other state, which comes back from disk where user code has read it.

    fails: what is raised at first, as the system has no memory for windows, or by the second write. What user code
    writes before it tries again counts, as it loads it.
    """

    def policy(workload: Workload) -> Plan:
        n = len(workload.subgroups)  # gradients of the last three leave for their homes in backward
        return Plan((Placement.GPU_RESIDENT,) * (n - 3) + (Placement.CPU,) * 3, tuple(range(n)), 0)

    ends = []
    for disk in (None, tmp_path):
        model = wide()
        device = EmulatedDevice(FAST, capacity=4 * 8 * SMALL)  # the other 6 subgroups have no room there
        host_memory = 17 * 6 * SMALL
        optimizer = dos_adam(model.parameters(), disk, policy=policy, host_memory=host_memory, device=device)
        train(model, optimizer, 2)
        assert disk is None or not bytes_on_disk(disk)
        backward(model, 2)
        views = [entry["exp_avg"] for entry in optimizer.state.values()]
        if fails and disk is not None:
            with monkeypatch.context() as patch:
                if fails is MemoryError:
                    patch.setattr(host_memory_module, "available_bytes", lambda: 0)
                else:
                    fail_at(patch, "write", 2, DiskError(errno.EIO, "the cable came off"))
                with pytest.raises(fails):
                    optimizer.step()
        ends.append(trained_on(model, optimizer, views, first_step=3, loads=True))
    assert ends[0] == ends[1]
    assert bytes_on_disk(tmp_path) > 0


def test_state_that_has_left_for_disk_is_loaded_by_the_views_of_before(tmp_path: Path) -> None:
    """With amsgrad, for which memory is made anew: what they show is copied first."""
    ends = []
    for disk in (None, tmp_path):
        model = mlp(width=2000)
        *rest, last = model.parameters()
        nbytes = TWO_WINDOWS + 8 * sum(p.numel() for p in model.parameters())
        optimizer = dos_adam([last], disk, offload_gradients=True, host_memory=nbytes)
        train(model, optimizer, 2)
        entry = dict(optimizer.state[last])
        model.zero_grad()
        optimizer.add_param_group({"params": rest})
        train(model, optimizer, 2, first_step=2)
        optimizer.zero_grad()
        groups = [{**group, "amsgrad": True} for group in optimizer.param_groups]
        groups[0]["params"], groups[1]["params"] = [0], list(range(1, 1 + len(rest)))
        entry["max_exp_avg_sq"] = torch.ones_like(last)
        optimizer.load_state_dict({"state": {0: entry}, "param_groups": groups})
        train(model, optimizer, 2, first_step=4)
        ends.append(everything(model, optimizer))
        assert disk is None or bytes_on_disk(disk) > 0
    assert ends[0] == ends[1]


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


class _Unpinning(LateDevice):
    """Gradients are late. arrived: whether each was there when the memory that it was to come to was given back."""

    def __init__(self) -> None:
        super().__init__(lambda op: 10e-3 * (op is Op.GRADIENT))
        self.arrived: list[bool] = []
        self.jobs: list[tuple[int, Any]] = []

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        job = super().copy(op, subgroup, copies, after)
        self.jobs += [(destination.data_ptr(), job) for destination, _ in copies if op is Op.GRADIENT]
        return job

    def unpin(self, tensor: Tensor, unused: Tensor) -> None:
        first, end = unused.data_ptr(), unused.data_ptr() + unused.nbytes
        self.arrived += [job.future.done() for address, job in self.jobs if first <= address < end]
        super().unpin(tensor, unused)


def test_gradients_that_left_for_a_home_which_goes_to_disk_are_sent_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    device = _Unpinning()
    settings = {"subgroup_size": 2048, "disk": tmp_path, "host_memory": 400_000, "device": device}
    with torch.random.fork_rng():
        expected = bits(_with_a_newcomer(DOSAdam))
    with leaving_early() as early:
        found = bits(_with_a_newcomer(maker("cpu", **settings)))
    assert early
    assert found == expected
    assert device.arrived
    assert all(device.arrived), "the system was given memory to which gradients were still on their way"


def test_homes_of_what_comes_to_the_device_are_given_back_by_steps_that_only_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = install(monkeypatch, None)
    runtime.caller = FakeStream(runtime)
    parameter = nn.Parameter(torch.ones(16384))
    settings = {"subgroup_size": 2048, "disk": tmp_path, "host_memory": 1_000_000}
    resident = functools.partial(all_in, Placement.GPU_RESIDENT)
    optimizer = DOSAdam([parameter], device=FakeCudaDevice(runtime), policy=resident, **settings)
    held = []
    for step in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step == 1:
            optimizer.state_dict()
        optimizer.synchronize()
        held.append(optimizer.metrics()["host_held_bytes"])
    assert held[0] == held[-1] == 0
