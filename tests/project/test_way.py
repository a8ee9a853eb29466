"""How many functions and files of ours a step executes: a number that grows is one more layer to read."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

import dos
import perfmodel
from dos import DOSAdam, EmulatedDevice
from dos.step.pace import _Typical
from tests.support.training import FAST, backward, mlp, train

ROOT = Path(perfmodel.__file__).parents[1]
OURS = tuple(f"{Path(package.__file__).parent}/" for package in (dos, perfmodel))


def executed(steps: int) -> list[set[CodeType]]:
    """The code of each of these steps on the CPU lane, on all threads, once the optimizer has trained.

    With comprehensions, which are functions before Python 3.12, and with the emulated device.
    """
    seen: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Other optimizers of this process may have asked to be told of each step.
        told = code.co_filename.endswith("other_steps.py") or code.co_name == "stepped"
        if event == "call" and code.co_filename.startswith(OURS) and not told:
            seen.add(code)

    threading.setprofile(look)  # for the threads of the optimizer and its device, which begin below
    try:
        model = mlp()
        device = EmulatedDevice(FAST, 10**9)
        optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=device)
        train(model, optimizer, 6)
        found = []
        for step in range(steps):
            backward(model, step)
            optimizer.synchronize()
            seen.clear()
            sys.setprofile(look)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            found.append(set(seen))
            optimizer.zero_grad()
        return found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation says


def test_what_a_step_on_the_cpu_lane_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Typical, "EARLY", math.inf)  # else measured times change the plan, and a schedule is made
    monkeypatch.setattr(_Typical, "REMEMBERED", 100)
    codes = min(executed(6), key=len)  # more as threads come to wait
    files = sorted({code.co_filename.removeprefix(f"{ROOT}/") for code in codes})
    assert len(files) <= 45, " ".join(files)
    assert len(codes) <= 350, " ".join(sorted(code.co_name for code in codes))
