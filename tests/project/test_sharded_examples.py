"""The examples for several ranks run, learn, and come to the same losses wherever state is."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

import dos
from dos.devices import Caller, Copy, Job
from dos.step.engine import Engine
from tests.support import ROOT
from tests.support.ranks import Ranks, needs_fsdp2

EXAMPLES = ROOT / "examples"
NEEDS = {"fsdp2": (), "ddp": (), "torchtitan_optimizer": ("torchtitan",), "accelerate_fsdp2": ("accelerate",)}


def run_main(name: str, *arguments: str, folder: str = "") -> tuple[list[float], int]:
    """On each rank: the losses, and how many subgroups' gradients left during backward."""
    sys.path.insert(0, str(EXAMPLES))
    send_gradients, left_early = Engine.send_gradients, []

    def send(self: Engine, index: int, copies: Sequence[Copy], callers: Collection[Caller] = ()) -> Job:
        left_early.append(index)
        return send_gradients(self, index, copies, callers)

    Engine.send_gradients = send  # type: ignore[method-assign]
    try:
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        losses = main(arguments, Path(folder)) if folder else main(arguments)
    finally:
        Engine.send_gradients = send_gradients  # type: ignore[method-assign]
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
    emulated = pair.run(run_main, name, "--device", "emulated", "--steps", "12")
    on_host = pair.run(run_main, name, "--device", "cpu", "--steps", "12")
    for (losses, left_early), (same, _) in zip(emulated, on_host, strict=True):
        assert len(losses) == 12
        assert losses[-1] < losses[0]
        assert losses == same, "where state is changes no bit"
        assert left_early, "gradients leave during backward"


def test_fsdp2_goes_on_from_its_newest_checkpoint(pair: Ranks, tmp_path: Path) -> None:
    def run(device: str, steps: int, folder: str) -> list[tuple[list[float], int]]:
        arguments = ("--device", device, "--steps", str(steps))
        return pair.run(run_in, "fsdp2", str(tmp_path / folder), *arguments)

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


def run_in(name: str, folder: str, *arguments: str) -> tuple[list[float], int]:
    return run_main(name, *arguments, folder=folder)


@needs_fsdp2
def test_fsdp2_runs_as_its_docstring_says(tmp_path: Path) -> None:
    """Beside a checkpoint that was interrupted, which is left alone."""
    command = re.search(r"^torchrun (.*)examples/fsdp2.py", (EXAMPLES / "fsdp2.py").read_text(), re.MULTILINE)
    assert command
    (tmp_path / "out" / "fsdp2" / "step000099").mkdir(parents=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            *command[1].split(),
            EXAMPLES / "fsdp2.py",
            "--steps",
            "20",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "step 20: loss 1." in done.stdout
    assert done.stdout.count("Plan: ") == 1, "one rank speaks"
