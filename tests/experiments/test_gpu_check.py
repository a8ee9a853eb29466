"""The check of everything, at its smallest: what it writes, that nothing stops it, and its exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from dos import EmulatedDevice
from dos.planning.policies import AdaptivePolicy, resolve_policy
from dos.planning.reading import Source
from experiments.check import calibration, suite
from experiments.check.base import Bench, Check, Record, Settings, Size, Skipped, Status, run_isolated
from experiments.check.contenders import MASTERS, NOTHING, PLAIN, Contender, Kind, Ours, Own, Rig
from experiments.check.contest import EFFORTS, FIXED, Clock, Effort, compete, named, run_rounds
from experiments.check.gpu_check import CHECKS, find_gpu, main, run_all
from experiments.check.models import MEDIUM, Batch, fitted
from experiments.check.report import alarms, show
from experiments.check.streaming import LARGE, MOST_SEQUENCES, largest_batch
from experiments.harness import Limit
from perfmodel.hardware import HardwareProfile
from tests.support import ROOT
from tests.support.clock import eventually
from tests.support.neighbour import CHUNK, Neighbour
from tests.support.sample_checks import goes_on, hangs, is_killed, passes, raises, runs_tests, skips
from tests.support.training import FAST

TINY = ("--size=tiny", "--minutes=1")
SETTINGS = {"size": Size.TINY, "cuda": False}


def check(run: Callable[[Bench], None]) -> Check:
    return Check(run.__name__, f"a check that {run.__name__}", run, share=1, least_s=0.0)


def run(out: Path, *arguments: str, checks: tuple[Check, ...] = CHECKS) -> tuple[int, dict[str, Any]]:
    """Exit status and results.json, on an emulated accelerator even where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.check.gpu_check.find_gpu", lambda: (None, None))
        status = main([*TINY, f"--out={out}", *arguments], checks)
    return status, json.loads((out / "results.json").read_text())


def test_a_failing_check_stops_no_other(tmp_path: Path) -> None:
    order = (raises, is_killed, goes_on, skips, passes)
    status, results = run(tmp_path, checks=tuple(map(check, order)))
    assert status == 1
    found = results["checks"]
    assert [(name, c["status"]) for name, c in found.items()] == [
        ("raises", "failed"),
        ("is_killed", "failed"),
        ("goes_on", "failed"),
        ("skips", "skipped"),
        ("passes", "passed"),
    ]
    assert results["failed"] == ["raises", "is_killed", "goes_on"]
    assert found["raises"]["reason"] == "ValueError: on purpose"
    assert 'raise ValueError("on purpose")' in found["raises"]["traceback"]
    assert "SIGKILL" in found["is_killed"]["reason"]
    assert found["goes_on"]["problems"] == ["the first thing wrong", "the second thing wrong"]
    assert found["skips"]["reason"] == "for a reason"
    # Figures measured before are not lost.
    assert found["raises"]["figures"] == {"before": "it broke"}
    assert found["is_killed"]["figures"] == {"before": "it was killed"}
    assert found["passes"]["figures"] == {"answer": 42}


def test_a_check_that_hangs_is_killed_with_what_it_has_started_and_says_where(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path, **SETTINGS)
    run_isolated(check(passes), settings, seconds=60.0)  # the first one waits for imports
    record = run_isolated(check(hangs), settings, seconds=0.2, grace_s=5.0)
    assert record.status is Status.FAILED
    assert "did not end" in record.reason
    assert "in hangs" in record.traceback
    assert eventually(lambda: not runs(record.figures["child"])), "it still runs"


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_check_ends_with_what_it_has_started_when_its_caller_is_killed(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from experiments.check.base import Check, Settings, Size, run_isolated
from tests.support.sample_checks import hangs
run_isolated(Check("hangs", "", hangs, 1), Settings(Size.TINY, False, Path({str(tmp_path)!r})), seconds=600)
"""
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    record = tmp_path / "checks" / "hangs.json"
    try:
        assert eventually(lambda: record.exists() and "child" in record.read_text(), 60.0), "it has not begun"
    finally:
        os.killpg(caller.pid, signal.SIGKILL)
        caller.wait()
    child = json.loads(record.read_text())["figures"]["child"]
    assert eventually(lambda: not runs(child)), "it still runs"


def test_what_there_is_no_time_for_is_not_run(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--minutes=0.0001")
    assert status == 1
    assert results["not_run"] == [c.name for c in CHECKS]
    assert all("--minutes" in results["checks"][name]["reason"] for name in results["not_run"])


RAN = ("environment", "contest", "overlap")


@pytest.mark.slow
def test_results_have_every_figure_and_say_where_and_when(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--minutes=5", f"--only={','.join(RAN)}")
    assert status == 0, results["failed"]
    assert set(results) == {
        *("what", "gpu", "emulated", "date", "commit", "changed_files", "size", "minutes", "host_bytes", "seconds"),
        *("complete", "checks", "failed", "not_run", "running", "alarms", "targets_missed"),
        *("parameters", "slice_bytes", "batch"),
    }
    assert results["complete"] is True
    assert (results["emulated"], results["gpu"], results["size"]) == (True, None, "tiny")
    assert list(results["checks"]) == [c.name for c in CHECKS]
    for name, found in results["checks"].items():
        assert found["status"] in ("passed", "skipped")
        assert found["status"] == "passed" or found["reason"]
        assert ("not asked for" in found["reason"]) == (name not in RAN)

    environment, contest, overlap = (results["checks"][name]["figures"] for name in RAN)
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} <= set(environment["variables"])
    adaptive = named(0.25)
    assert {adaptive, *FIXED, MASTERS, PLAIN, NOTHING} < set(contest["contenders"])
    assert all(min(each["iteration_s"], each["step_on_host_s"]) > 0 for each in contest["contenders"].values())
    assert contest["memory_source"] == "the device itself"
    assert contest["pinned"] is None, "an emulated device's memory need not be"
    update = contest["contenders"][adaptive]["update"]
    assert update["share_gpu_resident"] <= 0.25, "it has memory for no more of the state"
    assert min(update[name] for name in ("update_s", "predicted_s", "bound_s")) > 0
    assert f"{adaptive} against ratio 0.75" in contest["adaptive_over_fixed"]
    trace = json.loads((tmp_path / contest["timelines"]["CPU only"]["trace"]).read_text())
    assert {"gradient", "update", "parameter"} <= {event.get("cat") for event in trace["traceEvents"]}
    assert overlap["slower"]["alone"] == {"forward": 1.0, "backward": 1.0}
    assert set(overlap["slower"]["copies both ways"]) == {"forward", "backward"}
    assert set(overlap["copies_longer"]) == {"copies to the GPU", "copies to the host", "copies both ways"}
    assert set(overlap["waited"]) == {"a saved tensor"}, "what is emulated has no queue of the caller's"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--minutes=0"], "argument --minutes: expected a number above 0"),
        (["--size=huge"], "invalid choice"),
        (["--host-bytes=much"], "expected a size such as 24GiB"),
        (["--only=contest,nonsense"], "no check 'nonsense'; there are environment"),
        (["--out=Makefile"], "--out"),
    ],
)
def test_bad_arguments(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.check.gpu_check.find_gpu", lambda: (None, None))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert says in capsys.readouterr().err


def test_the_gpu_is_found_by_another_process() -> None:
    name, _ = find_gpu()
    assert name == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)


def test_records_survive_json() -> None:
    record = Record("a", Status.PASSED, figures={"b": [1.0, float("inf")]}, targets=[Limit.at_least("c", 1.0, 2.0)])
    again = Record.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))
    assert again.figures == {"b": [1.0, None]}
    assert (again.status, again.targets) == (record.status, record.targets)


class Fake(Contender):
    """A contender whose work takes no time; it has no updates."""

    def __init__(self, name: str, fits: bool = True) -> None:
        self.name, self._fits = name, fits

    def open(self) -> None:
        if not self._fits:
            raise torch.OutOfMemoryError("out of memory. And more")

    def close(self) -> None: ...

    def compute(self, batch: Batch) -> None: ...

    def step(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


def broken(model: object, job: object) -> Any:
    raise RuntimeError("no compiler")


def test_a_contender_that_does_not_fit_or_is_broken_is_dropped_and_says_why(tmp_path: Path) -> None:
    job, device, here = MEDIUM[Size.TINY], torch.device("cpu"), bench(tmp_path)
    peer = Own(Kind("a peer", "torch", "none", broken), job, device)
    compete(here, [peer, Fake("large", fits=False), Fake("b")], job.batches(1, device), EFFORTS[Size.TINY])
    found = written(tmp_path)["figures"]["contenders"]
    assert found["a peer"]["dropped"] == "a peer is installed but failed: RuntimeError: no compiler"
    assert found["large"]["dropped"] == "does not fit: out of memory"
    assert found["b"]["iteration_s"] > 0
    late = run_rounds([Fake("a")], job.batches(1, device), EFFORTS[Size.TINY], Clock(False), lambda: -1.0, dict)
    assert "no time" in late["a"].dropped


def rig() -> tuple[Rig, EmulatedDevice]:
    job = MEDIUM[Size.TINY]
    emulated = EmulatedDevice(FAST, capacity=100 * job.numel)
    return Rig(job, torch.device("cpu"), emulated, FAST, job.numel // 8 + 1), emulated


def test_ours_has_as_much_on_the_device_as_it_has_memory_for() -> None:
    shared, _ = rig()
    contenders = [Ours("cpu", shared, resolve_policy("cpu"), 1.0)]
    shares = {"all": 1.0, "most": 0.75, "none": 0.0}
    contenders += [Ours(name, shared, AdaptivePolicy(FAST), share) for name, share in shares.items()]
    batches = MEDIUM[Size.TINY].batches(1, torch.device("cpu"))
    effort = Effort(warm_up=1, timed=1, updates=1, rounds=1)
    scores = run_rounds(contenders, batches, effort, Clock(cuda=False), lambda: 1e9, lambda scores: None)
    shares = {name: score.typical()["share_gpu_resident"] for name, score in scores.items()}
    assert shares["cpu"] == shares["none"] == 0.0
    assert shares["all"] == 1.0
    assert 0.3 < shares["most"] <= 0.76  # some of the memory may be for slots


def test_contenders_of_their_own_find_no_state_on_the_device() -> None:
    shared, emulated = rig()
    contender = Ours("all", shared, AdaptivePolicy(FAST), 1.0)
    (batch,) = MEDIUM[Size.TINY].batches(1, torch.device("cpu"))
    contender.open()
    for turn in range(2):
        for _ in range(2):
            contender.compute(batch)
            contender.step()
        assert contender.metrics()["share_gpu_resident"] == 1.0, turn
        shared.release()
        assert emulated.usage().held == 0


def test_an_emulated_machine_is_calibrated_as_it_is(tmp_path: Path) -> None:
    calibration.run(bench(tmp_path))
    (target,) = written(tmp_path)["targets"]
    assert target["name"].startswith("calibration against what is emulated")
    found = calibration.measured_profile(tmp_path, torch.device("cpu"))
    assert found == HardwareProfile.load(tmp_path / calibration.FILE)


def test_jobs_know_their_parameters_and_are_cut_to_what_fits(tmp_path: Path) -> None:
    for size in (Size.TINY, Size.SMALL):
        assert MEDIUM[size].numel == MEDIUM[size].model(torch.device("cpu")).numel
    job, here = MEDIUM[Size.FULL], bench(tmp_path)
    assert job.numel == pytest.approx(1.56e9, rel=0.01)
    assert 0.95e9 < job.fitting(1e9).numel <= 1e9
    assert job.fitting(1e12) == job
    with pytest.raises(Skipped, match="memory here is enough for 1M parameters"):
        fitted(job, here, most=1e6)
    here.settings = dataclasses.replace(here.settings, host_bytes=20 << 30)
    assert 0.75 * (20 << 30) < 16 * fitted(job, here).numel <= 0.8 * (20 << 30)


def test_the_batch_of_the_model_that_streams_is_the_largest_that_fits() -> None:
    device = torch.device("cpu")
    batches = [largest_batch(LARGE[Size.FULL], device, gib << 30, 0) for gib in (4, 8, 12, 16, 24)]
    assert batches == sorted(batches)
    assert 1 <= batches[0] < batches[2] < batches[3]
    assert batches[-1] == MOST_SEQUENCES
    assert largest_batch(LARGE[Size.FULL], device, 16 << 30, "auto") == batches[3], "all blocks may stream"


@pytest.mark.slow
def test_the_large_model_that_streams_is_as_large_as_asked_in_the_memory_asked_for(tmp_path: Path) -> None:
    """Also where its weights fit there."""
    asked = "--parameters=100e3", "--slice=512KiB", "--batch=2"
    status, results = run(tmp_path, "--only=streaming", *asked)
    assert status == 0, results["failed"]
    large = results["checks"]["streaming"]["figures"]["large"]
    assert (large["gpu_bytes"], large["batch"]) == (2**19, 2)
    assert 85e3 < large["parameters"] <= 100e3
    assert large["weight_bytes"] < large["gpu_bytes"]


def test_a_neighbour_holds_what_it_is_told_to() -> None:
    neighbour = Neighbour("cpu")
    try:
        for wanted in (3 * CHUNK, CHUNK, 5 * CHUNK, 0):
            neighbour.want(wanted)
            assert neighbour.held() == wanted, "at once, so that the next iteration can be judged"
    finally:
        neighbour.close()


def bench(tmp_path: Path, seconds: float = 60.0) -> Bench:
    return Bench("sample", Settings(out=tmp_path, **SETTINGS), seconds, tmp_path / "sample.json")


def written(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "sample.json").read_text())


def test_memory_that_is_not_pinned_is_said_first_and_last(tmp_path: Path) -> None:
    fine = Record("policies", Status.PASSED, figures={"pinned": True, "memory_source": "NVML"})
    spoilt = Record("largest", Status.PASSED, figures={"pinned": False, "memory_source": Source.NO_NVML.value})
    assert alarms([fine, Record("kernels", Status.PASSED)]) == []
    assert alarms([Record("tests", Status.SKIPPED, f"{suite.NOT_COMPARED} (pip)")])[0].startswith("BITS WERE NOT")
    unpinned, blind = alarms([fine, spoilt])
    assert unpinned.startswith("HOST MEMORY IS NOT PINNED (largest): ")
    assert blind.startswith(f"FREE MEMORY COMES FROM {Source.NO_NVML.value} (largest)")
    console = Console(record=True, width=160)
    show(console, {"gpu": "a GPU"}, [fine, spoilt], {"policies": "", "largest": ""})
    lines = console.export_text().splitlines()
    assert lines[0] == lines[-2] == unpinned


TESTS_OF_ALL_KINDS = """
import multiprocessing, os, pytest
def test_passes():
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0
@pytest.mark.parametrize("x", ["a b", "c"])
def test_fails(x): assert x == "c"
def test_is_skipped(): pytest.skip("for a reason")
@pytest.fixture
def broken(): raise ValueError
def test_is_broken(broken): pass
"""


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("", id="all end", marks=pytest.mark.slow),
        pytest.param("def test_crashes(): os.kill(os.getpid(), 9)", id="one crashes"),
    ],
)
def test_tests_are_run_and_failures_listed_whatever_the_last_does(last: str, tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS_OF_ALL_KINDS + last)
    found = run_isolated(check(runs_tests), Settings(out=tmp_path, **SETTINGS), seconds=60.0)
    assert found.status is Status.FAILED
    assert found.figures["tests"] == 5 + bool(last)
    assert found.figures["outcomes"] == {"passed": 2, "failed": 1, "skipped": 1, "error": 1}
    assert [name.rpartition("::")[2] for name in found.problems] == ["test_fails[a b]", "test_is_broken"]
    assert "assert 'a b' == 'c'" in found.figures["failures"][found.problems[0]]
    assert ("SIGKILL" in found.reason) is bool(last)


def test_tests_that_there_is_no_time_for_are_a_target_missed(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text("def test_passes(): pass\ndef test_passes_too(): pass\n")
    found = run_isolated(check(runs_tests), Settings(out=tmp_path, **SETTINGS), 0.0, grace_s=200.0)
    assert (found.status, found.figures["outcomes"]) == (Status.PASSED, {"passed": 1})
    assert [(target.measured, target.allowed, target.met) for target in found.targets] == [(1, "at least 2", False)]


def test_kernels_are_tested_last() -> None:
    names = [path.name for path in suite.in_order(suite.TESTS)]
    assert len(names) > 1
    assert names[-1] == "test_gpu_kernels.py", "which takes most of the time to compile"


def test_an_interruption_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(check: Check, settings: Settings, seconds: float, *, most_s: float) -> Record:
        if check.name == "skips":
            raise KeyboardInterrupt
        return Record(check.name, Status.PASSED)

    (tmp_path / "checks").mkdir()
    so_far = Record("skips", Status.FAILED, figures={"before": "it was interrupted"})
    (tmp_path / "checks" / "skips.json").write_text(json.dumps(so_far.to_json()))
    monkeypatch.setattr("experiments.check.gpu_check.run_isolated", interrupted)
    settings = Settings(Size.TINY, cuda=False, out=tmp_path)
    records = run_all([*map(check, (passes, skips, raises))], settings, 60.0, None, Console(quiet=True))
    assert [r.status for r in records] == [Status.PASSED, Status.NOT_RUN, Status.NOT_RUN]
    assert records[1].reason == records[2].reason == "interrupted"
    assert records[1].figures == {"before": "it was interrupted"}


def test_results_are_written_after_each_check_and_the_last_is_killed_soon_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed leaves what there was until then, and says what was running."""
    seen: dict[str, dict[str, Any]] = {}
    limits: list[tuple[float, float]] = []

    def looks(check: Check, settings: Settings, seconds: float, *, most_s: float) -> Record:
        limits.append((seconds, most_s))
        seen[check.name] = json.loads((tmp_path / "results.json").read_text())
        missed = [Limit.at_most("a target that is missed", 2.0, 1.0)] if check.name == "passes" else []
        return Record(check.name, Status.PASSED, figures={"answer": check.name}, targets=missed)

    monkeypatch.setattr("experiments.check.gpu_check.run_isolated", looks)
    monkeypatch.setattr("experiments.check.gpu_check.time", SimpleNamespace(monotonic=lambda: 0.0))
    status, results = run(tmp_path, checks=tuple(map(check, (passes, skips, raises))))
    assert (status, results["failed"], results["not_run"]) == (0, [], [])
    assert results["targets_missed"] == ["passes: a target that is missed"], "which fails nothing"
    assert limits == [(20, 80), (30, 80), (60, 80)], "of a minute"
    for number, (name, found) in enumerate(seen.items()):
        assert list(found["checks"]) == ["passes", "skips", "raises"]
        states = [c["status"] for c in found["checks"].values()]
        assert states == ["passed"] * number + ["running"] + ["not run"] * (2 - number)
        assert found["running"] == [name]
        assert found["complete"] is False
    assert seen["raises"]["checks"]["skips"]["figures"] == {"answer": "skips"}
