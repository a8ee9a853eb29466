"""The command that fits the published runs: its report, its figures on held-out runs, and bad files."""

import csv
import json
from pathlib import Path

import pytest

from experiments.bench import planner
from experiments.harness import missed
from experiments.paper import published
from experiments.paper.runs import OVERSHOOT, machine_class, read_runs
from perfmodel.hardware import builtin_profiles

ROWS = list(csv.DictReader(published.RUNS.open(newline="")))
KEYS = {
    "runs", "update_median_error", "update_max_error", "backward_median_error", "speedup_median_error",
    "stride_hits", "stride_cases",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def report(fit: Path, test: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert published.main(["--fit", str(fit), "--test", str(test), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_model_left_out_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bound = [r for r in ROWS if r["machine"] == "h100" or r["numa_bound"] == "1"]
    fit = write(tmp_path / "fit.csv", [r for r in bound if r["model"] != "13B"])
    test = write(tmp_path / "test.csv", [r for r in bound if r["model"] == "13B"])
    found = report(fit, test, capsys)
    assert set(found) == {"h100", "a100_bound"}
    assert set(found["h100"]) == KEYS
    assert (found["h100"]["runs"], found["a100_bound"]["runs"]) == (3, 5)
    for errors in found.values():
        assert errors["update_median_error"] <= 0.03
        assert errors["update_max_error"] <= 0.1
        assert errors["backward_median_error"] <= 0.1
        assert errors["speedup_median_error"] <= 0.05
    assert (found["a100_bound"]["stride_hits"], found["a100_bound"]["stride_cases"]) == (1, 1)


def test_cross_validation_draws_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = write(tmp_path / "fit.csv", [r for r in ROWS if r["numa_bound"] == "1"])
    assert published.main(["--fit", str(fit), "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert set(json.loads(out[-1])) == {"h100", "a100_bound"}
    assert any("strides left out" in line for line in out)
    assert {p.name for p in (tmp_path / "out/published").iterdir()} == {"models_left_out.png", "strides_left_out.png"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": None, "update_ms": None}, "missing columns stride, update_ms"),
        ({"machine": "v100"}, "line 2: machine must be a100 or h100, found 'v100'"),
        ({"mode": "magic"}, "line 2: 'magic' is not a valid Mode"),
        ({"update_ms": "-3"}, "update_ms must be positive, found '-3'"),
        ({"update_ms": ""}, "line 2: could not convert"),
        ({"numa_bound": "maybe"}, "numa_bound must be 0 or 1"),
        ({"cpu_ratio": "1.5"}, r"cpu_ratio in [0, 1]"),
    ],
)
def test_bad_files_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], message: str
) -> None:
    row = {k: v for k, v in {**ROWS[0], **change}.items() if v is not None}
    path = write(tmp_path / "bad.csv", [row])
    with pytest.raises(SystemExit, match="2"):
        published.main(["--test", str(path)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert "bad.csv" in error


def test_a_class_without_runs_to_fit_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = write(tmp_path / "fit.csv", [r for r in ROWS if r["machine"] == "h100"])
    with pytest.raises(SystemExit, match="2"):
        published.main(["--fit", str(fit), "--test", str(published.RUNS)])
    assert "no run of that class to fit to" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        published.main(["--fit", str(tmp_path / "none.csv")])
    (tmp_path / "empty.csv").write_text(",".join(ROWS[0]) + "\n")
    with pytest.raises(SystemExit, match="2"):
        published.main(["--fit", str(tmp_path / "empty.csv")])
    assert "empty.csv: no runs" in capsys.readouterr().err


def test_subgroups_are_estimated_where_a_file_does_not_count_them(tmp_path: Path) -> None:
    row = {k: v for k, v in ROWS[0].items() if k != "n_subgroups"}
    (run,) = read_runs(write(tmp_path / "runs.csv", [row]))
    assert run.run.subgroups == round(float(row["params_rank"]) / (OVERSHOOT * float(row["subgroup_size"])))
    assert machine_class("h100", "0") == "h100"


def test_the_builtin_profiles_are_what_the_command_writes(tmp_path: Path) -> None:
    published.write_profiles(read_runs(published.RUNS), tmp_path)
    for path in tmp_path.iterdir():
        written, stored = json.loads(path.read_text()), builtin_profiles()[path.stem].to_json()
        rates = {k: v for k, v in stored.items() if isinstance(v, float)}
        assert {k: written[k] for k in rates} == pytest.approx(rates, rel=0.01)


def test_planner_reports_and_meets_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "SUBGROUPS", (10, 50))
    assert planner.main(["--json", "--profile", "h100"]) in (0, 1)  # 1: planning times on a busy machine
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 2 * len(planner.BUDGETS)
    assert set(rows[0]) == {
        "profile", "n", "memory_budget", "plan_s", "first_s", "adaptive_s", "best_stride_s", "best_ratio_s",
        "cpu_only_s", "bound_s", "search_s", "calls",
    }  # fmt: skip
    assert not missed(planner.limits([{**r, "plan_s": 0.0, "search_s": 0.0} for r in rows]))
    with pytest.raises(SystemExit, match="2"):
        planner.main(["--profile", "abacus"])
