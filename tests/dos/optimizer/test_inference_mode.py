"""Steps, gradients and clipping in torch.inference_mode: what AdamW accepts there gives the same here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from tests.support.training import FAST, assert_close_ulp, mlp

STEPS = 4


def trained(optimizer_of: Any, inside: dict[str, Any], clip: str) -> list[nn.Parameter]:
    """inside: the steps, by number, whose backward, clipping or update is in inference mode."""
    model = mlp()
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        within = {
            part: torch.inference_mode() if number in inside.get(part, ()) else nullcontext()
            for part in ("backward", "clip", "step")
        }
        optimizer.zero_grad()
        loss = model(torch.randn(8, 24, generator=torch.Generator().manual_seed(number))).square().mean()
        with within["backward"]:
            loss.backward()
        with within["clip"]:
            if clip == "ours" and isinstance(optimizer, DOSAdam):
                norm = optimizer.grad_norm()
                assert torch.equal(norm, optimizer.clip_grad_norm_(0.05))
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with within["step"]:
            optimizer.step()
            if isinstance(optimizer, DOSAdam) and number == 2:
                optimizer.state_dict()
    if isinstance(optimizer, DOSAdam):
        optimizer.synchronize()
    return list(model.parameters())


@pytest.mark.parametrize("clip", ["", "ours"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", ["host", "cpu", "stride:2", "resident"])
@pytest.mark.parametrize(
    "inside",
    [
        {"step": range(STEPS)},
        {"step": [2]},
        {"backward": [0, 2]},
        {"clip": [0]},
        {part: [0, 1, 3] for part in ("backward", "clip", "step")},
    ],
    ids=["all steps", "one step", "gradients", "first clip", "everything"],
)
def test_it_changes_nothing(inside: dict[str, Any], policy: str, attached: bool, offload: bool, clip: str) -> None:
    def ours(model: nn.Module) -> DOSAdam:
        on = {} if policy == "host" else {"policy": policy, "device": EmulatedDevice(FAST, 10**9), "subgroup_size": 300}
        optimizer = DOSAdam(model.parameters(), lr=1e-2, offload_gradients=offload, **on)
        if attached:
            optimizer.attach(model)
        return optimizer

    # AdamW cannot go on outside with state that it has made inside.
    expected = trained(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), {}, clip)
    assert_close_ulp(trained(ours, inside, clip), expected)


def test_a_step_that_is_written_in_it() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = DOSAdam([p])
    for _ in range(2):
        p.grad = torch.ones(4)
        optimizer.step()
        with torch.inference_mode():
            optimizer.state[p]["step"] = torch.tensor(5.0)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 6


def test_bits_of_its_gradients_are_watched() -> None:
    """They have no version that would tell that they were written to after clipping, or after they left."""
    models = mlp(), mlp()
    for model in models:
        make = DOSAdam if model is models[0] else torch.optim.AdamW
        more = {"policy": "cpu", "device": EmulatedDevice(FAST, 10**9)} if make is DOSAdam else {}
        optimizer = make(model.parameters(), lr=1e-2, **more)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 24, generator=torch.Generator().manual_seed(number))).square().mean()
            with torch.inference_mode():
                loss.backward()
                if make is DOSAdam:
                    with pytest.warns(UserWarning, match="is not clipped") if number == 0 else nullcontext():
                        optimizer.clip_grad_norm_(1e-3)
                        for p in model.parameters():
                            p.grad.fill_(number - 1.5)
                        optimizer.step()
                else:
                    for p in model.parameters():
                        p.grad.fill_(number - 1.5)
                    optimizer.step()
    assert_close_ulp(models[0].parameters(), models[1].parameters())
