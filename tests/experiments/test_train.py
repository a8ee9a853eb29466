"""The demo end to end on a tiny model: what it writes, that all runs agree, and what it says to bad input."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import DOSAdam
from experiments.bench.machines import HEADROOM, ROOM, EmulatedMachine
from experiments.bench.train import main
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
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


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*TINY, "--policies", ",".join(POLICIES), "--out", str(folder)]) == 0
    (folder / "printed").write_text(printed.getvalue())
    return folder


@pytest.fixture(scope="module")
def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_summary_has_exactly_the_promised_fields(summary: dict[str, Any]) -> None:
    assert set(summary) == {"device", "steps", "max_loss_difference", "policies"}
    assert isinstance(summary["device"], str)
    assert summary["steps"] == 6
    assert list(summary["policies"]) == ["AdamW", *POLICIES]
    for run in summary["policies"].values():
        assert set(run) == {"losses", "iteration_s", "update_s", "accelerator_share", "peak_device_bytes"}
        assert len(run["losses"]) == 6
        assert 0 < run["update_s"] < run["iteration_s"]


def test_every_policy_learns_as_adamw_does(summary: dict[str, Any]) -> None:
    losses = {name: run["losses"] for name, run in summary["policies"].items()}
    assert losses["AdamW"][-1] < losses["AdamW"][0] - 0.1
    gaps = [abs(a - b) for name in POLICIES for a, b in zip(losses[name], losses["AdamW"], strict=True)]
    assert summary["max_loss_difference"] == max(gaps)
    assert max(gaps) <= 1e-4
    if not torch.cuda.is_available():
        assert losses["cpu"] == losses["0.5"] == losses["stride:2"] == losses["adaptive"]


def test_shares_and_memory_follow_the_policy(summary: dict[str, Any]) -> None:
    runs = summary["policies"]
    assert runs["AdamW"]["accelerator_share"] == 1
    assert runs["cpu"]["accelerator_share"] == 0
    assert runs["0.5"]["accelerator_share"] == pytest.approx(0.5, abs=0.1)
    assert runs["stride:2"]["accelerator_share"] == pytest.approx(0.5, abs=0.1)
    peak = {name: run["peak_device_bytes"] for name, run in runs.items()}
    assert 0 < peak["cpu"] < peak["stride:2"] < peak["0.5"]
    assert peak["cpu"] < peak["AdamW"]


def test_reasons_to_switch_are_said_and_drawn(out: Path, summary: dict[str, Any]) -> None:
    assert all((out / f"{name}.png").stat().st_size > 10_000 for name in ("losses", "timeline", "memory"))
    printed = " ".join((out / "printed").read_text().split())
    if not torch.cuda.is_available():
        row = printed[printed.index("│ AdamW") : printed.index("│ cpu")]
        assert "does not fit" in row
        assert printed.count("does not fit │") == 1
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


def test_batches_are_text_with_its_next_bytes_and_repeat() -> None:
    corpus = Corpus(bytes(range(256)) * 4, context=8)
    batches = corpus.batches(count=3, size=5, seed=7)
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (5, 8)
        assert torch.equal((tokens + 1) % 256, targets)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, corpus.batches(3, 5, seed=7), strict=True))
    assert not torch.equal(batches[0][0], corpus.batches(1, 5, seed=8)[0][0])
    assert standard_library().count(b"\nimport ") > 100
