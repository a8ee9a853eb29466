"""Tests that need a GPU, on the simulated accelerator: in processes of their own, where torch.cuda is exchanged."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from experiments.simdev.build import UnavailableError, library
from tests.support import ROOT

RACES = (
    "test_training.py::test_streams_do_not_race[stride:2-1000000000-True]",
    "test_training.py::test_plans_that_change_every_step[1-0]",
    "test_training.py::test_saved_tensors_that_leave_on_two_streams[stride:2]",
    "test_weights.py::test_training[2-adaptive]",
    "test_weights.py::test_what_else_users_do[with_evaluation_before_each_step-cpu]",
    "test_weights.py::test_what_else_users_do[on_several_streams-stride:1]",
    "test_weights.py::test_what_else_users_do[with_weights_written_after_each_forward-cpu]",
    "test_weights.py::test_a_block_that_was_fetched_in_vain_is_freed_behind_its_copy[True]",
    "test_weights.py::test_homes_are_copied_as_a_whole",
    "test_weights.py::test_device_memory_of_weights_is_given_back",
)
LONG = "(test_late and False) or test_memory_falls_while or test_a_peak_of_the_first_forward"
"""Late copies of models that are not attached, and scenarios that take a quarter of a minute together."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    try:
        library()
    except UnavailableError as unavailable:
        pytest.skip(f"the simulated accelerator cannot be built: {unavailable}")


def passed(*arguments: str) -> int:
    """How many tests pass on the simulated accelerator. Fails if any does not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.simdev.plugin", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if found else 0


@pytest.mark.timeout(600)
def test_late_copies_scenarios_and_some_races() -> None:
    files = "tests/cuda/test_late.py", "tests/cuda/test_scenarios.py"
    races = [f"tests/cuda/{name}" for name in RACES]
    assert passed(*files, *races, "-k", f"not ({LONG})") > 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all() -> None:
    assert passed("tests/cuda", "-n", "2") > 340
