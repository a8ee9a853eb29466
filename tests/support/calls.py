"""Calls of user code within small trainings, and what is there before, after and later if nothing goes wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from tests.support.programs import Program, Training

STEPS = 2
HOST, CPU, RESIDENT = Program(None), Program("cpu"), Program(0.0)
STREAMED, ATTACHED = Program("stride:1"), Program("stride:2", attached=True)
OFFLOADED, HALF = Program("stride:2", offload_gradients=True), Program(0.5, offload_gradients=True)
DISK = Program("stride:2", disk=True)


class Call(NamedTuple):
    """A call of user code, after so many steps. prepare: what comes before it."""

    act: Callable[[Training], object]
    steps: int = STEPS
    prepare: Callable[[Training], object] = lambda training: training.backward(STEPS)


def exchange(training: Training) -> None:
    """Put other parameters in the place of all."""
    for module in training.model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
    training.optimizer.state.clear()
    training.backward(STEPS)


def by_hand(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)


def save(training: Training) -> None:
    training.backward(STEPS)
    training.saved = copy.deepcopy(training.optimizer.state_dict())
    training.saved["param_groups"][0]["lr"] = 0.5
    training.saved["state"][0]["exp_avg"] *= 30


CALLS = {
    "step": Call(lambda training: training.optimizer.step()),
    "first step": Call(lambda training: training.optimizer.step(), 0),
    "first step, gradients by hand": Call(lambda training: training.optimizer.step(), 0, by_hand),
    "step after exchange": Call(lambda training: training.optimizer.step(), prepare=exchange),
    "load": Call(lambda training: training.optimizer.load_state_dict(training.saved), prepare=save),
    "backward": Call(lambda training: training.backward(STEPS), prepare=lambda training: None),
    "clip": Call(lambda training: training.optimizer.clip_grad_norm_(0.05)),
    "norm": Call(lambda training: training.optimizer.grad_norm()),
    "attach": Call(lambda training: training.optimizer.attach(training.model)),
    "synchronize": Call(lambda training: training.optimizer.synchronize()),
    "release_memory": Call(lambda training: training.optimizer.release_memory()),
    "state_dict": Call(lambda training: training.optimizer.state_dict()),
}


def started(program: Program, call: Call) -> Training:
    training = Training(program)
    training.run(end=call.steps)
    call.prepare(training)
    return training


def go_on(training: Training) -> list[bytes]:
    """With the gradients that are there, and then others."""
    training.optimizer.step()
    training.run(STEPS + 1, STEPS + 2)
    return training.read()


@functools.cache
def undisturbed(program: Program, call: str) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Everything before the call, after it, and once training has gone on."""
    before = started(program, CALLS[call]).read()
    training = started(program, CALLS[call])
    CALLS[call].act(training)
    return before, training.read(), go_on(training)
