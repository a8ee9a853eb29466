"""The planner's arithmetic, and the model of ZeRO-3's loop, against training runs that others published."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.paper import peers
from experiments.paper.arithmetic import BY_THESE_RUNS, main
from perfmodel.planner.machine import CARDS, GPUS, Gpu
from tests.support.pages import page


@pytest.mark.parametrize("models", [("15B", "Qwen2.5 14B"), pytest.param((), marks=pytest.mark.slow)])
def test_compute_alone_is_below_runs_and_the_loop_and_the_planner_are_near_them(
    models: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of ZeRO-3's with everything offloaded, 8B on an RTX 4090, and peers', as docs/planning.md quotes them.

    models: of peers' runs, of which on GeForce cards alone; else all runs.
    """
    if models:
        heading, *lines = peers.PEERS.read_text().splitlines(keepends=True)
        chosen = [line for line in lines if any(f",{model}," in line for model in models) and ",h100" not in line]
        (tmp_path / "peers.csv").write_text("".join([heading, *chosen]))
        monkeypatch.setattr(peers, "PEERS", tmp_path / "peers.csv")
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = found["runs"]
    offloaded = [row for row in rows if row["residual"] is not None]
    assert [row["measured_s"] for row in offloaded] == pytest.approx([8.9672, 11.9340, 18.2987], rel=1e-4)
    assert all(row["compute_s"] < row["measured_s"] for row in rows if row["gpu"] in BY_THESE_RUNS)
    text = page("planning").read_text()
    for row in offloaded:
        times = (f"{row[name]:.2f}" for name in ("measured_s", "compute_s", "modelled_s"))
        assert f"| {row['batch']} | {' | '.join(times)} | {row['residual']:+.0%} |" in text
    assert len(found["peers"]) == (2 if models else 24)
    table = re.findall(r"^\| (\w+) \| ([^|]+) \| (\d+) \|.*\| ([+-]\d+)%(?: to ([+-]\d+)%)? \|$", text, re.MULTILINE)
    told = {(software, gpu): (int(runs), int(low), int(high or low)) for software, gpu, runs, low, high in table}
    residuals = defaultdict(list)
    for row in found["peers"]:
        residuals[row["software"], row["gpu"]].append(round(100 * row["residual"]))
    for run, of_run in residuals.items():
        _, low, high = told[run]
        assert low <= min(of_run) <= max(of_run) <= high, run
        assert models or told[run] == (len(of_run), min(of_run), max(of_run)), run


@pytest.mark.parametrize("gpu", {gpu.name: gpu for gpu in (*GPUS.values(), *(c.gpu for c in CARDS.values()))}.values())
def test_what_a_gpu_reaches_follows_from_what_was_measured_and_is_documented(gpu: Gpu) -> None:
    assert 0 < gpu.utilisation <= 1
    if products := re.fullmatch(r"80% of ([\d.]+), measured of matrix products", gpu.basis):
        assert gpu.utilisation == pytest.approx(math.floor(80 * float(products[1]) / gpu.tflops_16bit) / 100)
    else:
        assert gpu.basis.startswith("a published run")
    short = gpu.name if gpu.name.startswith("A100") else re.sub(r"^RTX (?=A)| \d+ GB$", "", gpu.name)
    row = re.compile(rf"^\|[^|\n]*\b{short}\b[^|\n]*\|([^|\n]*)\| (\d+%) \|", re.MULTILINE)
    told = row.search(page("planning").read_text())
    assert told, "a row of docs/planning.md"
    assert f"{gpu.tflops_16bit:g}" in told[1]
    assert told[2] == f"{gpu.utilisation:.0%}"
