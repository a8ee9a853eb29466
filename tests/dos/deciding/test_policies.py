"""Policies by name, plans remembered, and a profile that follows what is measured: scripted rates."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from dos import DOSAdam, EmulatedDevice
from dos.deciding.policies import AdaptivePolicy, Refinement, resolve_policy
from dos.step.pace import _Typical
from perfmodel import Placement, Plan, Timeline, Workload
from perfmodel.adaptive import adaptive
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import stride
from perfmodel.schedule import schedule
from perfmodel.scope import Scope
from perfmodel.simulate import makespan, serve, simulate
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
PLAN = stride(WORK, 2)
SCHEDULE = schedule(PLAN, WORK)


def steps(truth: HardwareProfile, believed: HardwareProfile, count: int, noise: float = 0.0) -> HardwareProfile:
    """What is believed after steps on a machine that in truth is another."""
    refinement, rng = Refinement(), random.Random(0)
    for _ in range(count):
        factor = 1 + rng.uniform(-noise, noise)
        believed = refinement.correct(believed, SCHEDULE, WORK, stretched(simulate(PLAN, WORK, truth), factor))
    return believed


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """Every span longer by the factor."""
    return Timeline(tuple(dataclasses.replace(s, end=s.start + s.duration * factor) for s in timeline.spans))


@pytest.mark.parametrize("rate", ["cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth", "gpu_update_rate"])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.7])
def test_a_lasting_change_is_followed_within_ten_steps(rate: str, factor: float) -> None:
    rates = [rate, f"{rate}_duplex"] if rate.endswith("bandwidth") else [rate]
    truth = BELIEVED.replace(**{name: getattr(BELIEVED, name) * factor for name in rates})
    found = steps(truth, BELIEVED, 10)
    for name in rates:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05)
    others = {"cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth", "gpu_update_rate"} - {rate}
    for name in others:
        assert getattr(found, name) == pytest.approx(getattr(BELIEVED, name), rel=0.06)


def test_a_saturated_host_is_put_down_to_its_memory() -> None:
    believed = dataclasses.replace(BELIEVED, host_bandwidth=40e9)
    truth = dataclasses.replace(believed, host_bandwidth=25e9)
    found = steps(truth, believed, 30)
    predicted, measured = (simulate(PLAN, WORK, p).makespan for p in (found, truth))
    assert predicted == pytest.approx(measured, rel=0.1)
    assert found.host_bandwidth < believed.host_bandwidth


def test_one_slow_step_and_noise_change_nothing() -> None:
    refinement, believed = Refinement(), BELIEVED
    normal = simulate(PLAN, WORK, BELIEVED)
    for step in range(40):
        shown = stretched(normal, 8.0) if step % 10 == 3 else normal
        believed = refinement.correct(believed, SCHEDULE, WORK, shown)
    assert believed is BELIEVED
    assert steps(BELIEVED, BELIEVED, 40, noise=0.04) is BELIEVED


def test_lanes_that_hardly_work_say_nothing() -> None:
    tiny = Workload.of_sizes([10] * 4)
    plan = stride(tiny, 2)
    refinement, believed = Refinement(), BELIEVED
    for _ in range(20):
        believed = refinement.correct(
            believed, schedule(plan, tiny), tiny, stretched(simulate(plan, tiny, BELIEVED), 100.0)
        )
    assert believed is BELIEVED


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


def test_what_fits_stays_on_the_device_and_nothing_travels() -> None:
    policy = AdaptivePolicy(BELIEVED)
    work = dataclasses.replace(WORK, peak_free_bytes=WORK.state_bytes, shared_free_bytes=WORK.state_bytes)
    assert set(policy(work).placements) == {Placement.GPU_RESIDENT}
    scarce = dataclasses.replace(work, peak_free_bytes=WORK.state_bytes - 1)
    assert set(policy(scarce).placements) != {Placement.GPU_RESIDENT}


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
        rng, policy, plans, pace = random.Random(seed), AdaptivePolicy(truth), [], _Typical()
        for _ in range(25):
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
        assert lost < 1.04
