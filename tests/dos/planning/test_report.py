"""What the optimizer says of itself: explain(), metrics() and the log."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.devices import Memory
from dos.optimizer import _NOT_ENDED
from dos.planning.policies import AdaptivePolicy
from dos.planning.reading import Reading, Source
from dos.planning.report import Report, unused, why_changed
from perfmodel import Lane, Placement, Plan, Timeline, Workload
from perfmodel.adaptive import adaptive
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only
from tests.support.devices import UpdatesAfterStep
from tests.support.random_plans import all_in
from tests.support.training import SLOW, bits, mlp, profile, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

CAPACITY = 10**6
STATE = 8 * sum(p.numel() for p in mlp().parameters())


def slow(**options: object) -> tuple[torch.nn.Module, DOSAdam, EmulatedDevice]:
    """On a slow machine."""
    device = EmulatedDevice(SLOW, capacity=CAPACITY)
    model = mlp()
    return model, DOSAdam(model.parameters(), subgroup_size=300, device=device, **options), device


def test_explain_without_an_accelerator_or_a_step() -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters())
    assert "No step" in optimizer.explain()
    train(model, optimizer, 1)
    assert "on the host" in optimizer.explain()
    assert optimizer.metrics() == {}


def test_explain_says_all_and_metrics_are_plain_numbers_that_add_up() -> None:
    model, optimizer, _ = slow(memory_budget=STATE // 2)
    train(model, optimizer, 3)
    text, metrics = optimizer.explain(), optimizer.metrics()
    for expected in ("Plan:", "gpu_resident", "Memory:", "the device itself", "Measured:", "Predicted:", "Bound:"):
        assert expected in text
    assert "is the bottleneck" in text
    assert "Formats: 100.0% float32; 8 bytes of state per parameter" in text
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    shares = [metrics[f"share_{placement}"] for placement in ("cpu", "gpu_streamed", "gpu_resident")]
    assert sum(shares) == pytest.approx(1.0)
    assert 0.4 < metrics["share_gpu_resident"] <= 0.5
    assert metrics["memory_total_bytes"] == CAPACITY
    assert metrics["memory_held_bytes"] >= metrics["share_gpu_resident"] * STATE
    assert metrics["memory_free_bytes"] + metrics["memory_held_bytes"] <= CAPACITY
    assert metrics["bound_s"] <= metrics["predicted_s"] * 1.001
    assert metrics["exposed_s"] > 0
    assert metrics["update_s"] > 0


@pytest.mark.parametrize("attaches", [False, True])
def test_the_third_step_is_told_in_one_line(attaches: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = slow(memory_budget=STATE // 2)
    if attaches:
        optimizer.attach(model)
    with caplog.at_level(logging.INFO, logger="dos.machine.terminal"):
        train(model, optimizer, 2)
        optimizer.synchronize()
        assert not caplog.messages
        train(model, optimizer, 4)
        optimizer.synchronize()
    [line] = caplog.messages
    numel = sum(p.numel() for p in model.parameters())
    found = re.fullmatch(
        rf"DOSAdam: {numel:,} parameters, (\d+)% of their state on the device; ([\d.]+) ms an iteration, to which the "
        r"optimizer adds ([\d.]+) ms, predicted ([\d.]+) ms, at least ([\d.]+) ms under any plan; .*",
        line,
    )
    assert found, line
    share, _, added, predicted, bound = map(float, found.groups())
    assert 40 < share <= 50
    assert attaches or added > 0, "the next forward may come when all has ended"
    assert bound <= predicted + 0.1


def test_policies_without_a_profile_predict_nothing() -> None:
    model, optimizer, _ = slow(policy="cpu")
    train(model, optimizer, 1)
    assert "predicted_s" not in optimizer.metrics()
    assert "Predicted: nothing" in optimizer.explain()
    n = sum(p.numel() for p in model.parameters())
    assert optimizer.metrics()["d2h_bytes"] == optimizer.metrics()["h2d_bytes"] == 4 * n


def test_the_log_has_a_line_for_each_change_of_plan_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    demand = [0]
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=int(1.5 * STATE), neighbour=lambda: demand[0])
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, device=device)
    with caplog.at_level(logging.INFO, logger="dos.accelerator"):
        train(model, optimizer, 8)
        quiet = [r for r in caplog.records if r.name == "dos.accelerator"]
        assert len(quiet) == 1
        demand[0] = STATE
        train(model, optimizer, 12)
    lines = [r for r in caplog.records if r.name == "dos.accelerator"]
    assert len(quiet) < len(lines) <= len(quiet) + 12
    assert any("plan changed: memory for state went from" in r.getMessage() for r in lines)
    assert lines[-1].metrics["memory_total_bytes"] == device.capacity


class Chosen(AdaptivePolicy):
    """All subgroups where the test says."""

    placement = Placement.CPU

    def __call__(self, workload: Workload) -> Plan:
        return all_in(self.placement, workload)


def attached(policy: object) -> tuple[torch.nn.Module, DOSAdam, UpdatesAfterStep]:
    """With updates on the host that wait until the device's `returned` is set."""
    model, device = mlp(), UpdatesAfterStep(SLOW, CAPACITY)
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, policy=policy, device=device)
    optimizer.attach(model)
    return model, optimizer, device


def test_asking_while_updates_are_under_way_neither_waits_nor_changes_a_bit() -> None:
    model, optimizer, device = attached("adaptive")
    twin = mlp()
    reference = DOSAdam(twin.parameters())
    outputs = []
    for step in range(4):
        held = step != 1  # the first forward shows attach() which modules run
        if held:
            device.returned.clear()
        train(model, optimizer, 1, first_step=step)
        train(twin, reference, 1, first_step=step)
        before = optimizer.explain(), optimizer.metrics(), optimizer.timeline().spans
        outputs.append(before)
        device.returned.set()
    assert outputs[0] == (f"{_NOT_ENDED.capitalize()}.", {}, ())
    assert all(text.startswith("Plan:") and figures and spans for text, figures, spans in outputs[1:])
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_figures_are_of_one_step() -> None:
    policy = Chosen()
    model, optimizer, _ = attached(policy)
    for step in range(6):
        policy.placement = Placement.CPU if step % 2 else Placement.GPU_RESIDENT
        train(model, optimizer, 1, first_step=step)
        if step:
            on_cpu = float(policy.placement is not Placement.CPU)  # as in the step before
            figures = optimizer.metrics()
            assert figures["share_cpu"] == 1 - figures["share_gpu_resident"] == on_cpu
            assert bool(optimizer.timeline().on(Lane.D2H)) == bool(on_cpu), "state goes home"
            assert (figures["memory_held_bytes"] == 0) == bool(on_cpu)
    optimizer.synchronize()
    assert optimizer.metrics()["share_cpu"] == 1


def ended(exposed_s: float, **compute: float) -> Report:
    """A step on a machine where 10 million parameters take the CPU 10 s, all else nothing."""
    workload = dataclasses.replace(Workload.of_sizes([10**6] * 10, peak_free_bytes=0, shared_free_bytes=0), **compute)
    plan = cpu_only(workload)
    reading = Reading(Memory(0, 1), Source.DEVICE)
    machine = profile(cpu_update_rate=1e6)
    iteration = SimpleNamespace(exposed_s=exposed_s, waited_s=lambda since, until: 0.0, withheld=(), saved=None)
    return Report(iteration, plan, workload, machine, Timeline(()), 0.0, reading, 0, 0, 0, "", real=False)


def test_efficiency_is_against_what_cannot_be_hidden() -> None:
    alone = ended(12.5)
    assert alone.metrics()["efficiency"] == pytest.approx(10 / 12.5)
    hidden = ended(0.0, forward_s=20.0, backward_s=5.0)
    assert hidden.metrics()["bound_s"] == pytest.approx(0.0, abs=1e-6), "the update is no longer than the forward"
    assert hidden.metrics()["efficiency"] == pytest.approx(1.0)
    half = ended(8.0, forward_s=4.0)
    assert half.metrics()["bound_s"] == pytest.approx(6.0, rel=1e-3)
    assert half.metrics()["predicted_s"] == pytest.approx(6.0, rel=0.1)
    assert half.metrics()["efficiency"] == pytest.approx(10 / 12, rel=1e-3)
    assert "Efficiency: 83%" in str(half)


def test_a_late_host_makes_a_backward_that_updates_longer_in_predictions() -> None:
    """And hides more of an update; the bound, which no host decides, stays."""
    on_time = ended(0.0, forward_s=2.0, backward_s=4.0, in_backward=True)
    late = dataclasses.replace(on_time, late_in_backward_s=3.0)
    assert late.lasting.backward_s == 7.0
    assert on_time.metrics()["predicted_s"] > late.metrics()["predicted_s"] > 0
    assert on_time.metrics()["bound_s"] == late.metrics()["bound_s"]
    assert "a backward that updates, with its step(), lasts 3000.0 ms longer than its compute" in str(late)
    assert "a backward that updates" not in str(on_time)
    in_step = ended(0.0, forward_s=2.0, backward_s=4.0)
    assert dataclasses.replace(in_step, late_in_backward_s=3.0).lasting == in_step.workload


def test_an_iteration_shorter_than_possible_shows_that_the_prediction_is_off() -> None:
    off = ended(7.5)
    assert "efficiency" not in off.metrics()
    assert "Efficiency: not known. The prediction is off: this iteration took 75% of the shortest time" in str(off)
    assert "python -m dos.calibrate" in str(off)
    assert ended(9.98).metrics()["efficiency"] == 1.0, "rounded"


def test_rates_that_are_too_far_apart_are_said_to_be() -> None:
    report = dataclasses.replace(ended(1.0), profile=profile(cpu_update_rate=1e-30))
    assert "Bound: no lower bound can be computed with profile" in str(report)
    assert "cpu_update_rate is 1e-30 and" in str(report)
    assert "bound_s" not in report.metrics()


def said(**options: object) -> str:
    model, optimizer, _ = slow(**options)
    train(model, optimizer, 3)
    return optimizer.explain()


def test_explain_says_why_memory_is_not_used_for_state() -> None:
    text = said(memory_budget=STATE // 2)
    assert re.search(
        r"Not used for state: 0.9\d MiB by memory_budget=, .* KiB because 1.25 subgroups must be free", text
    )
    assert "Not used for state: 10.62 KiB because this policy does not use it" in said(policy="cpu")
    assert "Not used" not in said()
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=2 * STATE, occupied=int(1.5 * STATE), neighbour=STATE // 10)
    optimizer = DOSAdam(model.parameters(), subgroup_size=100, device=device)
    train(model, optimizer, 3)
    assert re.search(r"Not used for state: .* KiB as a margin, ", optimizer.explain())


def test_a_subgroup_larger_than_what_is_free_is_said_with_both_sizes_and_the_remedy() -> None:
    text = said(memory_budget=2000)
    assert (
        "a subgroup of 300 parameters takes 2.34 KiB and 1.95 KiB may be used; choose subgroup_size=200 or less" in text
    )
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=CAPACITY)
    smaller = DOSAdam(model.parameters(), policy=0.0, subgroup_size=200, device=device, memory_budget=2000)
    train(model, smaller, 3)
    assert smaller.metrics()["share_gpu_resident"] > 0, "the remedy helps"
    assert "0.01 KiB may be used; that of one parameter does not fit either" in said(memory_budget=9)


def test_why_a_plan_uses_less_than_there_is() -> None:
    work = Workload.of_sizes([2**20] * 10, peak_free_bytes=60 * 2**20, shared_free_bytes=60 * 2**20)
    machine = HardwareProfile.builtin("rtx_4090_desktop")
    resident, streamed, on_cpu = Placement.GPU_RESIDENT, Placement.GPU_STREAMED, Placement.CPU
    plan = Plan((*[resident] * 3, *[streamed] * 3, *[on_cpu] * 4), tuple(range(10)), slots=2)
    peak = (5 * 2**20, "for the peak of an iteration")
    assert unused(plan, work, machine, [peak]) == [
        "Not used for state: 5.00 MiB for the peak of an iteration, 24.00 MiB for 2 staging slots"
    ]
    assert unused(cpu_only(work), work, machine, []) == [
        "Not used for state: 60.00 MiB because the step would not be faster"
    ]
    hidden = dataclasses.replace(work, forward_s=10.0, backward_s=10.0)
    assert not unused(adaptive(hidden, machine), hidden, machine, []), "as fast, and less for the host to do"


def test_a_step_that_fails_is_no_complete_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, device = slow()
    train(model, optimizer, 3)
    before, timeline = optimizer.explain(), optimizer.timeline()

    def fail(*_: object, **__: object) -> None:
        raise OSError("broken")

    for request in ("copy", "launch", "host_update"):
        monkeypatch.setattr(device, request, fail)
    with pytest.raises(RuntimeError, match="failed part way"):
        train(model, optimizer, 1)
    monkeypatch.undo()
    assert optimizer.explain() == before
    assert optimizer.timeline().spans == timeline.spans


def test_the_reason_of_a_change_is_what_is_different() -> None:
    machine = HardwareProfile.builtin("rtx_4090_desktop")
    before = Workload.of_sizes([2**20] * 4, peak_free_bytes=10 * 2**20, shared_free_bytes=20 * 2**20)
    assert why_changed(None, before, None, machine) == "this is the first plan, with memory for 10.00 MiB of state"
    for now, believed, expected in (
        (
            dataclasses.replace(before, peak_free_bytes=2**20),
            machine,
            "memory for state went from 10.00 MiB to 1.00 MiB",
        ),
        (
            dataclasses.replace(before, half_freed_bytes=2**20),
            machine,
            "memory in the second half of backward went from unknown to 11.00 MiB",
        ),
        (dataclasses.replace(before, backward_s=0.2), machine, "backward went from 0.0 ms to 200.0 ms"),
        (dataclasses.replace(before, peak_free_bytes=10 * 2**20 + 9), None, "measured steps corrected the rates"),
        (before, machine, "saved tensors, weights or memory of the host have changed"),
    ):
        assert why_changed(before, now, believed, machine) == expected
    assert why_changed(before, before, None, None) == "the policy chose another plan"
