"""The demo end to end on a tiny model: what it writes, that all runs agree, and what it says to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import DOSAdam
from experiments.bench.machines import HEADROOM, ROOM, EmulatedMachine
from experiments.bench.train import main
from experiments.gpt import GPT, GPTConfig
from experiments.paper.ranks import PublishedRank
from perfmodel import Workload
from perfmodel.format import float32
from perfmodel.policies import cpu_only
from perfmodel.simulate import makespan

SETTINGS = {
    "steps": 6,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "subgroup-size": 2000,
    "lr": 0.01,
}
TINY = [f"--{name}={value}" for name, value in SETTINGS.items()]
POLICIES = ("cpu", "0.5", "stride:2", "adaptive")


def test_every_policy_learns_as_adamw_does_and_says_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--policies", ",".join(POLICIES), "--out", str(tmp_path)]) == 0
    summary, emulated = json.loads((tmp_path / "summary.json").read_text()), not torch.cuda.is_available()
    assert set(summary) == {"device", "steps", "max_loss_difference", "policies"}
    runs: dict[str, Any] = summary["policies"]
    assert list(runs) == ["AdamW", *POLICIES]
    for run in runs.values():
        assert set(run) == {"losses", "iteration_s", "update_s", "accelerator_share", "peak_device_bytes"}
        assert len(run["losses"]) == summary["steps"] == 6
        assert 0 < run["update_s"] < run["iteration_s"]
    losses, shares, peak = (
        {name: run[key] for name, run in runs.items()} for key in ("losses", "accelerator_share", "peak_device_bytes")
    )
    assert losses["AdamW"][-1] < losses["AdamW"][0] - 0.1
    gaps = [abs(a - b) for name in POLICIES for a, b in zip(losses[name], losses["AdamW"], strict=True)]
    assert summary["max_loss_difference"] == max(gaps) <= 1e-4
    half = pytest.approx(0.5, abs=0.1)
    assert [shares[name] for name in ("AdamW", "cpu", "0.5", "stride:2")] == [1, 0, half, half]
    assert 0 < peak["cpu"] < peak["stride:2"] < peak["0.5"]
    assert peak["cpu"] < peak["AdamW"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("losses", "timeline"))
    if emulated:
        assert losses["cpu"] == losses["0.5"] == losses["stride:2"] == losses["adaptive"]
        assert (tmp_path / "memory.png").stat().st_size > 10_000
        printed = " ".join(capsys.readouterr().out.split())
        assert "does not fit" in printed[printed.index("│ AdamW") : printed.index("│ cpu")]
        assert printed.count("does not fit │") == 1
        assert re.search(r"AdamW: 6 iterations, last loss [\d.]+, \d+ s; 5 more to come", printed), "where no bar moves"
        assert "the losses are the same to the bit" in printed
        held, capacity = map(int, re.search(r"At most (\d+) of (\d+) MiB", printed).groups())
        assert held <= capacity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "absent"], "No such file"),
        (["--data", "short"], "has 16 bytes; a context of 16 needs 17"),
        (["--policies", "cpu,gpu"], "found 'gpu'"),
        (["--steps", "ten"], "found 'ten'"),
        (["--lr", "-1"], "--lr: expected a number above 0"),
        (["--heads", "5"], "heads must divide the width"),
    ],
)
def test_bad_input_gives_one_clear_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_bytes(b"x" * 16)
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--out", "out", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_emulated_machine_has_the_published_proportions() -> None:
    rank = PublishedRank.read()
    assert rank.update_over_compute == pytest.approx(2.19 / 1.04, rel=0.01)
    model = GPT(GPTConfig(layers=2, width=32, heads=4, context=12))
    machine = EmulatedMachine(model, subgroup_size=1000, compute_s=0.05, steps=9)
    sizes = [1000] * (model.numel // 1000) + [model.numel % 1000]
    update = Workload.of_sizes(sizes, float32("float32"))
    assert makespan(cpu_only(update), update, machine.device.profile) == pytest.approx(
        0.05 * HEADROOM * rank.update_over_compute
    )
    share = model.numel / rank.loads.numel
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert machine.capacity == pytest.approx(rank.recording.peak * share + ROOM * state, abs=2)
    x = torch.zeros(1, 12, dtype=torch.long)
    model(x, x).backward()
    assert machine.device.memory().free == pytest.approx(ROOM * state, abs=2), "the peak of backward"


def test_a_neighbour_comes_and_leaves_on_the_emulated_machine() -> None:
    model = GPT(GPTConfig(layers=1, width=32, heads=2, context=4))
    machine = EmulatedMachine(model, subgroup_size=1000, compute_s=1e-2, steps=9)
    x = torch.zeros(1, 4, dtype=torch.long)
    machine.begin(beside_neighbour=True)
    optimizer = DOSAdam(model.parameters(), device=machine.device, subgroup_size=1000)
    for _ in range(9):
        model(x, x).backward()
        machine.step(optimizer)
    samples = machine.samples
    assert [sample.neighbour > 0 for sample in samples] == [False] * 3 + [True] * 3 + [False] * 3
    assert [sample.time_s for sample in samples] == sorted(sample.time_s for sample in samples)
    peak = machine.capacity - int(ROOM * 2 * sum(p.nbytes for p in model.parameters()))
    assert {sample.own for sample in samples} == {peak}, "of each iteration the fullest moment"
    assert max(sum(sample[1:]) for sample in samples) <= machine.capacity
    machine.begin()
    model(x, x)
    assert [sample.neighbour for sample in machine.samples] == [0], "each run begins anew"
