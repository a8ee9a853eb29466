"""Updates during backward in the loops of others, which say themselves when they only add up gradients."""

from __future__ import annotations

import pytest

from dos import DOSAdam
from tests.support.training import everything, loss_of, mlp


def test_accelerates_accumulation_needs_no_code() -> None:
    accelerate = pytest.importorskip("accelerate")
    found = []
    for updates in ("step", "backward"):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = mlp()
        optimizer = DOSAdam(model.parameters(), lr=0.01)
        prepared, stepped = accelerator.prepare(model, optimizer)
        optimizer.attach(model, updates=updates)
        for i in range(8):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, i))
                stepped.step()
                stepped.zero_grad()
        assert float(optimizer.state_dict()["state"][0]["step"]) == 4
        found.append(everything(model, optimizer))
    assert found[0] == found[1]
