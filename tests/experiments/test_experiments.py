"""Each experiment runs at its smallest size and judges its limits; what its figures are made of is right.

Those with tests of their own: train, sweep, published, arithmetic, job, gpu_check; weights is in test_commands.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dos.planning.monitor
from dos.calibration.measure import MINIMUM
from experiments.bench import activations, disk, emulation, formats, kernel, memory, overhead, overlap, planner, weights
from experiments.bench.neighbours import neighbours
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import missed
from experiments.miniature import equal_subgroups, least_iteration_s, slowed
from perfmodel import Placement
from perfmodel.adaptive import adaptive
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.simulate import Scope, Simulator
from tests.support.clock import compares_with_a_clock
from tests.support.figures import read_figures

TRACE = "h100_20b_interleaved"
Rows = Sequence[Mapping[str, Any]]


def overlap_hides_nothing_when_serial(rows: Rows, _: Any) -> None:
    row, in_backward = rows
    for each in rows:
        assert min(each["iteration_s"], each["bound_s"]) > 0
        assert each["bits_equal"]
    assert (row["updates"], in_backward["updates"]) == ("step", "backward")
    assert row["serial_s"] > row["update_bound_s"]
    assert row.keys() >= {f"{schedule}_s" for schedule in overlap.SCHEDULES}


def overhead_is_per_parameter(rows: Rows, _: Any) -> None:
    assert [(row["parameters"], row["elements"], row["where"]) for row in rows] == [(5, 8, "host"), (5, 8, "device")]
    for row in rows:
        assert min(row[f"{timed}_us_per_parameter"] for timed in ("step", "adamw_fused", "adamw_foreach")) > 0
        assert row["hooks_us_per_parameter"] >= 0


def kernels_are_beside_the_bandwidth(_: Rows, found: Any) -> None:
    for update in ("fp32", "mixed", "split", "int8"):
        assert found[update].keys() >= {"gparams_per_s", "ratio_to_bandwidth", "neighbour"}
        assert min(found[update].values()) > 0
    assert "ratio_to_mixed" in found["split"]


def emulated_updates_are_no_faster_than_simulated(rows: Rows, found: Any) -> None:
    assert len(rows) == 8
    for row in rows:
        assert row["measured_s"] > 0.95 * row["simulated_s"]
        assert row["simulated_s"] > 0.99 * row["bound_s"]
    assert 0 <= found["median_error"] <= found["max_error"]


def saved_tensors_move_within_the_capacity(rows: Rows, _: Any) -> None:
    assert [(row["state_fits"], row["activations"]) for row in rows] == [
        (state_fits, way) for state_fits in activations.SETTINGS for way in activations.WAYS
    ]
    for row in rows:
        assert row["peak_bytes"] <= row["capacity"]
        assert row["iteration_s"] > 0.95 * row["compute_s"]
        assert min(row["simulated_s"], row["predicted_s"]) > 0.99 * row["compute_s"]


def bytes_are_those_of_the_format(rows: Rows, found: Any) -> None:
    """Training is too short to say anything."""
    by_name = {row["format"]: row for row in rows}
    assert {"AdamW", "float32", "split", "int8"} <= by_name.keys()
    assert by_name["float32"]["final_loss"] == by_name["split"]["final_loss"], "the same bits"
    kept = [by_name[name] for name in ("float32", "split", "int8")]
    assert [row["host_bytes_per_parameter"] for row in kept] == [14, 12, 6.0625]
    assert [row["link_bytes_each_way"] for row in kept] == [12, 10, 4.0625]
    assert all(losses["int8 of a float32 model"] == pytest.approx(1, abs=0.1) for losses in found["hard"].values())
    assert Path("out/formats/formats.png").stat().st_size > 10_000


def shares_on_disk_are_read_and_written(rows: Rows, _: Any) -> None:
    for setting in ("throttled", "file system"):
        of_setting = [row for row in rows if row["setting"] == setting]
        assert [row["share_on_disk"] for row in of_setting] == pytest.approx(disk.SHARES, abs=0.08)
        assert of_setting[-1]["swapped_s"] > of_setting[-1]["bound_s"]
    for row in rows:
        assert 50 <= row["subgroups"] <= 64
        assert row["update_s"] >= 0.95 * row["bound_s"], "the drive is throttled"
        assert (row["read_gb_per_s"] > 0) is (row["share_on_disk"] > 0)
        for moved in row["read_bytes_per_parameter"], row["written_bytes_per_parameter"]:
            assert moved == pytest.approx(SPLIT.state_bytes if row["share_on_disk"] else 0, rel=1e-3), "once"


def memory_holds_and_is_used(rows: Rows, _: Any) -> None:
    trace, beside, ample, half, none, *offloading = rows
    assert [trace["script"], beside["script"]] == [TRACE, "step up"]
    for row in rows:
        assert not row["capacity_exceeded"]
        assert row["errors"] == 0
    assert ample["moved_after_first"] == 0
    assert half["fits_share"] == pytest.approx(0.5, abs=0.1)
    assert none["same_traffic"]
    assert [row["script"] for row in offloading] == ["half offloaded", "four fifths offloaded"]


def plans_meet_their_figures(rows: Rows, _: Any) -> None:
    """But for planning times, on a machine that others use."""
    assert {row["kind"] for row in rows} == {*planner.KINDS}
    assert not missed(planner.limits([{**row, "plan_s": 0.0} for row in rows]))


@pytest.mark.parametrize("kind", ["weights", "int8, offload"])
def test_strides_with_all_weights_and_with_each_number_of_slots_are_among_the_plans_that_are_compared(
    kind: str,
) -> None:
    """On a GH200, whose links are so fast that streaming all state is best."""
    row = planner.row(builtin_profiles()["gh200"], planner.KIND_SUBGROUPS, "forward", kind)
    assert not missed(planner.limits([{**row, "plan_s": 0.0}]))


def test_the_bound_of_weights_that_stream_counts_what_follows_the_last_update() -> None:
    """No plan is faster, in simulation, and the planner's is near it."""
    numel = GPT(weights.CONFIG).numel
    profile = slowed(HardwareProfile.builtin("rtx_4090_desktop"), equal_subgroups(numel, numel // 48, state=SPLIT), 3.0)
    work, rng = weights.workload(int(numel * 2 / weights.WEIGHTS_SHARE), "stream", 2), Random(0)
    bound, simulator, plan = (
        weights.bound_s(work, profile),
        Simulator(work, profile, Scope.beside(work)),
        adaptive(work, profile),
    )
    for _ in range(40):
        placements = list(plan.placements)
        rng.shuffle(placements)
        assert simulator.makespan(dataclasses.replace(plan, placements=tuple(placements))) > bound
    assert bound < simulator.makespan(plan) < 1.06 * bound
    assert bound > 1.015 * least_iteration_s(work, profile)


SLOW = slowed(HardwareProfile.builtin("h100"), equal_subgroups(500_000, 31_250), 0.1)
SETTINGS = {
    name: activations.Setting(setting.state_share, setting.forward_s / 10, setting.link_s / 10)
    for name, setting in activations.SETTINGS.items()
}


def small(
    module: ModuleType,
    arguments: str,
    sensible: Callable[[Rows, Any], None],
    *marks: pytest.MarkDecorator,
    **values: Any,
) -> Any:
    """An experiment at its smallest size. sensible: checks its rows and its line of JSON. values: of its module."""
    return pytest.param(module, arguments, sensible, values, id=module.__name__.rpartition(".")[2], marks=marks)


EXPERIMENTS = (
    small(
        overlap,
        "--rounds 1 --batch 2",
        overlap_hides_nothing_when_serial,
        CONFIG=GPTConfig(layers=1, width=64, heads=2, context=16),
        SUBGROUPS=4,
        UPDATE_OVER_FORWARD=(1.0,),
    ),
    small(overhead, "--rounds 2", overhead_is_per_parameter, SIZES=((5, 8),)),
    small(kernel, "--numel 10k --rounds 2 --threads 1", kernels_are_beside_the_bandwidth),
    small(
        emulation,
        "--rounds 1",
        emulated_updates_are_no_faster_than_simulated,
        machines=lambda: [emulation.Machine("h100", SLOW, 500_000, 16)],
    ),
    small(
        activations,
        "--rounds 1",
        saved_tensors_move_within_the_capacity,
        pytest.mark.slow,
        BLOCK=2,
        WARM_UP=0,
        SETTINGS=SETTINGS,
    ),
    small(
        formats,
        "--steps 2 --seeds 1 --width 32 --layers 1 --processes 1",
        bytes_are_those_of_the_format,
        pytest.mark.slow,
        TIMED_NUMEL=1 << 18,
        TIMED_S=0.02,
        HARD_STEPS=20,
    ),
    small(
        disk,
        "--rounds 1",
        shares_on_disk_are_read_and_written,
        pytest.mark.slow,
        WARM_UP=1,
        FULL_S=0.1,
        file_system=lambda folder, effort: disk.throttled(),
    ),
    small(
        memory,
        "--steps 6",
        memory_holds_and_is_used,
        CONFIG=GPTConfig(layers=2, width=32, heads=2, context=8),
        SUBGROUPS=12,
        UPDATE_S=0.01,
        BATCH=2,
        TRACES=[TRACE],
        neighbours=lambda most, n: {"step up": neighbours(most, n)["step up"]},
    ),
    small(planner, "--profile h100", plans_meet_their_figures, SUBGROUPS=(10,), KIND_SUBGROUPS=26),
)


@pytest.mark.parametrize(("module", "arguments", "sensible", "values"), EXPERIMENTS)
def test_an_experiment_measures_and_judges_its_limits(
    module: ModuleType,
    arguments: str,
    sensible: Callable[[Rows, Any], None],
    values: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)
    # Iterations are a hundred times as fast as real ones, and as many samples shall be taken of each.
    monkeypatch.setattr(dos.planning.monitor, "SHARE_OF_TIME", 0.1)
    threads = torch.get_num_threads()
    try:
        status = module.main([*arguments.split(), "--json"])
    finally:
        torch.set_num_threads(threads)
    found = read_figures(capsys.readouterr().out, status)
    sensible(found.get("rows", ()), found)


def test_an_update_takes_the_wanted_share_of_forward() -> None:
    *_, bound_s = overlap.slow_machine(1 / 3, forward_s=0.2, backward_s=0.4)
    assert bound_s == pytest.approx(0.2 / 3, rel=0.02)


def test_no_iteration_that_updates_in_backward_is_shorter_than_what_surrounds_a_parameter() -> None:
    """The update of it, and of all that forward uses before it, comes between its gradient and its next use."""
    uses = overlap.Uses(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)))
    first, last = uses.numel
    for begin in (0.0, 50.0, 90.0):
        uses.iterations.append({first: (begin, begin + 10.0), last: (begin + 4.0, begin + 6.0)})
    assert overlap.least_in_backward(uses, 4.0) == 10.0 + 4.0 * 6 / 8
    assert overlap.least_in_backward(uses, 80.0) == 2.0 + 80.0


def test_emulated_machines_take_as_long_as_wanted_and_plans_differ() -> None:
    machines = emulation.machines()
    assert sum(len(emulation.plans(machine)) for machine in machines) >= 12
    for machine in machines:
        work = machine.workload()
        assert emulation.makespan(emulation.cpu_only(work), work, machine.profile) == pytest.approx(emulation.UPDATE_S)
        assert len(set(emulation.plans(machine).values())) >= 6


def test_misordered_policies_are_found() -> None:
    def row(policy: str, measured: float, simulated: float) -> dict[str, str | float]:
        return {"machine": "m", "policy": policy, "measured_s": measured, "simulated_s": simulated}

    assert emulation.misordered([row("a", 1.0, 1.0), row("b", 2.0, 2.0)], 0.05) == []
    assert emulation.misordered([row("a", 2.1, 1.0), row("b", 2.0, 2.0)], 0.05) == ["m: a before b"]
    assert emulation.misordered([row("a", 2.0, 1.0), row("b", 1.9, 1.04)], 0.05) == []
    assert emulation.errors([row("a", 1.1, 1.0)]) == pytest.approx([0.1])


@compares_with_a_clock
def test_an_update_in_int8_is_as_fast_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "TIMED_NUMEL", 1 << 18)
    monkeypatch.setattr(formats, "TIMED_S", 0.1)
    split, int8 = (formats.row(name, [[0.0]]) for name in ("split", "int8"))
    for what in ("update_s_cpu", "update_s_streamed"):
        times = split[what] / int8[what]
        assert times >= 1.6, f"{what}: needed 1.6 times as long with split as with int8, found {times:.2f} times"


def test_saved_tensors_that_move_as_planned_are_never_slower_than_none_or_all() -> None:
    """At most 1.02 times the better of nothing and all; where state and saved tensors compete, a tenth better."""
    model = GPT(activations.CONFIG, dtype=activations.DTYPE)
    batch = Corpus(standard_library(), activations.CONFIG.context).batches(1, activations.BATCH, seed=0)[0]
    saved = activations.saved_sizes(model, batch)
    for state_fits, setting in activations.SETTINGS.items():
        case = activations.Case.of(setting, model, saved)
        stay, leave, planned = map(case.simulated_s, activations.WAYS)
        assert planned <= 1.02 * min(stay, leave)
        assert case.bound_s("auto") <= planned
        assert case.predicted_s(adaptive(case.allowed("auto"), case.profile)) == pytest.approx(planned, rel=1e-3)
        for way in activations.WAYS:  # when backward ends
            work = case.allowed(way)
            plan = adaptive(work, case.profile)
            state = (plan.placements.count(Placement.GPU_RESIDENT) + plan.slots) * work.slot_bytes
            assert state + 2 * model.numel * activations.DTYPE.itemsize <= case.capacity
        if state_fits == "all":
            assert leave - stay <= 0.05 * 3 * setting.forward_s, "links have the room"
        if state_fits == "half":
            assert 1.1 * planned <= min(stay, leave)


def test_each_wrong_figure_of_saved_tensors_misses_one_limit() -> None:
    good = {"state_fits": "half", "iteration_s": 1.0, "predicted_s": 0.95, "peak_bytes": 9, "capacity": 9}
    rows = [{**good, "activations": way, "bits_equal": True} for way in activations.WAYS]
    assert missed(activations.limits(rows)) == []
    assert activations.limits(rows)[-1].measured == 1.0, "against its own setting alone"
    for wrong in ({"iteration_s": 1.04}, {"predicted_s": 0.9}, {"peak_bytes": 10}, {"bits_equal": False}):
        assert len(missed(activations.limits([*rows[:-1], rows[-1] | wrong]))) == 1, wrong
    faster = {"state_fits": "all", "iteration_s": 0.5, "predicted_s": 0.5}
    assert missed(activations.limits([*rows, *(row | faster for row in rows)])) == []


def test_the_disk_experiment_measures_the_file_system(tmp_path: Path) -> None:
    setting = disk.file_system(tmp_path, MINIMUM)
    assert setting.profile.provenance.source == "measured"
    assert setting.device.disk_read_bandwidth > 100 * setting.profile.disk_read_bandwidth, "nothing is slowed down"
    assert not list(tmp_path.glob("*/*")), "no file is left"
