"""The tests that need a GPU, tests/cuda, run by pytest."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.check.base import Bench, Skipped
from experiments.check.environment import ROOT
from experiments.harness import Limit

TESTS = ROOT / "tests" / "cuda"
KERNELS = "test_gpu_kernels.py"
TEST_S = 60
"""That one test may take, if pytest-timeout is there to stop it."""
NOT_COMPARED = "bits were not compared: tests/cuda does that, and needs pytest and hypothesis"
_POLL_S = 0.1
_OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_FOUND = re.compile(r"\bcollected (\d+) item")


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


def run_tests(bench: Bench, files: Sequence[Path]) -> None:
    """Run test files until they or the time are over; a test that fails is a problem of the check.

    pytest has a process of its own: a test that crashes or hangs ends that one, and the others count.
    """
    log = bench.out / "logs" / f"{bench.record.name}-pytest.txt"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={TEST_S}")
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *map(str, files)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None and bench.left() > 0:
                time.sleep(_POLL_S)
                note_outcomes(bench, log)
            status = process.poll()
        finally:
            process.kill()
            process.wait()
    counts, found = note_outcomes(bench, log)
    bench.note(log=str(log.relative_to(bench.out)), ended=status is not None)
    for name, outcome in _OUTCOME.findall(log.read_text(errors="replace")):
        if outcome in ("FAILED", "ERROR"):
            bench.problem(name)
    if status not in (None, 0, 1, 5):
        bench.problem(f"pytest ended with status {status}; see {log}")
    if not found:
        raise Skipped(f"pytest found no test in the time there was; see {log}")
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    bench.say(f"{found} tests: {total or 'none has ended'}")
    bench.target(Limit.at_least("tests of tests/cuda that ran", sum(counts.values()), found))


def note_outcomes(bench: Bench, log: Path) -> tuple[Counter[str], int | None]:
    """Write down and return how many tests have ended how, and how many there are, None until pytest has said so."""
    text = log.read_text(errors="replace")
    counts, found = Counter(outcome.lower() for _, outcome in _OUTCOME.findall(text)), _FOUND.search(text)
    total = None if found is None else int(found[1])
    bench.note(tests=total, outcomes=dict(counts))
    return counts, total
