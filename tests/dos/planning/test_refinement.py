"""The believed profile stays near the truth; what was not of the schedule teaches nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.planning.policies import AdaptivePolicy, Refinement
from perfmodel import Lane, Op, Placement, Plan, Span, Timeline, Workload, lanes
from perfmodel.hardware import RATES, HardwareProfile, Provenance, ThreadRates
from perfmodel.lanes import Stream, shared_speeds
from perfmodel.policies import cpu_only, static_ratio, stride
from perfmodel.schedule import schedule
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.simulate import serve, simulate
from perfmodel.tasks import Schedule, Task
from tests.support.inside import plan_anew
from tests.support.training import FAST, ended_steps, loss_of, mlp, profile, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

TRUTH = profile(
    host_bandwidth=60e9,
    cpu_update_rate=1e9,
    h2d_bandwidth=10e9,
    d2h_bandwidth=10e9,
    h2d_bandwidth_duplex=6e9,
    d2h_bandwidth_duplex=6e9,
    gpu_update_rate=50e9,
)
WORK = Workload.of_sizes([10**7] * 12)
PLAN = stride(WORK, 3)
LEARNT = ("host_bandwidth", "cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth", "gpu_update_rate")


def believed_after(
    timeline: Timeline,
    plan: Plan = PLAN,
    work: Workload = WORK,
    scope: Scope = UPDATE_ALONE,
    *,
    believed: HardwareProfile = TRUTH,
    steps: int = 20,
) -> HardwareProfile:
    """What is believed after so many such steps. believed: before them."""
    refinement, issued = Refinement(), schedule(plan, work, scope)
    for _ in range(steps):
        believed = refinement.correct(believed, issued, work, timeline)
    return believed


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """Every span longer by the factor."""
    return Timeline(tuple(dataclasses.replace(s, end=s.start + s.duration * factor) for s in timeline.spans))


@pytest.mark.parametrize("rate", LEARNT[1:])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.7])
def test_a_lasting_change_is_followed_within_ten_steps(rate: str, factor: float) -> None:
    roomy = TRUTH.replace(host_bandwidth=1e15, h2d_bandwidth_duplex=9e9, d2h_bandwidth_duplex=9e9)
    rates = [rate, f"{rate}_duplex"] if rate.endswith("bandwidth") else [rate]
    actual = roomy.replace(**{name: getattr(roomy, name) * factor for name in rates})
    found = believed_after(simulate(PLAN, WORK, actual), believed=roomy, steps=10)
    for name in (*LEARNT[1:], *rates):
        assert getattr(found, name) == pytest.approx(getattr(actual, name), rel=0.05 if name in rates else 0.06)


def test_a_step_by_other_threads_corrects_the_rates_of_each_number_alike() -> None:
    """Whether the memory of the host can serve all is asked of those threads: one asks for less than there is."""
    few, many = (ThreadRates(n, n * 2e8, 60e9, 1.0, 1.0) for n in (1, 10))
    believed = TRUTH.replace(cpu_threads=10, cpu_update_rate=2e9, by_threads=(few, many))
    measured = simulate(PLAN, WORK, believed.with_threads(1).replace(cpu_update_rate=1.4e8))
    found, refinement, issued = believed, Refinement(), schedule(PLAN, WORK)
    for _ in range(20):
        found = refinement.correct(found, issued, WORK, measured, threads=1)
    assert found.with_threads(1).cpu_update_rate == pytest.approx(1.4e8, rel=0.05)
    assert found.cpu_update_rate == pytest.approx(1.4e9, rel=0.05)
    assert found.host_bandwidth == believed.host_bandwidth


def test_a_saturated_host_is_put_down_to_its_memory() -> None:
    believed, actual = (TRUTH.replace(host_bandwidth=rate) for rate in (40e9, 25e9))
    found = believed_after(simulate(PLAN, WORK, actual), believed=believed, steps=30)
    predicted, measured = (simulate(PLAN, WORK, machine).makespan for machine in (found, actual))
    assert predicted == pytest.approx(measured, rel=0.1)
    assert found.host_bandwidth < believed.host_bandwidth


def test_single_slow_steps_and_noise_change_nothing() -> None:
    refinement, believed, rng = Refinement(), TRUTH, random.Random(0)
    for step in range(40):
        factor = 8.0 if step % 10 == 3 else 1 + rng.uniform(-0.04, 0.04)
        shown = stretched(simulate(PLAN, WORK, TRUTH), factor)
        believed = refinement.correct(believed, schedule(PLAN, WORK), WORK, shown)
    assert believed is TRUTH


def test_what_differs_from_plan_to_plan_is_not_followed_for_ever() -> None:
    """By one plan lanes are 8% faster than believed, by the other 8% slower. Then all is half as fast."""
    refinement, believed, found = Refinement(), TRUTH, list[HardwareProfile]()
    for turn in range(12):
        issued, shown = schedule(PLAN, WORK), simulate(PLAN, WORK, TRUTH)
        if turn % 2:
            issued, shown = schedule(cpu_only(WORK), WORK), simulate(cpu_only(WORK), WORK, TRUTH)
        for _ in range(2 * Refinement.REMEMBERED):
            believed = refinement.correct(believed, issued, WORK, stretched(shown, 1.08 if turn % 2 else 0.92))
            found.append(believed)
    assert len(set(found)) <= 5
    assert {*found[len(found) // 2 :]} == {believed}, "it has settled"
    for _ in range(2 * Refinement.LAST):
        believed = refinement.correct(believed, issued, WORK, simulate(cpu_only(WORK), WORK, TRUTH.scaled(0.5)))
    assert believed.cpu_update_rate == pytest.approx(TRUTH.cpu_update_rate / 2, rel=0.1)


def test_lanes_that_hardly_work_say_nothing() -> None:
    tiny = Workload.of_sizes([10] * 4)
    plan = stride(tiny, 2)
    assert believed_after(stretched(simulate(plan, tiny, TRUTH), 100.0), plan, tiny) is TRUTH


def sent_again(timeline: Timeline) -> Timeline:
    """The gradients of every micro-batch, or gradients that were changed before the step."""
    early = [
        dataclasses.replace(s, start=s.start - n, end=s.end - n)
        for s in timeline.spans
        if s.op is Op.GRADIENT
        for n in range(1, 8)
    ]
    return Timeline.of([*timeline.spans, *early])


def fetched_with_gradients(timeline: Timeline) -> Timeline:
    """Offloaded gradients come up again after their subgroup's state."""
    return Timeline.of([*timeline.spans, *(s for s in timeline.spans if s.op is Op.PREFETCH)])


def dropped(timeline: Timeline) -> Timeline:
    """State that was prefetched for another plan, in vain."""
    return Timeline.of([*timeline.spans, Span(Lane.H2D, Op.PREFETCH, 0, -3.0, -1.0)])


def without_half(timeline: Timeline) -> Timeline:
    """Half of the subgroups have no gradient."""
    return Timeline.of(s for s in timeline.spans if s.subgroup is None or s.subgroup % 2)


def updated_elsewhere(timeline: Timeline) -> Timeline:
    """A streamed subgroup found no memory: the host updated it, for as long as ten others."""
    first = PLAN.served(Placement.GPU_STREAMED)[0]
    kept = [s for s in timeline.spans if s.subgroup != first]
    return Timeline.of(
        [*kept, Span(Lane.CPU, Op.UPDATE, first, 1.0, 1.1), Span(Lane.D2H, Op.GRADIENT, first, 1.0, 1.1)]
    )


@pytest.mark.parametrize("seen", [sent_again, fetched_with_gradients, dropped, without_half, updated_elsewhere])
def test_spans_that_were_not_predicted_teach_nothing(seen: Callable[[Timeline], Timeline]) -> None:
    assert believed_after(seen(simulate(PLAN, WORK, TRUTH))) is TRUTH


def test_the_device_is_learnt_of_though_the_host_did_more_than_predicted() -> None:
    """Nothing on the host slows the device's own lane; the host's lanes slow each other."""
    slower = dataclasses.replace(TRUTH, gpu_update_rate=TRUTH.gpu_update_rate / 2, cpu_update_rate=2e8)
    believed = believed_after(fetched_with_gradients(simulate(PLAN, WORK, slower)))
    assert believed.gpu_update_rate == pytest.approx(slower.gpu_update_rate, rel=0.05)
    assert dataclasses.replace(believed, gpu_update_rate=TRUTH.gpu_update_rate) == TRUTH


def beside_backward(plan: Plan, backward_s: float) -> Timeline:
    """What an engine sees when gradients leave beside a backward of that length."""
    work = dataclasses.replace(WORK, backward_s=backward_s)
    timeline = simulate(plan, work, TRUTH, Scope(Phase.OVERLAPPED))
    return Timeline.of(
        dataclasses.replace(s, start=s.start - backward_s, end=s.end - backward_s)
        for s in timeline.spans
        if s.subgroup is not None
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("plan", [PLAN, cpu_only(WORK)], ids=["stride", "cpu"])
def test_gradients_that_leave_beside_backward_meet_no_other_copies(plan: Plan, known: bool) -> None:
    """They run faster than beside uploads, which says nothing about the link."""
    seen = beside_backward(plan, 0.5)
    work = dataclasses.replace(WORK, backward_s=0.5 if known else 0.0)
    assert believed_after(seen, plan, work, Scope(Phase.OVERLAPPED)) is TRUTH


DRIVE = dataclasses.replace(
    TRUTH,
    disk_read_bandwidth=6e9,
    disk_write_bandwidth=4e9,
    disk_read_bandwidth_duplex=4e9,
    disk_write_bandwidth_duplex=3e9,
)
"""Updates, both links and the disk want 55 GB/s of host DRAM while all of them run."""
ON_DISK = Schedule(
    (
        *schedule(PLAN, WORK).tasks,
        *(Task(Op.READ, Stream.READ, i, load.state_bytes) for i, load in enumerate(WORK.subgroups)),
        *(Task(Op.WRITE, Stream.WRITE, i, load.state_bytes) for i, load in enumerate(WORK.subgroups)),
    )
)
"""All state is read and written besides."""
DISK_RATES = [name for name in RATES if name.startswith("disk_")]


def lower(profile: HardwareProfile, **by: float) -> HardwareProfile:
    """With the rates whose names begin so divided by these factors."""
    factors = {name: factor for name in RATES for prefix, factor in by.items() if name.startswith(prefix)}
    return profile.replace(**{name: getattr(profile, name) / factor for name, factor in factors.items()})


def believed_of_drive(actual: HardwareProfile, believed: HardwareProfile = DRIVE) -> HardwareProfile:
    """What is believed after 60 steps on the actual machine."""
    refinement, timeline = Refinement(), serve(ON_DISK, WORK, actual)
    for _ in range(60):
        believed = refinement.correct(believed, ON_DISK, WORK, timeline)
    return believed


@pytest.mark.parametrize(("reads", "writes"), [(0.4, 3.0), (1.0, 0.4), (3.0, 1.0), (3.0, 3.0)])
def test_the_disk_is_learnt_as_links_are(reads: float, writes: float) -> None:
    actual = lower(DRIVE, disk_read=reads, disk_write=writes)
    believed = believed_of_drive(actual)
    for name in DISK_RATES:
        assert getattr(believed, name) == pytest.approx(getattr(actual, name), rel=0.07)
    assert believed == DRIVE.replace(**{name: getattr(believed, name) for name in DISK_RATES})


@pytest.mark.parametrize("host", [1.0, 1.5])
@pytest.mark.parametrize("drive", [0.5, 3.0])
def test_a_drive_says_nothing_about_host_memory(drive: float, host: float) -> None:
    """Where that is scarce, a slow drive holds nothing up, and a fast one takes more of it for less long."""
    scarce = DRIVE.replace(host_bandwidth=40e9)
    actual = lower(scarce, disk=drive, host=host)
    believed = believed_of_drive(actual, scarce)
    for lane in Lane:
        measured, predicted = (serve(ON_DISK, WORK, machine).busy(lane) for machine in (actual, believed))
        assert measured == pytest.approx(predicted, rel=Refinement.TOLERANCE)
    assert believed.host_bandwidth == pytest.approx(actual.host_bandwidth, rel=0.15)
    if host == 1.0:
        assert believed.cpu_update_rate == pytest.approx(actual.cpu_update_rate, rel=0.05)


CALIBRATED = DRIVE.replace(host_bandwidth=45e9, provenance=Provenance("measured"))
"""Of 55 GB/s that are wanted."""


@st.composite
def served_otherwise(draw: st.DrawFn) -> tuple[Schedule, Timeline]:
    """A step on the calibrated machine, or one that is slower or faster, where host DRAM is shared by another rule."""
    issued = draw(st.sampled_from([schedule(PLAN, WORK), schedule(cpu_only(WORK), WORK), ON_DISK]))
    factor = draw(st.sampled_from([0.3, 1.0, 1.0, 1.0, 3.0]))
    weights = draw(st.lists(st.floats(0.01, 100), min_size=6, max_size=6))
    share = draw(st.sampled_from([1.0, 0.8]))

    def rule(demands: Sequence[float], _: Sequence[float], capacity: float) -> list[float]:
        return shared_speeds(demands, weights[: len(demands)], capacity * share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "shared_speeds", rule)
        return issued, serve(issued, WORK, CALIBRATED.scaled(factor))


@given(st.lists(served_otherwise(), min_size=1, max_size=2))
@settings(max_examples=20)
def test_no_calibrated_rate_moves_far_or_above_what_a_lane_alone_has(steps: list[tuple[Schedule, Timeline]]) -> None:
    refinement, believed = Refinement(), CALIBRATED
    for issued, timeline in steps * 2:
        for _ in range(3 * Refinement.REMEMBERED):
            believed = refinement.correct(believed, issued, WORK, timeline)
    for name in RATES:
        rate, most = getattr(CALIBRATED, name), 1.1
        if name != "host_bandwidth":
            most = min(most, getattr(CALIBRATED, name.removesuffix("_duplex")) / rate)
        assert 0.9 * rate * (1 - 1e-9) <= getattr(believed, name) <= most * rate * (1 + 1e-9), name


def test_a_profile_that_is_set_anew_and_rates_that_were_not_measured_are_corrected_from_there() -> None:
    timeline, issued = simulate(PLAN, WORK, TRUTH.scaled(0.5)), schedule(PLAN, WORK)
    for rough in ("measured while other programs had the CPU: got 5%", "roughly, at the first step; better", ""):
        refinement, believed = Refinement(), TRUTH.replace(provenance=Provenance("measured", note=rough))
        for _ in range(30):
            believed = refinement.correct(believed, issued, WORK, timeline)
        assert (believed.cpu_update_rate < 0.6e9) == bool(rough), rough
    believed = believed.replace(cpu_update_rate=0.5e9)
    timeline_of_a_third = simulate(PLAN, WORK, believed.scaled(1 / 3))
    for _ in range(30):
        believed = refinement.correct(believed, issued, WORK, timeline_of_a_third)
    assert believed.cpu_update_rate == pytest.approx(0.45e9)
    guessed = Provenance("measured", note="not measured, taken from the profile 'unknown': gpu_update_rate, cpu_speed")
    believed = believed_after(timeline, believed=TRUTH.replace(provenance=guessed), steps=40)
    assert believed.gpu_update_rate < 0.6 * TRUTH.gpu_update_rate
    assert believed.cpu_update_rate == pytest.approx(0.9 * TRUTH.cpu_update_rate)


# With an optimizer, whose threads do the work.

MACHINE = profile(
    cpu_update_rate=3e4,
    h2d_bandwidth=4e5,
    d2h_bandwidth=4e5,
    h2d_bandwidth_duplex=4e5,
    d2h_bandwidth_duplex=4e5,
    gpu_update_rate=4e4,
)
"""Each copy and update of the small network takes milliseconds."""


def adaptive(model: nn.Module, **settings: object) -> DOSAdam:
    """With too little memory for all state, so that every lane has work."""
    device = EmulatedDevice(FAST, capacity=10**7)
    defaults = {"subgroup_size": 150, "device": device, "memory_budget": 6_000}
    return DOSAdam(model.parameters(), **{**defaults, **settings})


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_wrong_start_comes_near_the_truth(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that the optimizer issues takes as long as the simulator says of the true machine."""
    correct = Refinement.correct

    def correct_by_truth(
        refinement: Refinement, believed: HardwareProfile, issued: Schedule, work: Workload, *_: object
    ) -> HardwareProfile:
        return correct(refinement, believed, issued, work, serve(issued, work, MACHINE))

    monkeypatch.setattr(Refinement, "correct", correct_by_truth)
    model = mlp()
    wrong = MACHINE.scaled(factor).replace(host_bandwidth=MACHINE.host_bandwidth)
    optimizer = adaptive(model, profile=wrong)
    train(model, optimizer, 25)
    for name in ("cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth"):  # what the plan uses
        assert getattr(optimizer.profile, name) == pytest.approx(getattr(MACHINE, name), rel=0.1), name


Step = tuple[Schedule, Workload, Timeline]


def learnt_from(optimizer: DOSAdam, model: nn.Module, between: Callable[[], None] = lambda: None) -> list[Step]:
    """Which of six steps after the first are learnt from, and what is compared then."""
    seen: list[Step] = []
    train(model, optimizer, 1)
    ended = ended_steps(optimizer)
    train(model, optimizer, 6, first_step=1, before_step=lambda _: between())
    for step in ended:
        if step.iteration.alone:
            seen.append((step.schedule, step.iteration.workload, step.ran))
    return seen


@pytest.mark.parametrize("policy", ["cpu", "stride:1", "in turn"])
@pytest.mark.parametrize("gradients", ["one is dropped", "offloaded", "wide"])
def test_steps_are_learnt_from_as_what_they_were(gradients: str, policy: str) -> None:
    """In turn: all state on the device, which comes and goes, and none."""
    if gradients == "wide" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has gradients in the parameters' dtype alone")
    dtype = torch.float32 if gradients == "one is dropped" else torch.bfloat16
    model, resident = mlp(dtype), 0.0
    for parameter in model.parameters() if gradients == "wide" else ():
        parameter.grad_dtype = torch.float32

    def between() -> None:
        nonlocal resident
        resident = 1.0 - resident  # here: the policy may be asked more than once in an iteration
        plan_anew(optimizer)
        if gradients == "one is dropped":
            model[0].bias.grad = None  # shares a subgroup with others
        elif gradients == "offloaded":
            loss_of(model, 0).backward()

    optimizer = DOSAdam(
        model.parameters(),
        policy=(lambda work: static_ratio(work, resident)) if policy == "in turn" else policy,
        subgroup_size=150,
        device=EmulatedDevice(FAST, capacity=10**7),
        offload_gradients=gradients == "offloaded",
    )
    steps = learnt_from(optimizer, model, between)
    assert len(steps) == 6
    numel = sum(p.numel() for p in model.parameters()) - model[0].bias.numel() * (gradients == "one is dropped")
    ops = []
    for issued, work, ran in steps:
        for lane in Lane:
            predicted = [s.name for s in serve(issued, work, FAST).spans if s.lane is lane and s.subgroup is not None]
            assert sorted(predicted) == sorted(s.name for s in ran.on(lane))
        ops.append({task.op for task in issued.tasks} - {Op.BACKWARD, Op.UPDATE})
        assert sum(task.size for task in issued.tasks if task.op is Op.UPDATE) == numel
        sent = sum(task.size for task in issued.tasks if task.op is Op.GRADIENT)
        if policy == "cpu":
            assert sent == (0 if gradients == "offloaded" else 4 * numel)
    assert policy != "in turn" or {Op.PREFETCH} in ops
    assert policy != "in turn" or gradients == "offloaded" or any(Op.FLUSH in each for each in ops)


@pytest.mark.parametrize("hooks", [True, False])
def test_a_step_is_learnt_from_beside_the_next_backward(hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within `step()`, behind which a device has nothing to do. Where no hook sees a gradient, a step later."""
    learnt = list[Timeline]()
    monkeypatch.setattr(AdaptivePolicy, "observe", lambda self, schedule, work, ran, threads: learnt.append(ran))
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**7), memory_budget=0)
    for number in range(4):
        if hooks:
            loss_of(model, number).backward()
        else:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        assert len(learnt) == max(0, number if hooks else number - 1)
        optimizer.step()
        assert len(learnt) == number, "of the steps before this one"
        optimizer.zero_grad()


def test_updates_of_parameters_on_the_host_run_beside_the_others() -> None:
    on_host: list[Tensor] = []

    class Half(EmulatedDevice):
        def owns(self, tensor: Tensor) -> bool:
            return all(tensor is not other for other in on_host)

    for count in (0, 1):
        model = mlp()
        on_host[:] = list(model.parameters())[:count]
        optimizer = adaptive(model, device=Half(MACHINE, capacity=10**7))
        assert bool(learnt_from(optimizer, model)) == (count == 0)


def test_the_profile_is_there_once_it_is_asked_for(tmp_path: Path) -> None:
    model = mlp()
    optimizer = adaptive(model)
    assert optimizer.profile is None
    train(model, optimizer, 1)
    optimizer.profile.save(tmp_path / "profile.json")
    model = mlp()
    again = adaptive(model, profile=tmp_path / "profile.json")
    train(model, again, 1)
    assert again.profile == optimizer.profile
