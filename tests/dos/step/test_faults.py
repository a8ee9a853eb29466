"""Whatever a device does wrong: memory that is missing changes no bit, anything else is said, and nothing is torn."""

from __future__ import annotations

import errno
import os
import random
import traceback
from collections import Counter

import pytest

from dos.state.disk import PAGE
from dos.state.disk import space as space_module
from tests.support.devices import ALL, MESSAGE, FaultyDevice
from tests.support.disk import replace_transfer
from tests.support.programs import PROGRAMS, STEPS, Program, Training, expected, finish

pytestmark = pytest.mark.usefixtures("one_core")

FAULTS = int(os.environ.get("DOS_FAULTS", "56"))
"""How many, over all programs."""


def outcome_of(program: Program, kind: str, at: int, late: bool, patch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Let one request fail; what kind it was, and what became of the step."""
    device = FaultyDevice()
    replace_transfer(patch, device.replace_transfer)
    training = Training(program, device)
    device.fail(kind, at, late=late)
    try:
        training.run()
        assert training.read() == expected(program)[STEPS]
    except Exception as error:
        said = "".join(traceback.format_exception(error))
    else:
        return device.hit, "unharmed"
    assert (os.strerror(errno.EIO) if device.hit == "disk" else MESSAGE) in said
    assert device.hit not in ("memory", "reading"), "the user need not know"
    return device.hit, finish(training)


ON_DEVICE = [program for program in PROGRAMS if program.policy is not None]


@pytest.mark.filterwarnings("ignore:DOSAdam takes free device memory from no source")
@pytest.mark.parametrize("program", ON_DEVICE, ids=str)
def test_a_fault_of_the_device_or_disk(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers from and to the disk are in requests of a page."""
    monkeypatch.setattr(space_module, "_REQUEST_BYTES", PAGE)
    device = FaultyDevice()
    replace_transfer(monkeypatch, device.replace_transfer)
    training = Training(program, device)
    before = Counter(device.asked)
    training.run()
    training.read()
    total = device.asked - before
    drawn, outcomes = random.Random(0), Counter[tuple[str, str]]()
    for kind in (ALL, "disk") if program.disk else (ALL,):
        for _ in range(FAULTS // len(ON_DEVICE) + 1):
            at, late = drawn.randint(1, total[kind]), drawn.random() < 0.5
            outcomes[outcome_of(program, kind, at, late, monkeypatch)] += 1
    assert all(outcome == "unharmed" for hit, outcome in outcomes if hit in ("memory", "reading", ""))
    assert any(outcome != "unharmed" for _, outcome in outcomes)
    assert not program.disk or any(hit == "disk" for hit, _ in outcomes)
