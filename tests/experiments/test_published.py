"""The fits to published runs: their figures on runs left out, and the profiles made of them."""

import json
from pathlib import Path

import pytest

from experiments.paper import published
from experiments.paper.runs import read_runs
from perfmodel.hardware import builtin_profiles


def test_a_model_left_out_is_predicted() -> None:
    bound = [run for run in read_runs() if run.machine_class != "a100_unbound"]
    cases = published.cross_validation(bound, lambda run: run.model)
    of_13b = {name: [p for p in found if p.published.model == "13B"] for name, found in cases.items()}
    found = {name: published.summary(name, predictions) for name, predictions in of_13b.items()}
    assert {name: errors["runs"] for name, errors in found.items()} == {"h100": 3, "a100_bound": 5}
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
    bound = [run for run in read_runs() if run.machine_class != "a100_unbound"]
    monkeypatch.setattr(published, "read_runs", lambda: bound)
    assert published.main(["--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert set(json.loads(out[-1])) == {"h100", "a100_bound"}
    assert any("strides left out" in line for line in out)
    assert {p.name for p in (tmp_path / "out/published").iterdir()} == {"models_left_out.png", "strides_left_out.png"}


def test_the_builtin_profiles_are_what_the_command_writes(tmp_path: Path) -> None:
    published.write_profiles(read_runs(), tmp_path)
    for path in tmp_path.iterdir():
        written, stored = json.loads(path.read_text()), builtin_profiles()[path.stem].to_json()
        rates = {k: v for k, v in stored.items() if isinstance(v, float)}
        assert {k: written[k] for k in rates} == pytest.approx(rates, rel=0.01)
