"""The memory experiment on tiny runs: bits, capacity and traffic hold, and its reports are right. Nothing is timed."""

from __future__ import annotations

import pytest
import torch

import dos.planning.monitor
from experiments.bench import memory
from experiments.bench.memory import MemoryRun, Setting, train
from experiments.gpt import Corpus, GPTConfig, standard_library
from experiments.harness import missed
from experiments.paper import memory_h100
from experiments.paper.ranks import PublishedRank, Recording
from experiments.paper.runs import TRACES
from experiments.training import UPDATE

GIB = 2**30
ITERATIONS = 9


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONFIG", GPTConfig(layers=2, width=32, heads=2, context=8))
    monkeypatch.setattr(memory, "SUBGROUPS", 12)
    monkeypatch.setattr(memory, "UPDATE_S", 0.01)
    # Iterations are a hundred times as fast as real ones, and as many samples shall be taken of each.
    monkeypatch.setattr(dos.planning.monitor, "SHARE_OF_TIME", 0.1)


def batches(count: int = ITERATIONS) -> list[memory.Batch]:
    return Corpus(standard_library(), 8).batches(count, 2, seed=0)


def test_a_run_that_fails_or_has_other_bits_or_too_much_memory_is_noticed(tiny: None) -> None:
    setting = Setting.of(PublishedRank.read())

    def broken(workload: object) -> None:
        raise ValueError("no plan today")

    failed, on_cpu = train(setting, [broken, "cpu"], batches(2))
    assert failed.errors == ["ValueError: no plan today"]
    assert not failed.equals(on_cpu)
    other = MemoryRun(setting, "cpu")
    for batch in batches(2):
        other.iterate(batch)
    assert on_cpu.equals(other)
    with torch.no_grad():
        next(other.model.parameters()).view(-1)[0] += 1
    assert not on_cpu.equals(other)
    assert not on_cpu.exceeded
    on_cpu.device.peak_bytes = on_cpu.device.capacity + 1
    assert on_cpu.exceeded


def test_fixed_policies_keep_no_memory_from_anybody(tiny: None) -> None:
    alone = Setting.of(PublishedRank.read())
    left = int(0.35 * alone.rank.loads.state_bytes)
    third = Setting(alone.rank, [(0.0, 0), (2.0, alone.rank.free_bytes - left)])
    names = [name for name, _ in memory.fixed_policies(third, 4)]
    assert len(names) == len(set(names)) == 7 * 4, "ratios from 0.7 on, six strides and none"
    assert names[0].startswith("ratio 0.7, stride")
    assert memory.fixed_policies(alone, 4)[0][0] == "ratio 0.0"
    work = third.workload(3)
    assert work.peak_free_bytes == left
    assert memory.share_that_fits(third, 4) == pytest.approx((1 + 1 + 0.35 + 0.35) / 4, abs=1e-3)
    assert memory.bound_s(alone, 2) < memory.bound_s(third, 4) < memory.bound_s(alone.with_free(0), 2)


def test_rows_that_offload_gradients_have_the_memory_and_the_bits_of_those_that_do_not(tiny: None) -> None:
    found = memory.settings(ITERATIONS)
    for name in ("half", "noise"):
        plain, offloads = found[name], found[f"{name} offloaded"]
        assert (plain.rank, plain.neighbour) == (offloads.rank, offloads.neighbour)
        work = offloads.workload(0)
        assert all(load.returned_bytes == load.gradient_bytes for load in work.subgroups)
        assert work.passing_bytes == work.subgroups[0].gradient_bytes
        assert work.peak_free_bytes == plain.workload(0).peak_free_bytes
    ((name, policy), *_) = memory.fixed_policies(found["four fifths offloaded"], 1)
    assert name.startswith("ratio")
    runs = train(found["half offloaded"], ["adaptive", policy], batches(3))
    (on_cpu,) = train(found["half"], ["cpu"], batches(3))
    assert all(run.equals(on_cpu) for run in runs)
    inputs, targets = batches(1)[0]
    runs[0].model(inputs, targets).backward()
    assert all(parameter.grad is None for parameter in runs[0].model.parameters()), "backward offloads them"
    assert all("," not in name for name in found), "--only divides names by commas"


def test_each_wrong_figure_of_a_script_misses_one_limit() -> None:
    row = {
        "script": "step up",
        "capacity_exceeded": False,
        "errors": 0,
        "bits_equal": True,
        "adaptive_s": 1.0,
        "cpu_only_s": 2.0,
        "best_fixed_s": 1.1,
        "bound_s": 0.9,
        "fits_share": 0.5,
        "moved_after_first": 10,
        "same_traffic": False,
    }
    assert missed(memory.limits(row)) == []
    assert missed(memory.limits(row | {"fits_share": 0.2, "cpu_only_s": 1.2})) == []
    for wrong in (
        {"capacity_exceeded": True},
        {"errors": 1},
        {"bits_equal": False},
        {"best_fixed_s": 0.9},
        {"bound_s": 0.8},
        {"cpu_only_s": 1.4},
        {"script": "ample"},
        {"script": "none"},
    ):
        assert len(missed(memory.limits(row | wrong))) == 1, wrong


def test_recordings_are_one_iteration_by_phase() -> None:
    peaks = {"h100_20b_interleaved": 33.4, "h100_20b_zero3_offload": 21.5, "a100_13b_zero3_offload": 31.5}
    updates = {"h100_20b_interleaved": 26.9, "h100_20b_zero3_offload": 14.3, "a100_13b_zero3_offload": 24.7}
    for trace in TRACES:
        recording = Recording.read(trace)
        assert recording.peak / GIB == pytest.approx(peaks[trace], abs=0.1)
        assert recording.update / GIB == pytest.approx(updates[trace], abs=0.1)
        assert recording.backward[-1] == recording.peak, "backward ends at the peak"
        assert max(recording.forward) < recording.peak
        positions = [position for position, _ in recording.script()]
        assert positions == sorted(positions)
        assert positions[-1] == UPDATE


def test_in_the_published_run_the_more_state_is_resident_the_less_is_copied() -> None:
    rank = PublishedRank.read()
    rows = {
        name: memory_h100.simulated(name, plan, work, rank) for name, (plan, work) in memory_h100.plans(rank).items()
    }
    on_cpu, paper, streamed, third, adaptive = rows.values()
    numel = rank.loads.numel
    assert adaptive["h2d_bytes"] == adaptive["d2h_bytes"] == adaptive["dram_bytes"] == 0, "all of the state fits"
    assert adaptive["held_bytes"] == pytest.approx(12 * numel, rel=1e-6)
    assert on_cpu["h2d_bytes"] == on_cpu["d2h_bytes"] == pytest.approx(2 * numel, rel=1e-6)
    assert on_cpu["dram_bytes"] == pytest.approx(32 * numel, rel=1e-6)
    assert paper["h2d_bytes"] == pytest.approx((12 * 16 + 2 * 15) / 31 * numel, rel=1e-6)
    updates = [row["update_s"] for row in (adaptive, third, streamed, paper, on_cpu)]
    assert updates == sorted(set(updates))
    for row in rows.values():
        assert row["update_s"] >= row["bound_s"] * (1 - 1e-9)
        assert row["iteration_s"] == pytest.approx(row["update_s"] + rank.forward_s + rank.backward_s)
