"""The cost of a module's hook before forward, in calls of Python, and how often it waits."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.parameters.hooks import Attachment
from dos.step.ledger import Ledger
from tests.support.training import FAST

pytestmark = pytest.mark.usefixtures("samples_as_asked")

SIZE = 16


class Counted:
    """Calls within hooks of modules, and waits for subgroups, since `begin`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin()
        before_module, join = Attachment._before_module, Ledger.join

        def count(frame: FrameType, event: str, _: Any) -> None:
            self.calls += event == "call"

        def counted(attachment: Attachment, module: nn.Module) -> None:
            self.hooks += 1
            sys.setprofile(count)
            try:
                before_module(attachment, module)
            finally:
                sys.setprofile(None)

        def joined(ledger: Ledger, *arguments: Any) -> None:
            self.joins += 1
            join(ledger, *arguments)

        monkeypatch.setattr(Attachment, "_before_module", counted)
        monkeypatch.setattr(Ledger, "join", joined)

    def begin(self) -> None:
        self.calls = self.hooks = self.joins = 0


@pytest.mark.parametrize("subgroups", [1, 4])
def test_modules_whose_parameters_were_updated_together_wait_once(
    subgroups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = 24
    counted = Counted(monkeypatch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.ReLU()) for _ in range(modules)))
    size = SIZE * SIZE * modules // subgroups
    device = EmulatedDevice(FAST, 10**9)
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=size, device=device)
    optimizer.attach(model)

    def forward() -> torch.Tensor:
        counted.begin()
        return model(torch.ones(2, SIZE)).sum()

    for _ in range(3):
        forward().backward()
        optimizer.step()
    forward()
    assert counted.joins == subgroups
    assert counted.hooks == 3 * modules + 1
    assert counted.calls <= 20 * counted.hooks
    optimizer.synchronize()
    forward()
    assert counted.calls <= 7 * counted.hooks
