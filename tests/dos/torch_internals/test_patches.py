"""What dos/torch_internals/patches.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dos.torch_internals.patches import (
    call_before_broadcasts,
    call_when_built,
    replace_clipping,
    replace_method,
    replace_run_backward,
)
from tests.support.ranks import on_pair

CHANGED = "torch has changed what dos/torch_internals/patches.py relies on"


@pytest.fixture
def clip_grad(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.nn.utils.clip_grad, as it is before anything is replaced there."""
    spec = importlib.util.find_spec("torch.nn.utils.clip_grad")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.nn.utils, "clip_grad", module)
    return module


def test_a_method_calls_what_took_its_place() -> None:
    class Owner:
        def method(self, number: int = 1) -> int:
            "Of its class."
            return number

    replace_method(Owner, "method", lambda before, self, number=3: 10 * before(self, number))
    assert (Owner().method(), Owner().method(2), Owner.method(Owner(), number=4)) == (30, 20, 40)
    assert Owner.method.__doc__ == "Of its class."


def test_clipping_calls_what_took_its_place(clip_grad: Any) -> None:
    calls: list[str] = []

    def log(name: str) -> None:
        def ours(clip: Any, parameters: Any, *args: Any) -> Any:
            calls.append(name)
            return clip(parameters, *args)

        replace_clipping(name, ours)

    imported = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_
    for name in ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_"):
        log(name)
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    for clip in imported:
        clip([parameter], 1.0)
    assert calls == ["clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_"], CHANGED
    assert float(parameter.grad.norm()) == pytest.approx(1.0, abs=1e-5)


def test_it_is_replaced_once_or_refused(clip_grad: Any) -> None:
    replace_clipping("clip_grad_norm_", lambda clip, *args: clip(*args))
    with pytest.raises(RuntimeError, match="is not what DOSAdam knows"):
        replace_clipping("clip_grad_norm_", lambda clip, *args: clip(*args))


def test_the_public_name_is_that_of_the_function_which_is_replaced() -> None:
    clip_grad = torch.nn.utils.clip_grad
    assert torch.nn.utils.clip_grads_with_norm_ is clip_grad._clip_grads_with_norm_, CHANGED
    assert torch.nn.utils.clip_grad_norm_ is clip_grad.clip_grad_norm_, CHANGED
    assert torch.nn.utils.clip_grad_value_ is clip_grad.clip_grad_value_, CHANGED


def test_objects_are_known_once_they_are_built_or_unpickled() -> None:
    class Base:
        def __init__(self, value: int) -> None:
            self.value = value

        def __setstate__(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    class Derived(Base):
        pass

    log = []
    call_when_built(Base, lambda built: log.append((type(built), built.value)))
    copy.deepcopy(Derived(1))
    assert Base(value=2).value == 2
    assert log == [(Derived, 1), (Derived, 1), (Base, 2)]
    for name in ("__init__", "__setstate__"):
        assert name in vars(DistributedDataParallel), CHANGED


@on_pair
def test_ddp_broadcasts_by_one_function_after_all_hooks() -> None:
    implementation = torch.nn.parallel.distributed
    before, log = implementation._sync_module_states, []
    try:
        call_before_broadcasts(lambda model: log.append("broadcast"))
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        assert log == ["broadcast"], CHANGED
        ddp.register_forward_pre_hook(lambda *_: log.append("forward"))
        with ddp.join():
            for _ in range(1 + dist.get_rank()):
                ddp(torch.ones(1, 2)).sum().backward()
        assert log == ["broadcast", *["forward"] * (1 + dist.get_rank()), "broadcast"], CHANGED
    finally:
        implementation._sync_module_states = before


def test_each_backward_calls_what_took_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that dos/weights/inputs.py reads."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    from torch.autograd import backward, grad

    found = []

    def ours(
        run: Any, outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *rest: Any, **more: Any
    ) -> Any:
        found.append((bool(retain), create, len(inputs or ()), [*rest, *more.values()]))
        return run(outputs, gradients, retain, create, inputs, *rest, **more)

    replace_run_backward(ours)
    x = torch.ones(2, requires_grad=True)
    grad(x.sum(), [x], allow_unused=True)
    backward(x.sum(), inputs=[x])
    x.sum().backward()
    assert found == [(False, False, 1, [True, False]), (False, False, 1, [True, True]), (False, False, 0, [True, True])]
