"""A step that backward's last gradient has looked at, and what user code may change until `step()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dos import DOSAdam
from dos.owners import preparing
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.training import backward, bits, maker, mlp


def in_place(model: nn.Sequential, _: DOSAdam) -> None:
    model[0].weight.grad.mul_(2)


def other_gradient(model: nn.Sequential, _: DOSAdam) -> None:
    model[0].weight.grad = model[0].weight.grad * 2


def other_object(model: nn.Sequential, _: DOSAdam) -> None:
    """In the same memory, and with no write that it counts."""
    same = model[0].weight.grad.data
    same.data.mul_(2)
    model[0].weight.grad = same


def other_memory(model: nn.Sequential, _: DOSAdam) -> None:
    model[0].weight.grad.data = model[0].weight.grad.data * 2


class _Hiding(TorchDispatchMode):
    """Doubles a tensor in each operation, which no version counts."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tensor.mul_(2)
        return operation(*args, **(kwargs or {}))


def hidden(model: nn.Sequential, _: DOSAdam) -> None:
    with _Hiding(model[0].weight.grad):
        torch.ones(1)


def no_gradient(model: nn.Sequential, _: DOSAdam) -> None:
    model[0].weight.grad = None


def parameter(model: nn.Sequential, _: DOSAdam) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def another_backward(model: nn.Sequential, _: DOSAdam) -> None:
    backward(model, 99)


def state(model: nn.Sequential, optimizer: DOSAdam) -> None:
    optimizer.state[model[0].weight]["exp_avg"].mul_(2)


def clipping(model: nn.Sequential, optimizer: DOSAdam) -> None:
    optimizer.clip_grad_norm_(1e-3)


def loading(_: nn.Sequential, optimizer: DOSAdam) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def nothing(*_: Any) -> None:
    pass


def learning_rate(_: nn.Sequential, optimizer: DOSAdam) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def moving_home(_: nn.Sequential, optimizer: DOSAdam) -> None:
    optimizer.release_memory()


SEEN = [
    *(in_place, other_gradient, other_object, other_memory, hidden, no_gradient),
    *(parameter, another_backward, clipping, state, loading),
]
"""What `step()` has to look at; last what makes all state new."""
ALIKE = [nothing, learning_rate, moving_home]
BEFORE = 3
"""Steps until it finds nothing new."""


@pytest.mark.parametrize(("policy", "queues"), [("cpu", True), ("stride:2", False)])
def test_what_changes_before_step_counts(policy: str, queues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, updates_of = list[Any](), preparing.updates_of

    def looked(*arguments: Any) -> Any:
        looks.append(arguments)
        return updates_of(*arguments)

    def run(make: Callable[[Any], DOSAdam]) -> tuple[list[bytes], list[bool]]:
        model, found = mlp(), list[bool]()
        optimizer = make(model.parameters())
        for last in (*ALIKE, *SEEN):
            for change in (*[nothing] * BEFORE, last):
                backward(model, 0)
                change(model, optimizer)
                looks.clear()
                optimizer.step()
                optimizer.zero_grad()
            found.append(bool(looks))
        return bits(model.parameters()), found

    expected, _ = run(maker("host", lr=0.01))
    monkeypatch.setattr(preparing, "updates_of", looked)
    settings = {"device": FakeCudaDevice(install(monkeypatch, seed=None))} if queues else {}
    found, each_looked = run(maker(policy, lr=0.01, **settings))
    assert found == expected
    assert each_looked == [False] * len(ALIKE) + [True] * len(SEEN)


def test_no_gradient_that_user_code_drops_is_kept() -> None:
    model = mlp()
    optimizer = maker("stride:2")(model.parameters())
    for step in range(5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, 5)
    optimizer.synchronize()
    known = [weakref.ref(p.grad) for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    assert [each() for each in known] == [None] * len(known)
