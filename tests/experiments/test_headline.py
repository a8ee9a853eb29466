"""The headline's contenders run in processes of their own; what the planner says stands beside DOSAdam's figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from experiments.check.base import Check, Record, Status
from experiments.check.headline import main, median_of
from experiments.check.training_ways import Steps, divided, predicted, question_of
from experiments.check.ways import BACKWARD, JOBS, LARGE, MEDIUM, STREAMING, Way, ways
from experiments.simdev.build import UnavailableError, library
from perfmodel.planner.machine import find_machine
from perfmodel.planner.situation import Situation


def test_contenders_have_figures_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["DOSAdam, memory for half, updates in backward", "torchao CPUOffloadOptimizer"]
    quiet = ["--out", str(tmp_path), "--json", "--model", "1.2B"]
    assert main([*quiet, *(word for name in names for word in ("--contender", name))]) == 0
    printed = capsys.readouterr()
    ours, peer = json.loads(printed.out)["rows"]
    assert [row["contender"] for row in (ours, peer)] == names
    assert ours["tokens_per_s"] == pytest.approx(ours["tokens_per_step"] / ours["iteration_s"])
    assert ours["tokens_per_step"] == 2 * 16
    assert sum(ours["metrics"][f"share_{place}"] for place in ("cpu", "gpu_streamed", "gpu_resident")) == pytest.approx(
        1
    )
    if not torch.cuda.is_available():
        assert "a tiny model stands for 1.2B. The command runs; no figure means anything." in printed.err
    assert "tokens_per_s" in peer or peer["note"] == "torchao is not installed"


@pytest.mark.parametrize(("gpu", "known"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA GeForce RTX 9999", False)])
def test_the_planner_s_word(gpu: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More micro-batches are faster; of a GPU that the planner does not know nothing is said."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    once, often = predicted(JOBS[LARGE], 1), predicted(JOBS[LARGE], 4)
    assert (once is not None) == (often is not None) == known
    early = predicted(JOBS[LARGE], 1, BACKWARD)
    if once is not None and often is not None and early is not None:
        assert 6000 < once < min(early, often) < 13000


def test_the_median_of_rounds_is_shown_with_all() -> None:
    turns = [{"tokens_per_s": rate, "note": ""} for rate in (3.0, 1.0, 2.0)] + [{"note": "does not fit"}]
    assert median_of(turns) == {"tokens_per_s": 2.0, "note": "", "rounds": [3.0, 1.0, 2.0]}
    assert median_of(turns[3:]) == {"note": "does not fit"}


def test_eight_billion_in_a_slice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is planned with the slice's memory, and runs where that is less than the weights take."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    everywhere, exact, coded = ways(STREAMING)[1:]
    rates = [predicted(JOBS[STREAMING], 4, way, 24 << 30) for way in (exact, coded, everywhere)]
    assert 5000 < rates[0] < rates[1] < 11_000
    assert rates[0] < rates[2] < 11_000
    assert predicted(JOBS[STREAMING], 4, exact, 8 << 30) == 0.0, "it does not fit"
    names = ["--contender", coded.name, "--tokens", "32768", "--batch", "2"]
    assert main(["--out", str(tmp_path), "--json", "--model", STREAMING, *names]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["batch"], row["tokens_per_step"]) == (2, 16 * 16), row["note"]


def test_micro_batches_are_the_largest_that_fit() -> None:
    everywhere, exact, _ = ways(STREAMING)[1:]
    h100 = find_machine("h100", None)

    def counts(way: Way, **steps: Any) -> tuple[int, int]:
        job, micro_batches = divided(JOBS[STREAMING], way, Steps(**steps), h100)
        return job.batch, micro_batches

    assert counts(exact, tokens=32768) == (8, 2)
    batch, _ = counts(exact, tokens=2048 * 720_720)  # which all numbers up to 16 divide
    question = question_of(JOBS[STREAMING], 2, exact, h100, 24 << 30)
    assert [Situation(question.replace(batch=batch + more)).fits for more in (0, 1)] == [True, False]
    assert counts(everywhere, tokens=32768) == (16, 1)
    assert counts(everywhere, tokens=32768, batch=15) == (8, 2)
    assert counts(exact, tokens=32768, slice_bytes=2 << 30) == (1, 16), "it will be said not to fit"
    assert counts(exact, micro_batches=3, batch=5) == (5, 3)


def test_smaller_micro_batches_are_tried_where_the_largest_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(check: Check, *_: object) -> Record:
        batch = cast(Any, check.run).args[2].batch or 8
        note = {"note": "does not fit"} if batch > 5 else {"note": "", "tokens_per_s": 1.0, "spread": ""}
        return Record("", Status.PASSED, figures={"batch": batch, **note})

    monkeypatch.setattr("experiments.check.headline.find_gpu", lambda: (None, None))
    monkeypatch.setattr("experiments.check.headline.run_isolated", run)
    assert main(["--out", str(tmp_path), "--json", "--tokens", "16384", "--contender", "DOSAdam"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["batch"], row["note"]) == (5, "")


def on_a_dry_gpu(model: str, *names: str, out: Path, shown: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The rows, as --json gives them."""
    asked = [word for name in names for word in ("--contender", name)]
    assert main(["--dry", "h100", "--out", str(out), "--json", "--model", model, *asked]) == 0
    return json.loads(shown.readouterr().out)["rows"]


def test_a_dry_gpu_runs_no_other_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "AdamW, bfloat16 state", "torchao CPUOffloadOptimizer"
    rows = on_a_dry_gpu(LARGE, *names, out=tmp_path, shown=capsys)
    assert [(row["contender"], row["note"]) for row in rows] == [(name, "needs a GPU") for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("model", JOBS)
def test_models_train_on_a_dry_gpu_at_full_size(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They hold as much memory there as on a GPU, and hardly any here."""
    try:
        library()
    except UnavailableError as unavailable:
        pytest.skip(str(unavailable))
    name = "DOSAdam, memory for half" if model == MEDIUM else ways(model)[-1 if model == STREAMING else 1].name
    (row,) = on_a_dry_gpu(model, name, out=tmp_path, shown=capsys)
    assert row["tokens_per_s"] == pytest.approx(8192 / row["iteration_s"]), row["note"]
    assert row["gpu_bytes"] > 2 * JOBS[model].numel * (model != STREAMING)
    assert (row["predicted_tokens_per_s"] is None) == (model == MEDIUM)
