"""The examples for several ranks run, learn, and come to the same losses wherever state is."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import dos
from tests.support import ROOT
from tests.support.processes import python, run_python
from tests.support.ranks import Ranks, needs_fsdp2
from tests.support.training import leaving_early

EXAMPLES = ROOT / "examples"
NEEDS = {"fsdp2": (), "ddp": (), "torchtitan_optimizer": ("torchtitan",), "accelerate_fsdp2": ("accelerate",)}


def run_main(name: str, folder: str, *arguments: str) -> tuple[list[float], int]:
    """On each rank: the losses, and how many subgroups' gradients left during backward."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        with leaving_early() as left_early:
            main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
            losses = main(arguments, Path(folder)) if folder else main(arguments)
    finally:
        dos.fold_clipping(False)
        torch.set_num_threads(1)
        sys.path.remove(str(EXAMPLES))
        if "accelerate" in sys.modules:
            sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    return losses, len(left_early)


@pytest.mark.parametrize("name", [name for name in NEEDS if name != "fsdp2"])
def test_example(pair: Ranks, name: str) -> None:
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install {module}")
    emulated = pair.run(run_main, name, "", "--device", "emulated", "--steps", "12")
    on_host = pair.run(run_main, name, "", "--device", "cpu", "--steps", "12")
    for (losses, left_early), (same, _) in zip(emulated, on_host, strict=True):
        assert len(losses) == 12
        assert losses[-1] < losses[0]
        assert losses == same, "where state is changes no bit"
        assert left_early, "gradients leave during backward"


def test_fsdp2_goes_on_from_its_newest_checkpoint(pair: Ranks, tmp_path: Path) -> None:
    def run(device: str, steps: int, folder: str) -> list[tuple[list[float], int]]:
        return pair.run(run_main, "fsdp2", str(tmp_path / folder), "--device", device, "--steps", str(steps))

    (tmp_path / "cut" / "step000099").mkdir(parents=True)  # was interrupted, and is left alone
    through, on_host = run("emulated", 8, "through"), run("cpu", 8, "host")
    begun, rest, after = run("emulated", 5, "cut"), run("emulated", 8, "cut"), run("emulated", 8, "cut")
    for (losses, left_early), (same, _), (first, _), (second, _), (none, _) in zip(
        through, on_host, begun, rest, after, strict=True
    ):
        assert losses == same, "where state is changes no bit"
        assert first + second == losses, "nor does stopping and going on"
        assert losses[-1] < losses[0]
        assert none == []
        assert left_early


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "accelerate" in packages else ())
        for name, packages in NEEDS.items()
    ],
)
def test_without_torchrun_an_example_says_how_to_start_it(name: str) -> None:
    if any(importlib.util.find_spec(module) is None for module in NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed")
    path = EXAMPLES / f"{name}.py"
    done = run_python(path, good=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"start it so: torchrun --nproc-per-node 2 {path}")
    assert "Traceback" not in done.stderr


@needs_fsdp2
def test_a_model_larger_than_the_device_learns(pair: Ranks) -> None:
    said = python(EXAMPLES / "larger_than_the_gpu.py", "--steps", "45")
    whole, at_once = map(int, re.findall(r"(\d+) bytes", said))
    assert 0 < at_once < whole / 4
    first, last = map(float, re.findall(r"\d+\.\d+", said.splitlines()[-1]))
    assert last < first / 2
    (one, _), (other, _) = pair.run(run_main, "larger_than_the_gpu", "", "--steps", "12")
    assert one[-1] < one[0]
    assert one != other, "each rank has its share of the data"
