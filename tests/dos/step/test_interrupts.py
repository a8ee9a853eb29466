"""Fault x moment x outcome: Ctrl-C takes effect at the end of a call; an exception in a change is said from then on."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dos import DOSAdam
from dos.backward import Backward
from dos.devices import Mark
from dos.gradients.clipping import Clipping
from dos.gradients.offload import OffloadedGradients
from dos.owners.state import State
from dos.parameters.hooks import Attachment
from dos.parameters.reconciler import Reconciler
from dos.parameters.registry import Registry
from dos.state.stores import Stores
from dos.step.issue import Step
from dos.step.ledger import Ledger
from dos.step.prepare import Preparation
from dos.step.transit import Transits
from tests.support.calls import (
    ATTACHED,
    CALLS,
    CPU,
    DISK,
    HALF,
    HOST,
    OFFLOADED,
    RESIDENT,
    STREAMED,
    go_on,
    started,
    undisturbed,
)
from tests.support.devices import UpdatesAfterStep
from tests.support.programs import Program, Training
from tests.support.training import FAST, backward, batch, bits, everything, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

DEVICE = CPU, RESIDENT, STREAMED, DISK
PLAIN = HOST, *DEVICE
ALL = *PLAIN, ATTACHED, OFFLOADED, HALF


DONE, UNCHANGED, BROKEN = "done", "unchanged", "broken"


class Moment(NamedTuple):
    """A method that the call runs. ctrl_c, exception: what the first Ctrl-C, and any other exception, leaves."""

    call: str
    where: type
    method: str
    programs: tuple[Program, ...]
    ctrl_c: str
    exception: str


MOMENTS = [
    Moment("step", Reconciler, "look", ALL, DONE, UNCHANGED),
    Moment("step", Backward, "decide", DEVICE, DONE, UNCHANGED),
    Moment("step", Preparation, "reserve", DEVICE, DONE, UNCHANGED),
    Moment("first step", Reconciler, "settle", (HOST, CPU, RESIDENT), DONE, UNCHANGED),
    Moment("first step", Registry, "reindex", (HOST, CPU, DISK), DONE, BROKEN),
    Moment("step after exchange", Registry, "forget", (HOST, CPU, RESIDENT), DONE, BROKEN),
    Moment("step after exchange", Backward, "forget", (CPU, RESIDENT), DONE, BROKEN),
    Moment("step", Reconciler, "count", PLAIN, DONE, BROKEN),
    Moment("step", Ledger, "issue", (CPU, ATTACHED, OFFLOADED, DISK), DONE, BROKEN),
    Moment("step", Step, "issue", (*DEVICE, ATTACHED, OFFLOADED), DONE, BROKEN),
    Moment("step", Clipping, "forget", (HOST, ATTACHED, OFFLOADED, HALF), DONE, BROKEN),
    Moment("step", Backward, "end", (CPU, ATTACHED, OFFLOADED), DONE, DONE),
    Moment("step", Ledger, "settle", (HOST, CPU, RESIDENT), DONE, DONE),
    Moment("step", Backward, "begin", (CPU, ATTACHED, OFFLOADED), DONE, DONE),
    Moment("load", Reconciler, "lacking_fields", (HOST, CPU, RESIDENT), DONE, UNCHANGED),
    Moment("load", State, "install", PLAIN, DONE, BROKEN),
    # A hook in which Ctrl-C comes ends, and torch ends backward or forward with it.
    Moment("backward", Backward, "count", (CPU, OFFLOADED), UNCHANGED, UNCHANGED),
    Moment("backward", Transits, "send", (CPU, OFFLOADED, HALF), UNCHANGED, UNCHANGED),
    Moment("backward", OffloadedGradients, "take", (OFFLOADED, HALF), UNCHANGED, UNCHANGED),
    Moment("backward", Ledger, "join", (ATTACHED,), UNCHANGED, UNCHANGED),
    Moment("clip", Registry, "place_gradients", (HOST, CPU, OFFLOADED), DONE, UNCHANGED),
    Moment("norm", Registry, "place_gradients", (HOST, CPU, OFFLOADED), DONE, UNCHANGED),
    Moment("attach", Ledger, "settle", (CPU, ATTACHED), DONE, UNCHANGED),
    Moment("synchronize", Ledger, "settle", (HOST, CPU, ATTACHED), DONE, UNCHANGED),
    Moment("release_memory", Stores, "bring_home", (CPU, RESIDENT, STREAMED, ATTACHED), DONE, UNCHANGED),
    Moment("state_dict", Stores, "bring_home", (CPU, RESIDENT, ATTACHED), DONE, UNCHANGED),
]


def press(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise MemoryError


FAULTS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "Ctrl-C": (lambda: press(1), KeyboardInterrupt),
    "Ctrl-C twice": (lambda: press(2), KeyboardInterrupt),
    "no memory": (fail, MemoryError),
}


def disturb(training: Training, moment: Moment, fault: str, *, late: bool) -> None:
    """Call with a fault as the method begins or, if late, ends, the first time that it is called."""
    cause, error = FAULTS[fault]
    plain, left = getattr(moment.where, moment.method), [cause]

    def faulty(*arguments: Any, **named: Any) -> Any:
        found = plain(*arguments, **named) if late or not left else None
        cause = left.pop() if left else None
        if cause is not None:
            cause()
        return found if late or cause is None else plain(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment.where, moment.method, faulty)
        with pytest.raises((error, RuntimeError)) as raised:
            CALLS[moment.call].act(training)
    assert not left, "the call does not come to that moment"
    assert isinstance(raised.value, error) or isinstance(raised.value.__cause__, error)


def assert_refuses(training: Training, steps: int) -> None:
    """Fail unless the optimizer says which step was the last complete one, and lets go of what it holds."""
    optimizer = training.optimizer
    load = functools.partial(optimizer.load_state_dict, torch.optim.AdamW(training.model.parameters()).state_dict())
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.state, load):
        with pytest.raises(RuntimeError, match=f"undefined state: step {steps} was the last complete one"):
            use()
    training.model(torch.ones(1, 24, dtype=training.program.dtype)).sum().backward()
    optimizer.zero_grad()
    optimizer.synchronize()
    if training.program.policy is not None:
        optimizer.release_memory()
        assert training.device.usage().held == 0


@pytest.mark.filterwarnings("ignore:DOSAdam.step.. found no gradient")  # of offloaded ones, after they were used
@pytest.mark.parametrize("fault", ["Ctrl-C", pytest.param("Ctrl-C twice", marks=pytest.mark.slow), "no memory"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: f"{m.call}-{m.where.__name__}.{m.method}")
@pytest.mark.parametrize("turn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fault_leaves_what_the_table_says(moment: Moment, fault: str, turn: bool) -> None:
    """turn: in which of the programs it comes as the method begins; in the others it comes as the method ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    call, outcome = CALLS[moment.call], moment.ctrl_c if fault == "Ctrl-C" else moment.exception
    for number, program in enumerate(moment.programs):
        before, after, later = undisturbed(program, moment.call)
        training = started(program, call)
        disturb(training, moment, fault, late=(number + turn + (fault == "no memory")) % 2 == 1)
        if outcome == BROKEN:
            assert_refuses(training, call.steps)
            continue
        if outcome == UNCHANGED:
            assert training.read() == before
            call.act(training)
        assert training.read() == after
        assert go_on(training) == later


def test_the_second_ctrl_c_ends_synchronize_at_once_and_the_next_call_waits() -> None:
    presses = []

    class Pressed(UpdatesAfterStep):
        def mark(self) -> Mark:
            while presses:
                signal.raise_signal(presses.pop())
            return super().mark()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, twin, device = mlp(), mlp(), Pressed(FAST, 10**9)
    on_host = DOSAdam(twin.parameters())
    train(twin, on_host, 2)
    backward(twin, 0)
    on_host.step()
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    optimizer.attach(model)
    train(model, optimizer, 2)
    backward(model, 0)
    device.returned.clear()
    optimizer.step()
    presses += [signal.SIGINT] * 2
    with pytest.raises(KeyboardInterrupt):
        optimizer.synchronize()
    threading.Timer(0.2, device.returned.set).start()
    assert bits([model(batch(1))]) == bits([twin(batch(1))])
    assert everything(model, optimizer) == everything(twin, on_host)


def test_ctrl_c_in_attach_takes_effect_once_the_model_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Attachment.__init__

    def pressed(attachment: Attachment, *arguments: Any, **settings: Any) -> None:
        plain(attachment, *arguments, **settings)
        press(1)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Attachment, "__init__", pressed)
    model, device = mlp(), UpdatesAfterStep(FAST, 10**9)
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    with pytest.raises(KeyboardInterrupt):
        optimizer.attach(model)
    train(model, optimizer, 2)  # its hooks see which modules run
    backward(model, 0)
    device.returned.clear()
    optimizer.step()
    device.returned.set()


def test_a_handler_of_the_programs_own_is_there_after_each_call() -> None:
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
