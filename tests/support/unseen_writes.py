"""Writes to parameters that raise no version counter: through `.data`, NumPy, and what libraries do with these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.training import Make, loss_of, mlp


def _clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def _one_element(model: nn.Module) -> None:
    model[0].weight.data[3, 5] = 0.7


def _numpy(model: nn.Module) -> None:
    weight = model[0].weight.detach()
    if weight.device.type == "cpu":
        (weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight).numpy()[2] = 0
    else:
        weight.data[2] = 0


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
MOMENTS = ("forward", "before the step", "after the step")


def run(
    make: Make,
    dtype: torch.dtype,
    *,
    attach: bool = False,
    counted: bool = False,
    device: str = "cpu",
    moments: tuple[str, ...] = MOMENTS,
) -> list[Tensor]:
    """Train, and write in each way at each moment: in a forward, before a step and after it. counted: by versions."""
    model = mlp(dtype, width=256).to(device)  # int8 codes no smaller weights
    optimizer = make(model.parameters())
    if attach:
        optimizer.attach(model)

    def write(step: int, when: str) -> None:
        # From the second step on: until then no master and no copy is older than its parameter.
        if step and when in moments:
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
