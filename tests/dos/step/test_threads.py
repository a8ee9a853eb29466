"""The number of threads with which the CPU lane updates, on a device of 16 cores made of fakes."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from dos import DOSAdam
from dos.kernels import update
from dos.machine import threads
from dos.planning.policies import AdaptivePolicy, Policy
from dos.step.iteration import Iteration
from dos.step.late_host import LateHost, StepTimes
from dos.step.pace import Typical
from perfmodel import Placement, Plan, Workload
from perfmodel.hardware import ThreadRates
from perfmodel.policies import cpu_only, stride
from perfmodel.workload import HostTimes
from tests.support.fake_cuda import FakeCudaDevice, Runtime
from tests.support.inside import session_of
from tests.support.training import FAST, backward, bits, bits_on_host, mlp, train

MEASURED = FAST.replace(
    cpu_threads=5, by_threads=tuple(ThreadRates(n, n * 1e9, FAST.host_bandwidth, 1.0, 1.0) for n in (1, 5, 9))
)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(threads, "_share_of_process", lambda: 16)
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of threads of updates on the host."""
    found, count = set[int](), update._threads

    def noted(wanted: int) -> int:
        chosen = count(wanted)
        if threading.current_thread().name.startswith("dos-cpu"):
            found.add(chosen)
        return chosen

    monkeypatch.setattr(update, "_threads", noted)
    return found


def trained(
    runtime: Runtime,
    policy: str | float | Policy,
    *,
    updates: str = "step",
    steps: int = 3,
    attach: bool = True,
    **options: object,
) -> DOSAdam:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy=policy, device=FakeCudaDevice(runtime), subgroup_size=300, **options)
    if attach:
        optimizer.attach(model, updates=updates)
    train(model, optimizer, steps)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits_on_host(steps=steps)
    return optimizer


@pytest.mark.parametrize("policy", ["cpu", 0.5, "stride:2"])
@pytest.mark.parametrize("updates", ["step", "backward"])
def test_a_fixed_policy_uses_the_threads_of_the_profile(
    policy: str | float, updates: str, runtime: Runtime, used: set[int]
) -> None:
    optimizer = trained(runtime, policy, updates=updates, profile=FAST.replace(cpu_threads=5))
    assert used == {5}
    assert optimizer.plan().threads == 5
    assert "5 CPU threads" in optimizer.explain()


def test_without_a_profile_cores_are_left_to_others(runtime: Runtime, used: set[int]) -> None:
    assert trained(runtime, "cpu").plan().threads == 0
    assert used == {12}


@pytest.mark.parametrize("policy", ["cpu", "adaptive"])
def test_the_user_s_number_holds(
    policy: str, runtime: Runtime, used: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "14")
    torch.set_num_threads(14)
    optimizer = trained(runtime, policy, profile=MEASURED, memory_budget=0)
    assert (used, optimizer.plan().threads) == ({14}, 14)
    profile = session_of(optimizer).assembly.on_device.decisions.profile
    assert policy == "cpu" or (profile.cpu_threads, profile.cpu_update_rate) == (14, 9e9), "it plans with no other"


class Numbered(AdaptivePolicy):
    """Updates all on the CPU, with another number of threads by each plan."""

    def __init__(self) -> None:
        super().__init__(MEASURED)
        self.numbers = itertools.count(2)

    def __call__(self, workload: Workload) -> Plan:
        return dataclasses.replace(cpu_only(workload), threads=next(self.numbers))


def test_each_plan_has_its_own_number(runtime: Runtime, used: set[int]) -> None:
    optimizer = trained(runtime, Numbered())
    assert len(used) > 1
    assert optimizer.plan().threads == max(used)


def test_the_host_s_part_is_learned_beside_updates_and_planned_with(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = list[tuple[float, ...]]()
    monkeypatch.setattr(LateHost, "add", lambda host, *seen: learned.append(seen))
    optimizer = trained(runtime, Numbered(), updates="backward")
    assert learned
    for lasted_s, beside_s, _, slowdown in learned:
        assert 0 <= beside_s <= lasted_s
        assert slowdown in [FAST.replace(cpu_threads=n).slowdown for n in (2, 3, 4)], "of its own plan"
    decisions = session_of(optimizer).assembly.on_device.decisions
    decisions.late_host.share = 0.5
    facts = session_of(optimizer).assembly.on_device.facts()
    assert facts.workload.host_share == 0.5


class Strided(AdaptivePolicy):
    """Streams every second subgroup."""

    def __call__(self, workload: Workload) -> Plan:
        return stride(workload, 2, slots=1)


@pytest.mark.parametrize("attach", [True, False])
def test_what_a_step_takes_the_host_is_learned_and_planned_with(
    attach: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not attached without the waits for updates: here of all else than what is counted."""
    learned = list[tuple[float, tuple[tuple[float, int], ...]]]()
    monkeypatch.setattr(StepTimes, "add", lambda times, slowdown, *took: learned.append((slowdown, took)))
    monkeypatch.setattr(Typical, "add", lambda typical, *_: setattr(typical, "seconds", 1.0))  # no time passes
    monkeypatch.setattr(Iteration, "blocked_s", lambda iteration, since, until: until - since if not attach else 0.0)
    optimizer = trained(runtime, Strided(FAST), steps=6, attach=attach)
    on_cpu, streamed = (optimizer.plan().placements.count(p) for p in (Placement.CPU, Placement.GPU_STREAMED))
    assert learned
    assert on_cpu > 1 < streamed
    for slowdown, (handing, queuing, rest) in learned:
        assert slowdown == FAST.slowdown
        assert handing[1] == on_cpu
        assert queuing[1] in (3 * streamed, 3 * streamed - 1), "backward may have filled the slot"
        assert rest[1] == 1
        assert min(handing[0], queuing[0]) >= 0
        assert rest[0] >= 0 if attach else rest[0] == pytest.approx(-handing[0] - queuing[0])
    on_device = session_of(optimizer).assembly.on_device
    on_device.decisions.step_times.times = HostTimes(turn=1e-3)
    assert on_device.facts().workload.host == HostTimes(turn=1e-3)


def test_how_late_the_host_is_is_learned_where_gradients_accumulate(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first forward behind the step, whose seconds are those of one micro-batch."""
    learned = list[tuple[float, ...]]()
    monkeypatch.setattr(LateHost, "add", lambda host, *seen: learned.append(seen))
    monkeypatch.setattr(Typical, "add", lambda typical, *_: setattr(typical, "seconds", 1.0))
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy=Strided(FAST), device=FakeCudaDevice(runtime), subgroup_size=300)
    optimizer.attach(model)
    for step in range(6):
        backward(model, step, micro_batches=2)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert learned
    assert {alone_s for _, _, alone_s, _ in learned} == {1.0}
