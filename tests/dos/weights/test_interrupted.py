"""Backward that raises at any moment, where weights stream: what it leaves on copies is added to no other gradient."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.weights import inputs
from tests.support.blocks import RUNS, loss, net, start
from tests.support.inside import StoppedError, stopped_at
from tests.support.training import everything

pytestmark = pytest.mark.usefixtures("one_core")


def interrupt(number: int, found: Tensor, *, taken: bool = False, **arguments: Any) -> Tensor:
    """Stop a backward as `stopped_at` does; return the tensor whose gradient was written last."""
    with stopped_at(number, taken=taken) as leaves, pytest.raises(StoppedError):
        found.backward(**arguments)
    assert (leaves[0].grad is None) == taken
    return leaves[0]


def zero_by_optimizer(model: nn.Module, optimizer: DOSAdam) -> None:
    optimizer.zero_grad()


def zero_by_model(model: nn.Module, optimizer: DOSAdam) -> None:
    model.zero_grad()


@pytest.mark.parametrize(("zero", "weights"), [(zero_by_optimizer, 0), (zero_by_model, 3)])
def test_what_was_zeroed_adds_to_nothing(zero: Callable[..., None], weights: Any) -> None:
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, weights), start(other, None)
    for number in range(0, len(list(model.parameters())), 5):
        interrupt(number, loss(model, 1000 + number))
        zero(model, optimizer)
        for each, its in ((model, optimizer), (other, reference)):
            loss(each, number).backward()
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize(("weights", "run"), [*((0, run) for run in RUNS), *((each, RUNS[0]) for each in (3, "auto"))])
def test_the_next_backward_drops_what_was_not_taken_and_nothing_else(run: Any, weights: Any) -> None:
    """Neither gradients of a complete backward before it, nor those that were taken before the fault, as with AdamW."""
    model, other = net(torch.float32, run=run), net(torch.float32, run=run)
    optimizer, reference = start(model, weights), start(other, None)
    for step, (number, again) in enumerate(itertools.product((2, 30), (False, True))):
        for each, its in ((model, optimizer), (other, reference)):
            loss(each, 3 * step).backward()
            found = loss(each, 3 * step + 1)
            left = interrupt(number, found, retain_graph=again)
            if its is reference:
                left.grad = None  # of the parameter itself, which stays there as with AdamW
            (found if again else loss(each, 3 * step + 2)).backward()
            assert left.grad is None
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize("weights", [0, 3])
def test_a_step_after_it_uses_what_there_is_as_with_adamw(weights: Any) -> None:
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, weights), start(other, None)
    for step, number in enumerate((2, 30, 9)):
        for each, its in ((model, optimizer), (other, reference)):
            if step < 2:
                loss(each, 2 * step).backward()
            interrupt(number, loss(each, 2 * step + 1), taken=its is reference)
            its.clip_grad_norm_(1e-3)
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


def test_what_returns_gradients_drops_none() -> None:
    """`torch.autograd.grad` writes none."""
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, 0), start(other, None)
    for each, its in ((model, optimizer), (other, reference)):
        loss(each, 0).backward()
        interrupt(9, loss(each, 1), taken=its is reference)
        torch.autograd.grad(loss(each, 2), list(each.parameters()))
        its.step()
    assert everything(model, optimizer) == everything(other, reference)


Backward = Callable[..., Any]


def patch_of(forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[Backward], Any]:
    """What runs a backward that accumulates gradients, with calls of this function alone."""
    patches: list[Callable[..., Any]] = []
    monkeypatch.setattr(inputs, "replace_run_backward", patches.append)
    inputs.after_interruptions(forget)
    return lambda backward: patches[0](backward, accumulate_grad=True)


def fail(*_: object, **__: object) -> None:
    raise StoppedError


def test_no_backward_of_another_thread_begins_while_gradients_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote would be dropped, too."""
    began: list[str] = []

    def forget() -> None:
        began.append("forget")
        if not other.ident:
            other.start()
        other.join(0.1)  # it does not end before this has
        began.append("forgotten")

    run = patch_of(forget, monkeypatch)
    other = threading.Thread(target=lambda: run(lambda **_: began.append("other")))
    with pytest.raises(StoppedError):
        run(fail)
    run(lambda **_: None)
    other.join()
    assert began == ["forget", "forgotten", "other"]


def test_no_gradients_are_dropped_while_another_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, or around those that fail and begin."""
    began: list[str] = []
    run = patch_of(lambda: began.append("forget"), monkeypatch)

    def around(**_: Any) -> None:
        with pytest.raises(StoppedError):
            run(fail)
        run(lambda **_: began.append("within"))

    run(around)
    run(lambda **_: began.append("next"))
    assert began == ["within", "forget", "next"]


@pytest.mark.parametrize("weights", [0, 3])
@pytest.mark.parametrize("again", [False, True])
def test_what_waits_for_the_rest_of_a_backward_that_raises_is_dropped_as_autograd_drops_it(
    weights: Any, again: bool
) -> None:
    """A weight's own gradient, of a penalty, waits for that of its copy; a step or another backward follows."""
    ends = []
    for streams in (True, False):
        model = net(torch.float32)
        optimizer = start(model, weights if streams else None, offload_gradients=streams)
        loss(model, 0).backward()
        handle = model.blocks[3].register_full_backward_hook(fail)
        with pytest.raises(StoppedError):
            (loss(model, 1) + sum(p.square().sum() for p in model.parameters())).backward()
        handle.remove()
        if again:
            loss(model, 2).backward()
        optimizer.step()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_ctrl_c_counts_as_other_exceptions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    patches, forgotten = list[Any](), list[bool]()
    monkeypatch.setattr(inputs, "replace_run_backward", patches.append)
    inputs.after_interruptions.__wrapped__(lambda: forgotten.append(True))

    def stop(**_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patches[0](stop, accumulate_grad=True)
    for _ in range(2):
        patches[0](lambda **_: None, accumulate_grad=True)
    assert forgotten == [True]


def test_backward_is_replaced_once() -> None:
    model = net()
    optimizer = start(model, 0)
    before = torch.autograd._engine_run_backward
    optimizer.attach(model, weights=1)
    start(net(), 0)
    assert torch.autograd._engine_run_backward is before
