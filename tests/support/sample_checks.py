"""Checks that end in every way there is. Here alone, because each runs in a process that imports this first."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from experiments.check.base import Bench, Skipped
from experiments.check.suite import run_tests
from experiments.harness import Limit


def passes(bench: Bench) -> None:
    bench.note(answer=42)
    bench.target(Limit.at_most("a target that is missed", 2.0, 1.0))


def raises(bench: Bench) -> None:
    bench.note(before="it broke")
    raise ValueError("on purpose")


def goes_on(bench: Bench) -> None:
    bench.problem("the first thing wrong")
    bench.problem("the second thing wrong")


def is_killed(bench: Bench) -> None:
    bench.note(before="it was killed")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(bench: Bench) -> None:
    bench.note(child=subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)


def skips(bench: Bench) -> None:
    raise Skipped("for a reason")


def runs_tests(bench: Bench) -> None:
    run_tests(bench, [bench.out / "test_sample.py"])
