"""Every command that README and docs show starts with no more installed than README says."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.figures import read_figures
from tests.support.processes import Done, run_python

ROOT = pages.ROOT
ABSENT = (
    *("matplotlib", "tomli", "pytest", "_pytest", "hypothesis", "xdist", "ruff", "mypy", "mkdocs", "transformers"),
    *("accelerate", "pytorch_lightning", "lightning", "tensorboard", "torchao", "bitsandbytes", "deepspeed"),
)
"""Packages that `pip install .` leaves out: all of the extras in pyproject.toml, and the peers."""
NEEDS_MATPLOTLIB = "matplotlib is not installed, so no picture is drawn: pip install matplotlib"
TRAIN = "--steps 2 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --policies cpu"

QUICK = {
    "dos.report": "",
    "experiments.memory --simulate": "--out memory.png --json",
    "experiments.published": "--json",
    "experiments.sweep": "ratio",
    "experiments.train": TRAIN,
    "perfmodel": "--params 7e9 --gpu 24GB --host 128GB --checkpointing",
}
SLOW = {
    "experiments.gpu_check": "--size tiny --minutes 1 --only environment",
    "dos.calibrate": "--quick --output profile.json",
    "dos.calibrate --disk": "state --quick --device cpu",
    "experiments.job": "--ranks 1 --json",
    "experiments.gpu_check --only": "environment,calibration --size tiny --minutes 1",
    "experiments.sweep emulated": "",
    "experiments.weights": "--rounds 1 --largest 2 --json",
    "perfmodel --disk": "2TB --params 7e9 --gpu 24GB --host 64GB --checkpointing --offload-gradients",
    "perfmodel --fsdp": "--params 30e9 --machine h100 --ranks 4 --checkpointing --host 512GiB",
}
RUN_ELSEWHERE = {
    **{f"experiments.{name}": "" for name in ("activations", "arithmetic", "disk", "dry", "emulation", "formats")},
    **{f"experiments.{name}": "" for name in ("headline", "kernel", "memory", "overhead", "overlap", "planner")},
    "experiments.memory --only": "none",
}
"""`tests/experiments` has them measure. Here they show their options, for which they import all that they need."""
REFUSED = {"experiments.chart": "", "experiments.decisions": "", "experiments.sweep --report": "results.md"}
"""They draw what docs show, and say what to install for that."""


LACKS = f"""import sys
assert sys.modules.keys().isdisjoint({ABSENT}), "dos or perfmodel has imported one"
sys.modules.update(dict.fromkeys({ABSENT}))
"""
RUNS = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run(command: str, arguments: str, folder: Path) -> Done:
    """By a Python that has nothing of ABSENT, as have its children."""
    (folder / "sitecustomize.py").write_text(LACKS)
    words = [*command.split(), *arguments.split()]
    path = os.pathsep.join((str(folder), str(ROOT)))
    return run_python("-c", LACKS + RUNS, *words, cwd=folder, timeout=600, good=False, PYTHONPATH=path)


def starts(command: str, arguments: str, folder: Path) -> None:
    done = run(command, arguments, folder)
    assert "Traceback" not in done.stdout + done.stderr
    # 1: it ran, and a figure is not what it should be, which so small a size says nothing about.
    assert done.returncode in (0, 1), done.stderr
    if "--json" in arguments:
        assert read_figures(done.stdout, done.returncode)


@pytest.mark.parametrize("command", QUICK)
def test_a_documented_command_runs(command: str, tmp_path: Path) -> None:
    starts(command, QUICK[command], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", SLOW)
def test_a_documented_command_runs_that_takes_minutes(command: str, tmp_path: Path) -> None:
    starts(command, SLOW[command], tmp_path)


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_a_command_that_is_run_elsewhere_shows_its_options(command: str, tmp_path: Path) -> None:
    done = run(command, f"{RUN_ELSEWHERE[command]} --help", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m {command.split()[0]}")


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_that_draws_says_in_one_line_what_to_install(command: str, tmp_path: Path) -> None:
    done = run(command, REFUSED[command], tmp_path)
    assert (done.returncode, done.stderr) == (2, NEEDS_MATPLOTLIB + "\n")
    assert not (tmp_path / "results.md").exists()


def told_apart(words: Sequence[str]) -> set[str]:
    """The module, and those words after it that make another command of it."""
    another = {"--only", "--simulate", "--report", "--fsdp", "--disk", "emulated"}
    return {words[0], *another.intersection(words[1:])}


def test_every_documented_command_is_tried() -> None:
    """With `make`: the targets call these, pytest, or tools; `pip`, examples and tests are tried elsewhere."""
    tried = [told_apart(command.split()) for command in (*QUICK, *SLOW, *RUN_ELSEWHERE, *REFUSED)]
    names = ["README", *sorted(path.stem for path in (ROOT / "docs").glob("*.md"))]
    documented = [words for name in names for command in pages.commands(name) if "-m" in (words := command.split())]
    modules = [words[words.index("-m") + 1 :] for words in documented]
    assert len(modules) > 30
    others = [words for words in modules if words[0].split(".")[0] not in ("pytest", "tests")]
    missing = [words for words in others if told_apart(words) not in tried]
    assert not missing


def test_packages_that_make_quick_tests_exist() -> None:
    """By default, and as documents say."""
    for name in ("Makefile", "CONTRIBUTING.md", "docs/contributing.md"):
        packages = re.findall(r"PACKAGE(?: \?)?= ?(\w[\w/]*)", (ROOT / name).read_text())
        assert packages, name
        assert all((ROOT / package).is_dir() for package in packages), (name, packages)
