"""Sweeps: what a file asks for, what is run and kept, what comes out, and every mistake said in one line."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

import pytest

import experiments.paper.sweep.__main__ as sweep
import experiments.paper.sweep.report as sweep_report
from experiments.paper.published import left_out
from experiments.paper.runs import PublishedRun, read_runs
from experiments.paper.sweep.predict import KEYS_OF_RUNS, Outcome, Predictor
from experiments.paper.sweep.report import Interleaving, interleavings
from experiments.paper.sweep.spec import Configuration, read_sweep
from tests.support import ROOT

SMALL = """
axis = "ratio"
[run]
machine = "h100"
model = "7B"
ratio = [0.5, 1.0]
policy = ["zero3_offload", "dos", "adaptive"]
memory = ["ratio", "trace"]
"""


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(read_runs())


def written(folder: Path, text: str, name: str = "small") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def configuration(**values: object) -> Configuration:
    return Configuration.of({"machine": "h100", "model": "20B", "policy": "adaptive", **values})


# Files


def test_lists_are_combined_and_runs_that_do_not_differ_are_one(tmp_path: Path) -> None:
    found = read_sweep(written(tmp_path, SMALL))
    assert [(c.policy, c.ratio, c.memory) for c in found.configurations] == [
        ("zero3_offload", 0.5, None),
        ("dos", 0.5, None),
        ("adaptive", 0.5, "ratio"),
        ("adaptive", None, "trace"),
        ("zero3_offload", 1.0, None),
        ("dos", 1.0, None),
        ("adaptive", 1.0, "ratio"),
    ]
    assert (found.name, found.axis, found.facets) == ("small", "ratio", ())


def test_equal_runs_have_equal_keys() -> None:
    one = configuration(model="7.0B", policy="dos", ratio=1, subgroup_size=1e8, memory=4)
    other = configuration(model="7B", policy="dos", ratio=1.0, subgroup_size=100_000_000)
    assert one == other
    assert configuration(memory=4) == configuration(memory=4.0, ratio=0.3, stride=7)
    others = [configuration(), configuration(memory=4), configuration(ratio=0.5)]
    assert len(set(others)) == len(others)


def test_the_ready_sweeps_are_the_papers_experiments() -> None:
    swept = {path.stem: read_sweep(path) for path in sweep.SWEEPS.glob("*.toml")}
    assert set(sweep_report.READY) < set(swept)

    def axis(name: str) -> list[object]:
        found = swept[name]
        assert found.axis is not None
        values = [getattr(c, found.axis) for c in found.configurations if c.policy == "dos"]
        return list(dict.fromkeys(values))

    assert axis("model_size") == ["7B", "8.3B", "10B", "13B", "20B", "30B"]
    assert axis("ratio") == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert axis("stride") == list(range(2, 11))
    assert axis("data_parallel") == axis("accumulation") == [1, 2, 4, 8, 16]
    assert axis("micro_batch") == [1, 2, 4, 8, 16, 32, 64], "`mbs_all` in the authors' script"
    assert axis("contention") == [0, 0.1, 0.2, 0.4, 0.6, 0.8], "none, and its `hogging_ratios`"
    sizes = axis("subgroup_size")
    assert (min(sizes), max(sizes)) == (10**7, 3 * 10**9)  # type: ignore[type-var]
    assert {c.device for c in swept["emulated"].configurations} == {"emulated"}
    assert {c.model for c in swept["machines"].configurations} == {"7B", "13B", "30B", "70B"}


# Rows


def test_rows_are_written_as_they_are_known(
    tmp_path: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, path = read_sweep(written(tmp_path, SMALL)), tmp_path / "small.csv"
    first_three = map(predictor.outcome, small.configurations[:3])

    def outcome(config: Configuration, predictor: Predictor) -> Outcome:
        if (found := next(first_three, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(sweep, "outcome", outcome)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(small, path, predictor)
    monkeypatch.undo()
    rows = list(csv.DictReader(path.open(newline="")))
    assert [row["policy"] for row in rows] == ["zero3_offload", "dos", "adaptive"]
    assert tuple(rows[0]) == sweep.COLUMNS
    results = sweep.run(small, path, predictor)
    assert len(list(csv.DictReader(path.open(newline="")))) == len(results) == len(small.configurations)


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, predictor: Predictor) -> None:
    path = tmp_path / "small.csv"
    path.write_text("my,own,data\n1,2,3\n")
    with pytest.raises(ValueError, match="has no rows of a sweep"):
        sweep.run(read_sweep(written(tmp_path, SMALL)), path, predictor)
    assert path.read_text() == "my,own,data\n1,2,3\n"


def test_the_command_is_deterministic_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, SMALL))
    assert sweep.main([file, "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert sweep.main([file, "--out", str(tmp_path / "b")]) == 0
    first, second = ((tmp_path / folder / "small.csv").read_bytes() for folder in "ab")
    assert first == second
    assert (tmp_path / "a" / "small.png").stat().st_size > 10_000
    assert "speedup over ZeRO-Offload" in printed


# Outcomes


def test_published_runs_are_found_again_and_fit(predictor: Predictor) -> None:
    for run in predictor.published:
        values = {key: of(run) for key, of in KEYS_OF_RUNS.items() if key != "stride" or run.run.stride}
        config = Configuration.of(values)
        outcome = predictor.outcome(config)
        same = [r for r in predictor.published if r.config == run.config and r.run.mode is run.run.mode]
        assert outcome.published_runs == sum(r.run.stride == run.run.stride for r in same)
        assert outcome.note == ""
        assert outcome.update_s is not None
        assert outcome.iteration_s is not None
        if run.machine_class != "a100_unbound":
            assert outcome.update_s == pytest.approx(run.update_s, rel=0.04)
            assert outcome.iteration_s == pytest.approx(run.iteration_s, rel=0.05)


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_adaptive_takes_no_more_memory_than_the_papers_schedule(predictor: Predictor, ratio: float) -> None:
    run = predictor.run_of(configuration(policy="dos", ratio=ratio))
    found = predictor.simulation(configuration(ratio=ratio))
    resident = predictor.outcome(configuration(ratio=ratio)).resident
    assert resident is not None
    assert resident + found.plan.slots <= run.subgroups - run.offloaded + 1


def test_more_memory_is_never_slower_and_is_what_was_asked_for(predictor: Predictor) -> None:
    outcomes = [predictor.outcome(configuration(memory=gib)) for gib in (0, 2, 8, 20, 46)]
    updates = [o.update_s for o in outcomes]
    assert None not in updates
    assert updates == sorted(updates, reverse=True)  # type: ignore[type-var]
    assert (outcomes[0].resident, outcomes[0].streamed) == (0, 0)
    assert outcomes[-1].resident == outcomes[-1].subgroups
    for o in outcomes:
        assert o.bound_s is not None
        assert o.update_s is not None
        assert o.update_s >= 0.999 * o.bound_s
        assert None not in (o.resident, o.streamed, o.on_cpu)
        assert o.resident + o.streamed + o.on_cpu == o.subgroups  # type: ignore[operator]


def test_published_runs_that_interleaving_did_not_help_are_found(predictor: Predictor) -> None:
    found = interleavings(predictor.published)
    assert all(item.gain > 0 for item in found)
    doubtful = {(i.interleaved[0].model, i.interleaved[0].ranks) for i in found if i.doubtful}
    assert doubtful == {("7B", 16), ("7B", 8), ("13B", 1)}
    run = found[0].interleaved[0]

    def repeats(*iterations_s: float, backward_s: float = 0.0, update_s: float = 0.0) -> list[PublishedRun]:
        times = {"backward_s": backward_s, "update_s": update_s}
        return [dataclasses.replace(run, iteration_s=iteration_s, **times) for iteration_s in iterations_s]

    cpu = repeats(2.0, update_s=1.0)
    assert not Interleaving(cpu, repeats(1.0)).doubtful
    assert not Interleaving(cpu, repeats(1.0, backward_s=0.1)).doubtful
    assert Interleaving(cpu, repeats(1.0, backward_s=0.11)).doubtful
    assert Interleaving(cpu, repeats(1.0, 1.0, 2.1)).doubtful, "they overlap"
    assert Interleaving(cpu, repeats(1.99)).doubtful, "repeats differ by as much"


def test_the_report_is_what_the_model_says_now(predictor: Predictor) -> None:
    found = {}
    for name in sweep_report.READY:
        one = read_sweep(sweep.SWEEPS / f"{name}.toml")
        found[name] = (one, {c: predictor.outcome(c) for c in one.configurations})
    fresh = sweep_report.report(found, predictor, left_out(predictor.runs))
    committed = (ROOT / sweep.REPORT).read_text()
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("#", fresh) == number.sub("#", committed), "run `make experiments` and look at what has changed"
    for new, old in zip(number.findall(fresh), number.findall(committed), strict=True):
        last_digit = 10.0 ** -len(new.partition(".")[2]) if "." in new else 0.0
        assert abs(float(new) - float(old)) <= 1.01 * last_digit, "run `make experiments`, look at what has changed"
    for picture in re.findall(r"\]\((images/.*?)\)", committed):
        assert (ROOT / "docs" / picture).stat().st_size < 200_000


# On a device


def test_a_small_model_trains_on_an_emulated_device(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.paper.sweep import device
    from experiments.paper.sweep.device import run_on_device, small_model

    monkeypatch.setattr(device, "UPDATE_S", 0.1)
    common = {"model": "7B", "device": "emulated", "parameters": 2e5, "ratio": 0.5}
    cpu, ours = (configuration(policy=policy, **common) for policy in ("cpu", "adaptive"))
    assert small_model(ours).numel == pytest.approx(2e5, rel=0.05)
    slow, fast = run_on_device(cpu, predictor), run_on_device(ours, predictor)
    assert slow.update_s == pytest.approx(0.1)
    run = predictor.run_of(ours)
    assert (slow.resident, slow.on_cpu) == (0, run.subgroups)
    assert fast.resident is not None
    assert 0 < fast.resident <= run.subgroups - run.offloaded
    for outcome in (slow, fast):
        assert outcome.update_s is not None
        assert outcome.measured_update_s is not None
        assert outcome.measured_update_s > 0.9 * outcome.update_s  # an emulated device is never faster than it says


# Mistakes

RUN = '[run]\nmachine = "h100"\nmodel = "7B"\npolicy = "adaptive"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run\n", "small.toml: "),
        ("", "needs a table [run]"),
        ('[run]\nmachine = "h100"\nmodel = "7B"\n', "a run needs 'policy'"),
        (RUN + "colour = 1\n", "unknown key 'colour'"),
        ('axis = "ratio"\n' + RUN, "axis must be a key of the runs"),
        (RUN.replace('"h100"', '"h900"'), "'h900' is neither a built-in profile"),
        (RUN.replace('"7B"', '"large"'), "model must be a size in billions of parameters such as '7B', found 'large'"),
        (RUN.replace('"adaptive"', '"best"'), "policy must be one of zero3_offload"),
        (RUN + "ranks = -4\n", "ranks must be a whole number of 1 or more, found -4"),
        (RUN + "ranks = 6\nranks_per_node = 4\n", "ranks must be a multiple of ranks_per_node, found 6 and 4"),
        (RUN + "stride = []\n", "stride is an empty list"),
        (RUN + "ratio = 1.2\n", "must lie in [0, 1], found 1.2"),
        (RUN.replace("h100", "gh200").replace("adaptive", "dos"), "policy 'dos' needs a published machine"),
        (
            RUN.replace("adaptive", "dos") + 'device = "emulated"\n',
            "DeepSpeed's loop and cannot run on device 'emulated'",
        ),
        (RUN + "[[together]]\nranks = [1, 2]\nratio = [1.0]\n", "must have one length, found {'ranks': 2, 'ratio': 1}"),
        (RUN + "[[together]]\nmodel = ['13B']\n", "'model' is given twice"),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_a_mistake_in_a_file_gets_one_line_and_status_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        sweep.main([str(written(tmp_path, text)), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ratio", "--report"], "--report is of all ready sweeps; leave out ratio"),
        (["ratio", "ratio"], "two sweeps are called 'ratio'"),
        (["ratio", "--out", "Makefile"], "Makefile"),
    ],
)
def test_a_mistake_in_the_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        sweep.main(arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("python -m experiments.sweep: ")
    assert message in last
