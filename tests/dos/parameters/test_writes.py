"""Writes to parameters that raise no version counter: through `.data`, NumPy, and what libraries do with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import net, start, train
from tests.support.training import Make, assert_close_ulp, loss_of, maker, mlp


def _clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def _one_element(model: nn.Module) -> None:
    model[0].weight.data[3, 5] = 0.7


def _numpy(model: nn.Module) -> None:
    weight = model[0].weight.detach()
    (weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight).numpy()[2] = 0


def _foreach(model: nn.Module) -> None:
    torch._foreach_neg_([p.data for p in model.parameters()])


def _copy(model: nn.Module) -> None:
    """As `torch_ema` and diffusers' `EMAModel.copy_to` do."""
    for p in model.parameters():
        p.data.copy_(p.detach().flip(0))


def _merge(model: nn.Module) -> None:
    """As PEFT does in `merge`."""
    model[3].weight.data += torch.full_like(model[3].weight, 0.01)


WAYS: list[Callable[[nn.Module], object]] = [_clamp, _one_element, _numpy, _foreach, _copy, _merge]
MODES: dict[str, dict[str, Any]] = {"plain": {}, "attached": {}, "offloaded": {"offload_gradients": True}}


MOMENTS = ("forward", "before the step", "after the step")


def run(make: Make, dtype: torch.dtype, *, attach: bool = False, counted: bool = False) -> list[Tensor]:
    """Train, and write in each way at each moment: in a forward, before a step and after it. counted: by versions."""
    model = mlp(dtype, width=256)  # int8 codes no smaller weights
    optimizer = make(model.parameters())
    if attach:
        optimizer.attach(model)

    def write(step: int, when: str) -> None:
        # From the second step on: until then no master and no copy is older than its parameter.
        if step:
            WAYS[(step + 2 * MOMENTS.index(when)) % len(WAYS)](model)
            if counted:
                torch.autograd.graph.increment_version(list(model.parameters()))

    for step in range(len(WAYS) + 1):
        optimizer.zero_grad()
        hook = model[1].register_forward_pre_hook(lambda *_, step=step: write(step, "forward"))
        loss = loss_of(model, step)
        hook.remove()
        loss.backward()
        write(step, "before the step")
        optimizer.step()
        if attach:
            optimizer.synchronize()
        write(step, "after the step")
    return list(model.parameters())


def assert_taken_over(dtype: torch.dtype, place: Any, mode: str, **settings: Any) -> None:
    """Fail unless parameters end as AdamW's, and as where versions count the same writes."""
    make, attach = maker(place, lr=0.01, subgroup_size=1500, **MODES[mode], **settings), mode == "attached"
    ours = run(make, dtype, attach=attach)
    assert all(map(torch.equal, ours, run(make, dtype, attach=attach, counted=True)))
    if dtype is torch.float32 and "state_format" not in settings:
        assert_close_ulp(ours, run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), dtype))


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        *(("host", "plain"), ("resident", "plain"), ("resident", "attached"), (0.0, "offloaded")),
        *(("cpu", "plain"), ("cpu", "attached"), ("cpu", "offloaded"), ("stride:2", "attached"), ("adaptive", "plain")),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "settings_"),
    [(torch.float32, {}), (torch.float32, {"state_format": "int8"}), (torch.bfloat16, {"master_weights": False})],
)
def test_parameters_that_are_their_masters(
    dtype: torch.dtype, settings_: dict[str, Any], place: Any, mode: str
) -> None:
    assert_taken_over(dtype, place, mode, **settings_)


@pytest.mark.parametrize(
    ("place", "mode"), [("cpu", "plain"), ("cpu", "offloaded"), ("resident", "attached"), ("stride:2", "plain")]
)
@pytest.mark.parametrize(
    ("dtype", "state_format"),
    [(torch.bfloat16, None), (torch.bfloat16, "float32"), (torch.bfloat16, "int8"), (torch.float16, None)],
)
def test_parameters_whose_masters_follow(dtype: torch.dtype, state_format: str | None, place: Any, mode: str) -> None:
    assert_taken_over(dtype, place, mode, state_format=state_format)


def test_a_write_before_a_model_is_attached_again_counts() -> None:
    """Of weights that stay, which the host has updated."""
    ends = []
    for weights in (1.0, None):
        model = net(torch.float32)
        optimizer = start(model, weights, policy="cpu")
        train(model, optimizer, 2)
        optimizer.synchronize()
        for p in model.blocks.parameters():
            p.data.mul_(0.5)
        if weights is not None:
            optimizer.attach(model, weights=weights)
        train(model, optimizer, 2, first=2)
        optimizer.synchronize()
        ends.append([p.detach() for p in model.parameters()])
    assert_close_ulp(*ends, 0)
