"""Whatever a device does wrong: memory that is missing changes no bit, anything else is said, and nothing is torn."""

from __future__ import annotations

import errno
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
from dos.state.disk import PAGE
from dos.state.disk import space as space_module
from perfmodel import Op
from tests.support.disk import Requests, Result, Transfer, replace_transfer
from tests.support.programs import PROGRAMS, STEPS, Program, Training, expected, finish
from tests.support.training import FAST

pytestmark = pytest.mark.usefixtures("one_core")

FAULTS = int(os.environ.get("DOS_FAULTS", "150"))
"""How many, over all programs."""
MESSAGE = "the cable came off"
ALL = "of all kinds"


class FaultyDevice(EmulatedDevice):
    """Counts what it is asked for; of one kind, or of all, the one with the number `at` goes wrong.

    late: whether a copy or update goes wrong when it runs, not when it is asked for.
    """

    def __init__(self) -> None:
        self.asked, self.kind, self.at, self.late, self.hit = Counter[str](), ALL, -1, False, ""
        super().__init__(FAST, capacity=10**7)

    def replace_transfer(self, transfer: Transfer) -> Transfer:
        """Of the disk: half of one is done, and then it fails."""

        def replaced(write: bool, requests: Requests, threads: int) -> Result:
            if not self._goes_wrong("disk"):
                return transfer(write, requests, threads)
            half = requests[: len(requests) // 2]
            transfer(write, half, threads)
            return [0] * len(requests), len(half), 0, errno.EIO

        return replaced

    def _goes_wrong(self, what: str) -> bool:
        self.asked += Counter((ALL, what))
        wrong = self.kind in (ALL, what) and self.asked[self.kind] == self.at
        self.hit = what if wrong else self.hit
        return wrong

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


def outcome_of(program: Program, kind: str, at: int, late: bool, patch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Let one request fail; what kind it was, and what became of the step."""
    device = FaultyDevice()
    replace_transfer(patch, device.replace_transfer)
    training = Training(program, device)
    device.kind, device.at, device.late = kind, device.asked[kind] + at, late
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
