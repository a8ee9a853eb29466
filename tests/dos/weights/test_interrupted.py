"""Backward that raises at any moment, where weights stream: what it leaves on copies is added to no other gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.session import Session
from tests.support.blocks import RUNS, loss, net, start
from tests.support.scales import StoppedError
from tests.support.training import everything

pytestmark = pytest.mark.usefixtures("one_core")


class Fault:
    """Raises where backward has written a gradient and our hook has not taken it, at the gradient of this number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._number = -1
        self._taken = False
        self._leaf = torch.empty(0)
        ready = Session.gradient_ready

        def fail(session: Session, parameter: Tensor, leaf: Tensor) -> None:
            self._number -= 1
            if self._number != -1 or self._taken:
                ready(session, parameter, leaf)
            if self._number == -1:
                self._leaf = leaf
                raise StoppedError

        monkeypatch.setattr(Session, "gradient_ready", fail)

    def backward(self, number: int, found: Tensor, *, taken: bool = False, **arguments: Any) -> Tensor:
        """Return the tensor on whose gradient it has raised. taken: whether our hook has taken that."""
        self._number, self._taken = number, taken
        with pytest.raises(StoppedError):
            found.backward(**arguments)
        assert (self._leaf.grad is None) == taken
        return self._leaf


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


def zero_by_optimizer(model: nn.Module, optimizer: DOSAdam) -> None:
    optimizer.zero_grad()


def zero_by_model(model: nn.Module, optimizer: DOSAdam) -> None:
    model.zero_grad()


@pytest.mark.parametrize("weights", [0, 3])
@pytest.mark.parametrize("zero", [zero_by_optimizer, zero_by_model])
def test_what_was_zeroed_adds_to_nothing(zero: Callable[..., None], weights: Any, fault: Fault) -> None:
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, weights), start(other, None)
    for number in range(0, len(list(model.parameters())), 3):
        fault.backward(number, loss(model, 1000 + number))
        zero(model, optimizer)
        for each, its in ((model, optimizer), (other, reference)):
            loss(each, number).backward()
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize(
    ("weights", "run"), [*((0, run) for run in RUNS), *((each, RUNS[0]) for each in (3, 6, "auto"))]
)
def test_the_next_backward_drops_what_was_not_taken_and_nothing_else(run: Any, weights: Any, fault: Fault) -> None:
    """Neither gradients of a complete backward before it, nor those that were taken before the fault, as with AdamW."""
    model, other = net(torch.float32, run=run), net(torch.float32, run=run)
    optimizer, reference = start(model, weights), start(other, None)
    for step, (number, again) in enumerate(itertools.product((2, 9, 30), (False, True))):
        for each, its in ((model, optimizer), (other, reference)):
            loss(each, 3 * step).backward()
            found = loss(each, 3 * step + 1)
            left = fault.backward(number, found, retain_graph=again)
            if its is reference:
                left.grad = None  # of the parameter itself, which stays there as with AdamW
            (found if again else loss(each, 3 * step + 2)).backward()
            assert left.grad is None
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize("weights", [0, 3])
def test_a_step_after_it_uses_what_there_is_as_with_adamw(weights: Any, fault: Fault) -> None:
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, weights), start(other, None)
    for step, number in enumerate((2, 9, 30, 9)):
        for each, its in ((model, optimizer), (other, reference)):
            if step < 3:
                loss(each, 2 * step).backward()
            fault.backward(number, loss(each, 2 * step + 1), taken=its is reference)
            its.clip_grad_norm_(1e-3)
            its.step()
            its.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


def test_what_returns_gradients_drops_none(fault: Fault) -> None:
    """`torch.autograd.grad` writes none."""
    model, other = net(torch.float32), net(torch.float32)
    optimizer, reference = start(model, 0), start(other, None)
    for each, its in ((model, optimizer), (other, reference)):
        loss(each, 0).backward()
        fault.backward(9, loss(each, 1), taken=its is reference)
        torch.autograd.grad(loss(each, 2), list(each.parameters()))
        its.step()
    assert everything(model, optimizer) == everything(other, reference)
