"""DOSAdam beside `torch.optim.Muon`, each for its own parameters, as docs/migrating.md has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam
from tests.support.training import loss_of, mlp, on

Muon: Any = getattr(torch.optim, "Muon", None)
pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.skipif(Muon is None, reason="this torch has no Muon"),
]


def trained(made: Any, *, attach: bool = False, **settings: Any) -> list[torch.Tensor]:
    """The parameters after eight steps, clipped together, each with a scheduler. made: the other optimizer's class."""
    model = mlp()
    muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    other = made([p for p in model.parameters() if p.ndim != 2], lr=1e-2, **settings)
    if attach:
        other.attach(model)
    schedulers = [torch.optim.lr_scheduler.LinearLR(each, total_iters=6) for each in (muon, other)]
    for step in range(8):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for each in (muon, other):
            each.step()
            each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    if attach:
        other.synchronize()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("policy", ["stride:2", "cpu", "resident"])
def test_both_train_as_adamw_beside_muon(policy: str, offload_gradients: bool, attach: bool) -> None:
    settings = on(policy, subgroup_size=32, offload_gradients=offload_gradients)
    found = trained(DOSAdam, attach=attach, **settings)
    torch.testing.assert_close(found, trained(torch.optim.AdamW), rtol=1e-5, atol=1e-6)
