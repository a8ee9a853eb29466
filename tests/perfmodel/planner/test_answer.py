"""The planner: memory, times, changes that would help; against the optimizer on emulated machines."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.planning.forecast import MARGIN as DOS_MARGIN
from perfmodel import Placement
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.planner.answer import Answer
from perfmodel.planner.machine import GPUS
from perfmodel.planner.memory import device_footprint
from perfmodel.planner.outcome import Outcome, adaptive_outcome, outcomes
from perfmodel.planner.question import MARGIN, PROCESS_BYTES, SYSTEM_BYTES, Question
from perfmodel.planner.situation import DEVICE, DISK, HOST, Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.whatif import Effect, Remedy, largest, levers, most, remedies
from perfmodel.policies import cpu_only, stride
from tests.support import planner
from tests.support.clock import compares_with_a_clock

GIB = 2**30
A100 = HardwareProfile.builtin("a100_bound")
DESKTOP = {"machine": "rtx_4090_desktop", "chosen_size": 100_000_000}
PCIE_WAYS = "PCIe to the GPU", "PCIe to the host"


def question(numel: float = 7e9, machine: str = "a100_bound", **settings: Any) -> Question:
    """7B on an A100 of 40 GB, checkpointed, unless something else is said."""
    return planner.question(numel, machine, **settings)


def by_policy(asked: Question) -> dict[str, Outcome]:
    """Outcomes by the first word of their policies' names."""
    return {outcome.policy.split()[0]: outcome for outcome in outcomes(Situation(asked))}


def proposals(asked: Question) -> dict[str, Remedy]:
    return {remedy.change: remedy for remedy in remedies(Situation(asked))}


def test_constants_are_the_optimizer_s() -> None:
    assert MARGIN == DOS_MARGIN
    assert GPUS.keys() == builtin_profiles().keys() - {"unknown"}


def test_memory_is_added_up() -> None:
    situation = Situation(question(batch=2))
    device, numel = situation.device, 7 * 10**9
    assert (device.weights, device.gradients) == (2 * numel, 2 * numel)
    held, begins = device.reserved + device.weights, device.activations + device.logits
    assert device.logits == 2 * 2048 * 32000 * (2 + 12)
    assert device.peak_bytes() == held + max(begins, device.gradients + device.block)
    assert situation.peak == device.peak_bytes(accumulating=True) == held + device.gradients + max(begins, device.block)
    assert Situation(question(batch=2, accumulation=False)).peak == device.peak_bytes()
    assert situation.room == int((1 - MARGIN) * situation.question.device_bytes) - situation.peak
    assert situation.host.total == 14 * numel
    assert Situation(question(batch=2, dtype="fp16")).host.total == 16 * numel
    work = situation.update_workload
    assert work.peak_free_bytes % work.slot_bytes == 0
    assert 0 <= situation.room - work.peak_free_bytes < work.slot_bytes
    assert work.shared_free_bytes == work.peak_free_bytes, "slots live on into the next forward"
    released = question(batch=2, accumulation=False, updates="backward")
    assert Situation(released).device.gradients == 0, "backward uses them one block after the other"
    assert Situation(released.replace(accumulation=True)).device == device, "those of earlier micro-batches stay"
    apart = Situation(question(batch=32, attach=False)).update_workload
    assert apart.shared_free_bytes > apart.peak_free_bytes, "the update has the memory of activations"


@pytest.mark.parametrize("numel", [7e9, 1e9])
def test_figures_are_the_performance_model_s(numel: float) -> None:
    asked = question(numel, chosen_size=int(numel / 16))
    found, situation = Answer(asked), Situation(asked)
    work, profile = situation.update_workload, situation.profile
    assert adaptive_outcome(situation).plan == adaptive(situation.iteration_workload, profile)
    *others, best = found.policies
    assert best.update_s is not None
    assert found.bound == lower_bound(work, profile)
    assert found.bound.seconds <= best.update_s
    assert best.exposed_s == best.seconds - (situation.job.forward_s() + situation.job.backward_s)
    assert [row.fits for row in others] == [numel == 1e9, True, True, True]
    assert found.alternative == min((row for row in others if row.fits), key=lambda row: row.seconds)
    assert best.seconds <= 1.01 * found.alternative.seconds
    assert found.to_json()["alternative"]["speedup"] == found.alternative.seconds / best.seconds


def test_the_best_ratio_is_the_one_that_fits_and_is_fastest() -> None:
    asked = question(flops_rate=math.inf)
    found, situation = by_policy(asked), Situation(asked)
    fits = situation.room / situation.update_workload.state_bytes
    assert found["best"].shares[Placement.GPU_RESIDENT] == pytest.approx(fits, abs=0.01)
    assert found["CPU"].seconds > found["best"].seconds > found["adaptive"].seconds


def test_changes_that_would_help_are_planned_anew() -> None:
    asked = question(chosen_size=175_000_000)
    found = {lever.change: lever.outcome for lever in levers(asked, adaptive_outcome(Situation(asked)))}
    assert "--checkpointing" not in found, "it is on already"
    assert found["--offload-activations auto"] == adaptive_outcome(Situation(asked.replace(offload_activations="auto")))
    without = asked.replace(checkpointing=False)
    batches = {lever.change: lever.largest_batch for lever in levers(without, adaptive_outcome(Situation(without)))}
    assert (batches["--checkpointing"] or 0) > 1.5 * most(without, "batch"), "a multiple of the batch is said"


def test_the_largest_batch_and_sequence_fit_and_larger_ones_do_not() -> None:
    asked = question(batch=2, sequence=1024)
    for setting in ("batch", "sequence"):
        value = most(asked, setting)
        assert value > getattr(asked, setting)
        assert Situation(asked.replace(**{setting: value})).fits
        assert not Situation(asked.replace(**{setting: value + 1})).fits
        assert most(question(host_bytes=GIB), setting) == 0
    assert most(asked, "sequence", limit=1500) == 1500


def test_the_largest_model_fits_and_a_larger_one_does_not() -> None:
    for host_bytes in (None, 32 * GIB):
        asked = question(host_bytes=host_bytes)
        numel = largest(asked)
        assert Situation(asked.replace(model=Transformer.of_size(numel))).fits
        assert not Situation(asked.replace(model=Transformer.of_size(int(1.03 * numel)))).fits
    assert largest(question(device_bytes=2 * GIB, reserved=2 * GIB - 1)) == 0


def test_memory_for_all_state() -> None:
    asked = question(numel=1.05e9, chosen_size=100_000_000)
    needed = Answer(asked).all_resident
    assert needed is not None
    for more, resident, fused in ((-(2**20), False, False), (64, True, False), (2.1 * asked.state_numel, True, True)):
        enough = asked.replace(device_bytes=int(needed + more))
        situation = Situation(enough)
        assert (situation.room >= situation.state_bytes) == resident
        assert by_policy(enough)["fused"].fits == fused, "its masters are whole"


def test_adamw_in_float32_needs_no_master() -> None:
    asked = question(numel=1e9, dtype="fp32")
    peak = Situation(asked).peak
    found = by_policy(asked.replace(device_bytes=math.ceil((peak + 8.01e9) / (1 - MARGIN))))
    assert found["fused"].fits
    assert found["adaptive"].shares[Placement.GPU_RESIDENT] < 1


def test_a_device_that_is_too_small() -> None:
    asked = question(device_bytes=24 * GIB, checkpointing=False, chosen_size=175_000_000)
    found = Answer(asked)
    assert not found.situation.fits
    assert not any(row.fits or row.update_s or row.iteration_s for row in found.policies)
    assert found.bound is None
    assert found.alternative is None
    proposed = proposals(asked)
    assert "with --checkpointing" not in proposed, "weights and gradients alone are too large"
    offloaded = asked.replace(offload_gradients=True)
    assert proposed["with --offload-gradients"].situation.device == device_footprint(offloaded)
    assert "with --checkpointing --offload-gradients" not in proposed, "one of them is enough"


@pytest.mark.parametrize("host_gib", [64, 131, None])
@pytest.mark.parametrize("settings", [{"checkpointing": False, "batch": 4}, {"offload_gradients": True}], ids=str)
@pytest.mark.parametrize("machine", ["rtx_4090_desktop", "a100_bound"])
def test_proposals_fit(machine: str, settings: dict[str, Any], host_gib: int | None) -> None:
    """Every proposal has been asked anew, host memory included, and fits."""
    asked = question(machine=machine, **settings, host_bytes=host_gib and host_gib * GIB, chosen_size=175_000_000)
    found = list(proposals(asked).values())
    assert found == [] or not Situation(asked).fits
    for remedy in found:
        assert remedy.situation.question != asked
        assert remedy.outcome.fits
        assert remedy.situation.fits
    assert [remedy.effect for remedy in found] == sorted(remedy.effect for remedy in found)


def test_proposals_that_change_no_result_come_first() -> None:
    """A larger host, a disk and then 8-bit moments come before steps of one sequence, which is other training."""
    most = [*proposals(question(**DESKTOP, host_bytes=128 * GIB))]
    assert most == ["with --offload-gradients --weights auto", "with --offload-gradients"]
    small = proposals(question(**DESKTOP, host_bytes=70 * GIB))
    assert {change: remedy.effect for change, remedy in small.items()} == {
        "with --offload-gradients --weights auto --host 128GB": Effect.MACHINE,
        "with --offload-gradients --weights auto --disk 1TB": Effect.DISK,
        "with --offload-gradients --weights auto --state-format int8": Effect.ROUNDING,
    }
    larger = proposals(question(**DESKTOP, batch=256, host_bytes=70 * GIB))
    assert {change: remedy.effect for change, remedy in larger.items()} == {
        "with --batch 1 --offload-gradients --weights auto --state-format int8": Effect.TRAINING
    }
    tiny = proposals(question(**DESKTOP, host_bytes=50 * GIB))
    assert next(iter(tiny)) == "with --offload-gradients --weights auto --host 128GB"


def test_settings_that_help_only_together_are_proposed_together() -> None:
    asked = question(**DESKTOP, checkpointing=False, sequence=4096, batch=2)
    alone = {"checkpointing": True, "offload_gradients": True, "fused_loss": True, "offload_activations": "auto"}
    assert not any(Situation(asked.replace(**{name: value})).fits for name, value in alone.items())
    first, second, *_ = proposals(asked)
    assert first == "with --checkpointing --offload-gradients --weights auto"
    assert second == "with --offload-gradients --offload-activations auto", "copies to the device lose host memory"


def test_saved_tensors_leave_a_share_or_as_much_as_pays() -> None:
    settings = {**DESKTOP, "checkpointing": False, "accumulation": False}
    asked = [question(1.5e9, batch=2, offload_activations=share, **settings) for share in (0.0, 0.5, "auto")]
    stay, half, _ = situations = [Situation(each) for each in asked]
    assert half.least_offloaded == pytest.approx(sum(each.nbytes for each in half.saved) / 2, rel=0.05)
    assert stay.peak - half.peak == half.least_offloaded
    assert half.host_needed - stay.host_needed == half.least_offloaded
    assert half.room - stay.room == half.least_offloaded
    *others, best = (adaptive_outcome(situation).seconds for situation in situations)
    assert best <= min(others) * 1.02
    assert most(asked[1], "batch") > most(asked[0], "batch")

    full = question(1.5e9, batch=8, offload_activations="auto", **settings)
    assert not Situation(full.replace(offload_activations=0.0)).fits
    assert Situation(full).fits
    plan = adaptive_outcome(Situation(full)).plan
    assert plan is not None
    assert plan.activation_bytes >= Situation(full).least_offloaded > 0


def test_a_host_that_is_too_small() -> None:
    """The constructor's sum, less the memory of the system and the processes."""
    needed = 2 * 14 * 7 * 10**9
    enough = needed + SYSTEM_BYTES + 2 * PROCESS_BYTES
    assert Situation(question(ranks=2, host_bytes=enough)).fits
    assert Situation(question(ranks=2, host_bytes=needed, host_reserved=0)).fits
    short = question(ranks=2, host_bytes=enough - 1)
    assert Situation(short).shortage == {DEVICE: 0, HOST: 1, DISK: 0}
    assert Situation(short).lacking == [HOST]
    assert not adaptive_outcome(Situation(short)).fits
    assert [*proposals(short)] == ["with --fsdp"]


def test_a_step_of_several_micro_batches() -> None:
    """Forward and backward take their multiple, the update does not."""
    settings = {"offload_gradients": True, "batch": 4}
    one, four = (Situation(question(**settings, micro_batches=count)) for count in (1, 4))
    assert four.compute_s == pytest.approx(4 * one.compute_s)
    alone, together = adaptive_outcome(one), adaptive_outcome(four)
    assert together.seconds == pytest.approx(alone.seconds + 3 * one.training_s)
    assert together.update_s == alone.update_s


def test_micro_batches_wait_for_gradients_that_take_longer_than_they_do_to_leave() -> None:
    one, four = (Situation(question(offload_gradients=True, micro_batches=count)) for count in (1, 4))
    leaving_s = 7e9 * 2 / one.profile.d2h_bandwidth
    assert leaving_s > one.job.backward_s
    more = adaptive_outcome(four).seconds - adaptive_outcome(one).seconds
    assert 3 * one.training_s < more <= 3 * (one.job.forward_s() + one.job.backward_s + leaving_s)


def test_frozen_parameters_need_no_state() -> None:
    whole, part = (Situation(question(trainable=share)) for share in (1.0, 0.01))
    assert part.host.total == pytest.approx(0.01 * whole.host.total, rel=1e-6)
    assert part.device.gradients == pytest.approx(0.01 * whole.device.gradients, rel=1e-6)
    assert part.device.weights == whole.device.weights
    assert part.compute_s < 0.8 * whole.compute_s


def test_offloaded_gradients_come_up_again_for_updates_on_the_gpu() -> None:
    asked = Situation(question(offload_gradients=True))
    load = asked.update_workload.subgroups[0]
    assert load.returned_bytes == 2 * load.numel
    everything = stride(asked.update_workload, 1)
    assert asked.update_s(everything) > 1.1 * Situation(question()).update_s(everything)
    more_s = {way: asked.busy_s(everything)[way] - Situation(question()).busy_s(everything)[way] for way in PCIE_WAYS}
    up_s, down_s = (2 * 7e9 / rate for rate in (A100.h2d_bandwidth, A100.d2h_bandwidth))
    assert more_s == {"PCIe to the GPU": pytest.approx(up_s), "PCIe to the host": pytest.approx(down_s, rel=0.01)}


@pytest.mark.parametrize("name", ["h100", "a100_bound", "rtx_4090_desktop"])
def test_the_plan_is_the_optimizer_s(name: str) -> None:
    expected, optimizer = answer_and_optimizer(name, cpu_only_s=0.01)
    optimizer.step()
    assert optimizer.plan() == expected.plan


@pytest.mark.parametrize("name", ["h100", "a100_bound", "rtx_4090_desktop"])
@compares_with_a_clock
def test_the_update_takes_as_long_as_expected(name: str) -> None:
    """Within 15% of the planner's time on an emulated machine."""
    expected, optimizer = answer_and_optimizer(name, cpu_only_s=0.2)
    for _ in range(2):  # state moves to where the plan has it
        optimizer.step()
    seconds = []
    for _ in range(4):
        optimizer.step()
        seconds.append(max(span.end for span in optimizer.timeline().spans))
    measured = statistics.median(seconds)
    needed = f"needed {expected.update_s:.3f} s for an update, within 15%"
    assert measured == pytest.approx(expected.update_s, rel=0.15), f"{needed}, found {measured:.3f} s"


def answer_and_optimizer(name: str, cpu_only_s: float) -> tuple[Outcome, DOSAdam]:
    """The planner's answer for 2 million parameters, and an optimizer of them on the emulated machine.

    cpu_only_s: seconds that an update on the CPU alone takes there.
    """
    numel = 2_000_000
    machine = HardwareProfile.builtin(name).replace(copy_latency_s=0.0, launch_latency_s=0.0)
    settings = {"ranks": machine.ranks_per_host, "sequence": 8, "chosen_size": numel // 10, "reserved": 0}
    asked = question(numel, name, profile=machine, flops_rate=math.inf, **settings)
    peak = Situation(asked).peak
    real_s = Situation(asked).update_s(cpu_only(Situation(asked).update_workload))
    asked = asked.replace(
        profile=machine.scaled(real_s / cpu_only_s),
        device_bytes=int((peak + 0.45 * 12 * numel) / (1 - MARGIN)),
    )
    expected = adaptive_outcome(Situation(asked))

    parameter = nn.Parameter(torch.randn(numel, dtype=torch.bfloat16))
    parameter.grad = torch.randn_like(parameter)
    profile = Situation(asked).profile
    device = EmulatedDevice(profile, capacity=asked.device_bytes, occupied=peak)
    optimizer = DOSAdam(
        [parameter], policy="adaptive", profile=profile, subgroup_size=asked.subgroup_size, device=device
    )
    return expected, optimizer
