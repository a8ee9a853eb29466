"""The tests that need a GPU, tests/cuda, run by pytest."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.check.base import Bench, Skipped
from experiments.check.environment import ROOT
from experiments.harness import Limit

if TYPE_CHECKING:
    import pytest

TESTS = ROOT / "tests" / "cuda"
KERNELS = "test_gpu_kernels.py"
TEST_S = 60
"""That one test may take, if pytest-timeout is there to stop it."""
NOT_COMPARED = "bits were not compared: tests/cuda does that, and needs pytest and hypothesis"


def run(bench: Bench) -> None:
    """As many as there is time for."""
    if obstacle := missing(bench.cuda):
        raise Skipped(obstacle)
    run_tests(bench, in_order(TESTS))


def in_order(folder: Path) -> list[Path]:
    """The files of tests in a folder: those of kernels last, for some hundred have to be compiled."""
    return sorted(folder.glob("test_*.py"), key=lambda path: (path.name == KERNELS, path.name))


def missing(cuda: bool) -> str | None:
    """Why they cannot be run."""
    if not cuda:
        return "no GPU: they need one"
    if not TESTS.is_dir():
        return f"there is no {TESTS}: this is not a checkout"
    needed = [package for package in ("pytest", "hypothesis") if importlib.util.find_spec(package) is None]
    return f"{NOT_COMPARED} (pip install {' '.join(needed)})" if needed else None


class Outcomes:
    """A plugin of pytest that writes down how tests end, and ends the run when the check's time is over."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.found = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session, self.found = session, len(session.items)
        self.bench.note(tests=self.found, outcomes={})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.bench.problem(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome if report.when == "call" or report.skipped else "error"] += 1
            self.bench.note(outcomes=dict(self.counts))
        if report.failed:  # pytest prints its text at the end, which a crash would forestall
            self.failures[report.nodeid] = report.longreprtext
            self.bench.note(failures=self.failures)
            self.bench.problem(report.nodeid)
        if self.bench.left() < 0:
            self.session.shouldstop = "the time is over"


def run_tests(bench: Bench, files: Sequence[Path]) -> None:
    """Run test files until they or the time are over; a test that fails is a problem of the check."""
    import pytest

    outcomes = Outcomes(bench)
    arguments = ["-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        arguments.append(f"--timeout={TEST_S}")
    status = pytest.main([*arguments, *map(str, files)], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        bench.problem(f"pytest ended with status {status!r}; see the log")
    if outcomes.found:
        total = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.counts.items())
        bench.say(f"{outcomes.found} tests: {total}")
        bench.target(Limit.at_least("tests of tests/cuda that ran", sum(outcomes.counts.values()), outcomes.found))
