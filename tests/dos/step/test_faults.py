"""Whatever a device does wrong: memory that is missing changes no bit, anything else is said, and nothing is torn."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.devices import Caller, Job, Memory
from perfmodel import Op
from tests.support.programs import PROGRAMS, STEPS, Program, Training, expected, finish
from tests.support.training import FAST

pytestmark = pytest.mark.usefixtures("one_core")

FAULTS = int(os.environ.get("DOS_FAULTS", "150"))
"""How many, over all programs."""
MESSAGE = "the cable came off"


class FaultyDevice(EmulatedDevice):
    """Counts what it is asked for; the one with the number `at` goes wrong.

    late: whether a copy or update goes wrong when it runs, not when it is asked for.
    """

    def __init__(self) -> None:
        self.asked, self.at, self.late, self.hit = 0, -1, False, ""
        super().__init__(FAST, capacity=10**7)

    def _goes_wrong(self, what: str) -> bool:
        self.asked += 1
        if self.asked == self.at:
            self.hit = what
        return self.asked == self.at

    def _queue(
        self, op: Op, subgroup: int, work: Callable[[], None], alone_s: float, traffic: int, after: Sequence[Job]
    ) -> Job:
        if not self._goes_wrong(op.value):
            return super()._queue(op, subgroup, work, alone_s, traffic, after)
        if not self.late:
            raise ValueError(MESSAGE)

        def fail() -> None:
            raise ValueError(MESSAGE)

        return super()._queue(op, subgroup, fail, alone_s, traffic, after)

    def host_update(self, numel: int, traffic: int, *state_format: str) -> AbstractContextManager[float]:
        if self._goes_wrong("host update"):
            raise ValueError(MESSAGE)
        return super().host_update(numel, traffic, *state_format)

    def allocate(self, nbytes: int) -> Tensor:
        if self._goes_wrong("memory"):
            raise torch.OutOfMemoryError(MESSAGE)
        return super().allocate(nbytes)

    def memory(self) -> Memory:
        if self._goes_wrong("reading"):
            raise OSError(MESSAGE)
        return super().memory()

    def join(self, job: Job) -> None:
        if self._goes_wrong("join"):
            raise ValueError(MESSAGE)
        super().join(job)

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        if self._goes_wrong("fence"):
            raise ValueError(MESSAGE)
        return super().fence(callers)


def outcome_of(program: Program, at: int, late: bool) -> tuple[str, str]:
    """Let one request fail; what kind it was, and what became of the step."""
    device = FaultyDevice()
    training = Training(program, device)
    device.at, device.late = device.asked + at, late
    try:
        training.run()
        assert training.read() == expected(program)[STEPS]
    except Exception as error:
        said = "".join(traceback.format_exception(error))
    else:
        return device.hit, "unharmed"
    assert MESSAGE in said
    assert device.hit not in ("memory", "reading"), "the user need not know"
    return device.hit, finish(training)


ON_DEVICE = [program for program in PROGRAMS if program.policy is not None]


@pytest.mark.filterwarnings("ignore:DOSAdam takes free device memory from no source")
@pytest.mark.parametrize("program", ON_DEVICE, ids=str)
def test_a_fault_of_the_device(program: Program) -> None:
    device = FaultyDevice()
    training = Training(program, device)
    before = device.asked
    training.run()
    training.read()
    total = device.asked - before
    drawn, outcomes = random.Random(0), Counter[tuple[str, str]]()
    for _ in range(FAULTS // len(ON_DEVICE) + 1):
        outcomes[outcome_of(program, drawn.randint(1, total), drawn.random() < 0.5)] += 1
    assert all(outcome == "unharmed" for hit, outcome in outcomes if hit in ("memory", "reading", ""))
    assert any(outcome != "unharmed" for _, outcome in outcomes)
