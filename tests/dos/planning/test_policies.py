"""Policies by name, and plans remembered: scripted rates."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from dos import DOSAdam, EmulatedDevice
from dos.planning.policies import AdaptivePolicy, resolve_policy
from dos.step.pace import Typical
from perfmodel import Placement, Plan, Timeline, Workload
from perfmodel.adaptive import adaptive
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import stride
from perfmodel.schedule import schedule
from perfmodel.scope import Scope
from perfmodel.simulate import makespan, serve, simulate
from tests.support.inside import session_of
from tests.support.training import FAST, mlp, profile, train

BELIEVED = profile(
    host_bandwidth=1e15,
    cpu_update_rate=1e9,
    h2d_bandwidth=10e9,
    d2h_bandwidth=10e9,
    h2d_bandwidth_duplex=9e9,
    d2h_bandwidth_duplex=9e9,
    gpu_update_rate=50e9,
)
WORK = Workload.of_sizes([10**7] * 20)


def test_the_adaptive_policy_plans_anew_on_what_it_learns() -> None:
    policy = AdaptivePolicy(BELIEVED)
    work = Workload.of_sizes([10**7] * 40, peak_free_bytes=0, update_free_bytes=4 * 12e7)
    before = policy(work)
    assert policy(work) is before
    truth = dataclasses.replace(BELIEVED, cpu_update_rate=BELIEVED.cpu_update_rate / 4)
    for _ in range(12):
        plan = policy(work)
        policy.observe(schedule(plan, work), work, simulate(plan, work, truth))
    after = policy(work)
    assert len(after.served(Placement.CPU)) < len(before.served(Placement.CPU))


def test_no_plan_chooses_how_long_gradients_may_leave() -> None:
    """One that sends few, late in backward, made the next one believe that backward was short."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, capacity=10**7))
    train(model, optimizer, 2)
    on_device = session_of(optimizer).assembly.on_device
    pace, found = on_device.decisions.pace, []
    for left_s in (0.0, 0.01, 0.1):
        pace.rest.restart(0.12)
        pace.backward.restart(left_s)
        found.append(on_device.facts().workload.backward_s)
    assert found == [0.0, 0.12, 0.12], "0: none can leave"


def test_other_policies_are_asked_once_for_each_workload() -> None:
    asked = []

    def policy(work: Workload) -> Plan:
        asked.append(work)
        return stride(work, 2)

    model = mlp()
    device = EmulatedDevice(FAST, capacity=10**7)
    optimizer = DOSAdam(model.parameters(), policy=policy, memory_budget=10**5, subgroup_size=200, device=device)
    train(model, optimizer, 8)
    assert all(a != b for a, b in itertools.pairwise(asked))
    assert len(asked) < 8, "only the length of backward has changed, in coarse steps"


def test_names() -> None:
    assert resolve_policy("stride:3")(WORK) == stride(WORK, 3)
    assert isinstance(resolve_policy("adaptive"), AdaptivePolicy)
    assert resolve_policy("adaptive") is not resolve_policy("adaptive"), "each optimizer learns for itself"
    assert set(resolve_policy(0)(WORK).placements) == {Placement.GPU_RESIDENT}


def noisy(rng: random.Random, truth: HardwareProfile, share: float) -> HardwareProfile:
    """The rates of one step, each off by itself."""
    rates = ("host_bandwidth", "cpu_update_rate", "gpu_update_rate", "h2d_bandwidth", "d2h_bandwidth")
    found = {name: getattr(truth, name) * rng.lognormvariate(0, share) for name in rates}
    return truth.replace(**(found | {f"{name}_duplex": found[name] for name in rates[3:]}))


@pytest.mark.parametrize(("share", "changes"), [(0.05, 1), (0.2, 4)])
def test_steady_steps_hardly_change_the_plan(share: float, changes: int) -> None:
    """Measured with noise. And what is believed in the end costs little where none of it is true."""
    truth = HardwareProfile.builtin("rtx_4090_desktop")
    for seed in range(3):
        rng, policy, plans, pace = random.Random(seed), AdaptivePolicy(truth), [], Typical()
        for _ in range(50):
            pace.add(0.05 * rng.lognormvariate(0, share))
            work = Workload.of_sizes([10**7] * 32, peak_free_bytes=15 * 10**8, shared_free_bytes=15 * 10**8)
            work = dataclasses.replace(work, backward_s=pace.seconds)
            plans.append(policy(work))
            issued = schedule(plans[-1], work, Scope.beside(work))
            spans = serve(issued, work, noisy(rng, truth, share)).spans
            policy.observe(issued, work, Timeline.of(span for span in spans if span.subgroup is not None))
        assert sum(a != b for a, b in itertools.pairwise(plans[5:])) <= changes
        scope = Scope.beside(work)
        lost = makespan(plans[-1], work, truth, scope) / makespan(adaptive(work, truth), work, truth, scope)
        assert lost < 1.06, "two subgroups on the other side"
