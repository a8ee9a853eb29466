"""The experiments' own logic, on little work: what they report is right, and bad arguments are said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dos.calibration.measure import MINIMUM
from experiments.bench import activations, disk, emulation, formats, kernel, overhead, overlap
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import missed
from perfmodel import Placement
from perfmodel.adaptive import adaptive
from perfmodel.format import SPLIT
from tests.support.clock import compares_with_a_clock


def test_a_row_of_the_overlap_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "CONFIG", GPTConfig(layers=1, width=64, heads=2, context=16))
    monkeypatch.setattr(overlap, "SUBGROUPS", 4)
    start = GPT(overlap.CONFIG).state_dict()
    batches = Corpus(standard_library(), 16).batches(2 * overlap.BLOCK, 2, seed=0)
    row = overlap.measure(start, batches, ratio=1.0, on_turn=lambda name: None)
    assert row["bits_equal"] is True
    seconds = [row[f"{name}_s"] for name in ("forward", "backward", "update_bound", *overlap.SCHEDULES)]
    assert min(seconds) > 0
    assert row["serial_s"] > row["forward_s"] + row["update_bound_s"]
    *_, bound_s = overlap.slow_machine(1 / 3, forward_s=0.2, backward_s=0.4)
    assert bound_s == pytest.approx(0.2 / 3, rel=0.02)


def test_emulated_machines_take_as_long_as_wanted_and_plans_differ() -> None:
    machines = emulation.machines()
    assert sum(len(emulation.plans(machine)) for machine in machines) >= 12
    for machine in machines:
        work = machine.workload()
        assert emulation.makespan(emulation.cpu_only(work), work, machine.profile) == pytest.approx(emulation.UPDATE_S)
        assert len(set(emulation.plans(machine).values())) >= 6


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_row_of_the_overhead_experiment(where: str) -> None:
    row = overhead.measure(5, 8, where, rounds=2)
    assert (row["parameters"], row["elements"], row["where"]) == (5, 8, where)
    assert min(row[f"{timed}_us_per_parameter"] for timed in ("step", "adamw_fused", "adamw_foreach")) > 0
    assert row["hooks_us_per_parameter"] >= 0
    assert len(overhead.limits(row)) == 2


def test_rates_of_the_kernels() -> None:
    contenders = kernel.build_contenders(10_240, threads=1)
    assert list(contenders) == ["fp32", "mixed", "split", "int8"]
    for each in contenders.values():
        found = kernel.summarise(kernel.measure(each, 2), 10_240)
        assert set(found) >= {"gparams_per_s", "ratio_to_bandwidth"}
        assert min(found.values()) > 0
    assert set(contenders["split"]) == {"ours", "bandwidth", "mixed"}


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


def test_formats_in_brief(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of the long run; training is too short to say anything."""
    for name, value in (("TIMED_NUMEL", 1 << 18), ("TIMED_S", 0.02), ("HARD_STEPS", 20)):
        monkeypatch.setattr(formats, name, value)
    brief = ["--steps", "2", "--seeds", "1", "--width", "32", "--layers", "1", "--processes", "1", "--json"]
    assert formats.main([*brief, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["format"]: row for row in found["rows"]}
    assert {"AdamW", "float32", "split", "int8"} <= rows.keys()
    assert rows["float32"]["final_loss"] == rows["split"]["final_loss"], "the same bits"
    assert [rows[name]["host_bytes_per_parameter"] for name in ("float32", "split", "int8")] == [14, 12, 6.0625]
    assert [rows[name]["link_bytes_each_way"] for name in ("float32", "split", "int8")] == [12, 10, 4.0625]
    assert all(losses["int8 of a float32 model"] == pytest.approx(1, abs=0.1) for losses in found["hard"].values())
    assert (tmp_path / "formats.png").stat().st_size > 10_000


def test_what_leaves_is_planned_with_state() -> None:
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


def test_limits_of_what_leaves() -> None:
    good = {"state_fits": "half", "iteration_s": 1.0, "predicted_s": 0.95, "peak_bytes": 9, "capacity": 9}
    rows = [{**good, "activations": way, "bits_equal": True} for way in activations.WAYS]
    assert missed(activations.limits(rows)) == []
    assert activations.limits(rows)[-1].measured == 1.0, "against its own setting alone"
    for wrong in ({"iteration_s": 1.04}, {"predicted_s": 0.9}, {"peak_bytes": 10}, {"bits_equal": False}):
        assert len(missed(activations.limits([*rows[:-1], rows[-1] | wrong]))) == 1, wrong
    faster = {"state_fits": "all", "iteration_s": 0.5, "predicted_s": 0.5}
    assert missed(activations.limits([*rows, *(row | faster for row in rows)])) == []


def test_rows_of_the_disk_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FULL_S", 0.1)
    rows = disk.compare("throttled", disk.throttled(), 1, tmp_path, lambda label: None)
    assert [row["share_on_disk"] for row in rows] == pytest.approx(disk.SHARES, abs=0.08)
    for row in rows:
        assert row["bits_equal"] is True
        assert 50 <= row["subgroups"] <= 64
        assert row["update_s"] >= 0.95 * row["bound_s"] > 0, "the drive is throttled"
        assert (row["read_gb_per_s"] > 0) is (row["share_on_disk"] > 0)
        for moved in row["read_bytes_per_parameter"], row["written_bytes_per_parameter"]:
            assert (0.5 if row["share_on_disk"] else 0) * SPLIT.state_bytes <= moved <= SPLIT.state_bytes
    assert rows[-1]["swapped_s"] > rows[-1]["bound_s"]


def test_the_disk_experiment_measures_the_file_system(tmp_path: Path) -> None:
    setting = disk.file_system(tmp_path, MINIMUM)
    assert setting.profile.provenance.source == "measured"
    assert setting.device.disk_read_bandwidth > 100 * setting.profile.disk_read_bandwidth, "nothing is slowed down"
    assert not list(tmp_path.glob("*/*")), "no file is left"
