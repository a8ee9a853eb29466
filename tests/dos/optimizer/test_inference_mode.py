"""Steps, gradients and clipping in torch.inference_mode: what AdamW accepts there gives the same here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.training import Make, assert_as_adamw, batch, mlp


@pytest.mark.parametrize(
    ("place", "offload", "attached", "clip"),
    [
        *(("host", False, False, "ours"), ("host", False, False, "and written to"), ("cpu", False, True, "")),
        *(("cpu", True, False, "and written to"), ("stride:2", True, True, "ours")),
        *(("stride:2", False, False, "and written to"), ("resident", False, True, "ours")),
    ],
)
@pytest.mark.parametrize(
    "inside",
    [
        {"step": range(4)},
        {"step": [2]},
        {"backward": [0, 2]},
        {"clip": [0]},
        {part: [0, 1, 3] for part in ("backward", "clip", "step")},
    ],
    ids=["all steps", "one step", "gradients", "first clip", "everything"],
)
@pytest.mark.filterwarnings("ignore:.*is not clipped")
def test_it_changes_nothing(inside: dict[str, Any], place: str, attached: bool, offload: bool, clip: str) -> None:
    """inside: the steps, by number, whose backward, clipping or update is in inference mode.

    Gradients made there have no version that would tell that they were written to after they left or were clipped.
    """

    def run(make: Make) -> Iterable[Tensor]:
        model = mlp()
        optimizer = make(model.parameters())
        ours = isinstance(optimizer, DOSAdam)
        if attached and ours:
            optimizer.attach(model)
        for number in range(4):
            # AdamW cannot go on outside with state that it has made inside.
            within = {
                part: torch.inference_mode() if ours and number in inside.get(part, ()) else nullcontext()
                for part in ("backward", "clip", "step")
            }
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            with within["backward"]:
                loss.backward()
            with within["clip"]:
                if ours and clip:
                    norm = optimizer.grad_norm()
                    assert torch.equal(norm, optimizer.clip_grad_norm_(0.05))
                elif clip == "ours" or (clip and offload):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with torch.inference_mode():
                for p in model.parameters() if clip == "and written to" and not offload else ():
                    p.grad.fill_(number - 1.5)
            with within["step"]:
                optimizer.step()
                if ours and number == 2:
                    optimizer.state_dict()
        if ours:
            optimizer.synchronize()
        return model.parameters()

    assert_as_adamw(run, place, offload_gradients=offload)


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
