"""Small trainings of many kinds, and what must hold once one has been cut short."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from tests.support.training import FAST, everything, mlp

REFUSED = "the optimizer is in an undefined state: step"
INCOMPLETE = "moving a gradient to the host was interrupted or failed"
STEPS = 3


@dataclass(frozen=True)
class Program:
    """How a small network is trained. policy: None for parameters on the host. disk: whether most state is there."""

    policy: str | float | None
    attached: bool = False
    offload_gradients: bool | str = False
    clipped: bool = False
    dtype: torch.dtype = torch.bfloat16
    amsgrad: bool = False
    disk: bool = False


class Training:
    """One run of a program. at: the step that `run` is in, and whether in clipping or step() itself."""

    def __init__(self, program: Program, device: EmulatedDevice | None = None, *, in_memory: bool = False) -> None:
        """in_memory: whether nothing is on disk, whatever the program says."""
        self.program = program
        self.model = mlp(program.dtype, width=400 if program.disk else 40)
        settings: dict[str, Any] = {}
        if program.policy is not None:
            self.device = device or EmulatedDevice(FAST, capacity=10**7)
            settings = {
                "policy": program.policy,
                "device": self.device,
                "subgroup_size": 300,
                "offload_gradients": program.offload_gradients,
            }
            if program.disk and not in_memory:
                self.folder = TemporaryDirectory(prefix="dos_disk")
                settings |= {"disk": self.folder.name, "host_memory": 180_000 if program.offload_gradients else 90_000}
        self.optimizer = DOSAdam(self.model.parameters(), lr=0.01, amsgrad=program.amsgrad, **settings)
        if program.attached:
            self.optimizer.attach(self.model)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        for micro_batch in range(2 if self.program.offload_gradients else 1):
            generator = torch.Generator().manual_seed(10 * step + micro_batch)
            inputs = torch.randn(8, 24, generator=generator).to(self.program.dtype)
            self.model(inputs).float().square().mean().backward()

    def step(self) -> None:
        if self.program.clipped:
            self.optimizer.clip_grad_norm_(0.05)
        self.optimizer.step()

    def run(self, first: int = 0, end: int = STEPS) -> None:
        for step in range(first, end):
            self.at = step, False
            self.backward(step)
            self.at = step, True
            self.step()

    def read(self) -> list[bytes]:
        """Parameters and state, to the bit."""
        return everything(self.model, self.optimizer)


PROGRAMS = [
    Program(None),
    Program(None, dtype=torch.float32, clipped=True),
    Program("cpu"),
    Program("cpu", attached=True, clipped=True),
    Program("stride:2", attached=True),
    Program("stride:1", dtype=torch.float32, amsgrad=True),
    Program(0.0),
    Program(0.5, attached=True, amsgrad=True),
    Program("adaptive", clipped=True),
    Program("cpu", offload_gradients=True),
    Program("stride:2", offload_gradients=True, attached=True, clipped=True),
    Program(0.0, offload_gradients=True),
    Program("cpu", disk=True),
    Program("stride:2", disk=True, attached=True),
    Program(0.5, disk=True, offload_gradients=True),
]


@functools.cache
def expected(program: Program) -> tuple[list[bytes], ...]:
    """What is read after 0 to STEPS + 1 steps without a fault."""
    training = Training(program, in_memory=True)
    found = [training.read()]
    for step in range(STEPS + 1):
        training.run(step, step + 1)
        found.append(training.read())
    return tuple(found)


def is_whole(program: Program, state: list[bytes], step: int) -> bool:
    """Whether what was read is of after the step. If not it must be of before."""
    before, after = expected(program)[step : step + 2]
    if state == after:
        return True
    # The first step makes its zeros before anything else.
    zeros = step == 0 and not any(any(tensor) for tensor in state[len(before) :])
    assert state == before or (zeros and state[: len(before)] == before)
    return False


def finish(training: Training) -> str:
    """What has happened to a step that raised, after checking that it is whole, has not happened, or is refused.

    If the step is whole or has not happened, training goes on and must end as if nothing had been.
    """
    program, optimizer, (step, stepping) = training.program, training.optimizer, training.at
    try:
        state = training.read()
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        with pytest.raises(RuntimeError, match=REFUSED):
            optimizer.step()
        with pytest.raises(RuntimeError, match=REFUSED):
            optimizer.state_dict()
        optimizer.zero_grad()
        optimizer.synchronize()
        return "refused"
    happened = is_whole(program, state, step)
    after = expected(program)[step + 1]
    outcome = "wholly" if happened else "not at all"
    if stepping and not happened:
        try:
            optimizer.step()  # with the gradients that are still there
        except RuntimeError as error:
            if INCOMPLETE not in str(error):
                raise
        else:
            happened = True
            assert training.read() == after or program.clipped  # the fault may have come before clipping
            if program.clipped:
                return outcome
    training.run(step + happened, STEPS + 1)
    assert training.read() == expected(program)[STEPS + 1]
    return outcome
