"""Interrupted anywhere, a step has happened wholly or not at all, or else state and the next step are refused."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import Mark
from perfmodel import Plan, Workload
from perfmodel.policies import cpu_only
from tests.support.devices import UpdatesAfterStep
from tests.support.interruptions import EVERYWHERE, interrupted_at
from tests.support.programs import PROGRAMS, STEPS, Program, Training, finish, is_whole
from tests.support.training import FAST, SLOW, backward, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

INTERRUPTS = 400


def started(program: Program, steps: int) -> Training:
    """After so many steps."""
    training = Training(program)
    training.run(end=steps)
    return training


def lines_of(program: Program, first_step: int) -> int:
    """Lines that the last steps of a program run."""
    training = started(program, first_step)
    with interrupted_at(-1) as count:
        training.run(first_step)
    return count[0]


def outcome_of(program: Program, line: int, first_step: int) -> str:
    """Interrupt a program, check what must hold then, and say what has happened to the step."""
    training = started(program, first_step)
    try:
        with interrupted_at(line):
            training.run(first_step)
    except KeyboardInterrupt:
        return finish(training)
    return "not interrupted"


@pytest.mark.timeout(7200 if EVERYWHERE else 300)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_at_any_line(program: Program) -> None:
    outcomes: Counter[str] = Counter()
    for first_step, share in ((STEPS - 1, 0.7), (0, 0.3)):
        total = lines_of(program, first_step)
        count = total if EVERYWHERE else min(total, int(INTERRUPTS * share / len(PROGRAMS)) + 1)
        lines = [1 + int((i + random.Random(i).random()) * total / count) for i in range(count)]
        for line in lines:
            outcomes[outcome_of(program, line, first_step)] += 1
    # Those that are drawn may miss the few lines after the update, of which there are not always as many.
    for back in (2**i for i in range(8)):
        if not outcomes["wholly"]:
            outcomes[outcome_of(program, total - back, first_step)] += 1
    assert outcomes["not at all"] > 0
    assert outcomes["wholly"] > 0


@pytest.mark.skipif(not EVERYWHERE, reason="real signals come when they like: set DOS_INTERRUPTS=1 to send them")
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_ctrl_c_leaves_a_state_that_can_be_saved(program: Program) -> None:
    """Which the signal does at any moment; what is read then is what a whole number of steps has made."""
    drawn = random.Random(0)
    for _ in range(4):
        training = Training(program, EmulatedDevice(SLOW, capacity=10**7))
        timer = threading.Timer(drawn.uniform(0.0, 0.05), signal.raise_signal, [signal.SIGINT])
        training.at = 0, False
        try:
            timer.start()
            training.run(end=STEPS + 1)
            while timer.is_alive():
                time.sleep(1e-3)
        except KeyboardInterrupt:
            is_whole(program, training.read(), training.at[0])
        timer.join()


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_a_step_takes_effect_at_its_end_and_twice_at_once(presses: int) -> None:
    def policy(work: Workload) -> Plan:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return cpu_only(work)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # an interruption of a test before may have left another
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy=policy, device=EmulatedDevice(FAST, capacity=10**7))
    model(torch.ones(2, 24)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert [float(entry["step"]) for entry in optimizer.state.values()] == [1.0] * 5 * (presses == 1)


def test_the_second_ctrl_c_ends_synchronize_at_once() -> None:
    presses = []

    class Pressed(UpdatesAfterStep):
        def mark(self) -> Mark:
            while presses:
                signal.raise_signal(presses.pop())
            return super().mark()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, device = mlp(), Pressed(FAST, 10**9)
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    optimizer.attach(model)
    train(model, optimizer, 2)
    backward(model, 0)
    device.returned.clear()
    optimizer.step()
    presses += [signal.SIGINT] * 2
    with pytest.raises(KeyboardInterrupt):
        optimizer.synchronize()
    device.returned.set()
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        model = mlp()
        optimizer = DOSAdam(model.parameters())
        handlers = []
        optimizer.register_step_post_hook(lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]
    assert handlers[0] is not before


def test_steps_in_another_thread_leave_signals_alone() -> None:
    model = nn.Linear(3, 3)
    optimizer = DOSAdam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert next(iter(optimizer.state.values()))["step"] == 1
