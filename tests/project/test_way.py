"""How many functions and files of ours a step executes: a number that grows is one more layer to read."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

import dos
import perfmodel
from dos import DOSAdam, EmulatedDevice
from dos.step.pace import Typical
from tests.support.processes import python
from tests.support.training import FAST, backward, mlp, train

ROOT = Path(perfmodel.__file__).parents[1]
OURS = tuple(f"{Path(package.__file__).parent}/" for package in (dos, perfmodel))


def executed(steps: int) -> list[tuple[list[str], list[str]]]:
    """Files and functions of each of these steps on the CPU lane, on all threads, once the optimizer has trained.

    With comprehensions, which are functions before Python 3.12, and with the emulated device.
    """
    seen: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
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
            files = {code.co_filename.removeprefix(f"{ROOT}/") for code in seen}
            found.append((sorted(files), sorted(code.co_name for code in seen)))
            optimizer.zero_grad()
        return found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation says


def executed_at_one_pace(steps: int) -> list[tuple[list[str], list[str]]]:
    """As `executed`; else measured times would change the plan, and a schedule would be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Typical, "EARLY", math.inf)
        patch.setattr(Typical, "REMEMBERED", 100)
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        return executed(steps)


def test_what_a_step_on_the_cpu_lane_executes() -> None:
    # In a process of its own: other optimizers of this one may be told of the step, and threads may have been set.
    program = f"import json; from {__name__} import executed_at_one_pace as run; print(json.dumps(run(6)))"
    found = json.loads(python("-c", program))
    files, names = min(found, key=lambda each: len(each[1]))
    # The shortest: steps take more as threads come to wait.
    assert len(files) <= 46, " ".join(files)
    assert len(names) <= 350, " ".join(names)
