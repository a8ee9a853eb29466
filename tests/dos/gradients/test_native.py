"""Offloaded gradients that add up in their own dtype: what autograd adds up in `p.grad`, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy
from dos.gradients import offload
from dos.step.early import Early
from tests.support.training import backward, bits, mlp, on, profile

pytestmark = pytest.mark.usefixtures("one_core")
BETAS = (0.0, 0.999)
"""With which exp_avg is the gradient itself."""


def native(model: nn.Module, policy: str | float = "stride:3", **settings: Any) -> DOSAdam:
    place = on(policy, 10**7, subgroup_size=150, offload_gradients="native")
    return DOSAdam(model.parameters(), **{**place, "betas": BETAS, **settings})


def trained(model: nn.Module, optimizer: DOSAdam, micro_batches: int = 4) -> list[bytes]:
    """The parameters and their gradients in the last of five steps."""
    for step in range(5):
        backward(model, 10 * step, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return bits([*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())])


def without(dtype: torch.dtype, micro_batches: int = 4, **settings: Any) -> list[bytes]:
    """The same where autograd adds up."""
    model = mlp(dtype)
    return trained(model, DOSAdam(model.parameters(), betas=BETAS, **settings), micro_batches)


@pytest.mark.parametrize("policy", ["adaptive", "cpu", "stride:1", 0.5, 0.0, "resident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_as_without_offloading(dtype: torch.dtype, policy: str | float) -> None:
    """In the memory of one micro-batch."""
    model = mlp(dtype)
    optimizer = native(model, policy)
    optimizer.attach(model)
    assert trained(model, optimizer) == without(dtype)
    assert all(record.arena.accumulated is None for record in optimizer._session.registry.records.values())


@pytest.mark.parametrize("state_format", ["float32", "int8"])
def test_same_bits_in_other_formats(state_format: str) -> None:
    model = nn.Linear(128, 64).bfloat16()
    twin = nn.Linear(128, 64).bfloat16()
    twin.load_state_dict(model.state_dict())
    for m, optimizer in (
        (model, native(model, state_format=state_format)),
        (twin, DOSAdam(twin.parameters(), betas=BETAS, state_format=state_format)),
    ):
        for micro_batch in range(6):
            inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(micro_batch)).bfloat16()
            m(inputs).float().square().mean().backward()
            if micro_batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_gradients_come_in_parts_through_few_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is used again when nothing reads from it any more, over a link on which all wait."""
    monkeypatch.setattr(offload, "PASSAGE_BYTES", 64)
    monkeypatch.setattr(offload, "PASSAGES", 3)
    link = EmulatedDevice(profile(d2h_bandwidth=1e6, d2h_bandwidth_duplex=1e6), capacity=10**7)
    model = mlp(torch.bfloat16)
    optimizer = native(model, device=link)
    assert trained(model, optimizer) == without(torch.bfloat16)
    assert len(optimizer._session.registry.offloaded._passages) == 3


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_does_not_come_is_said(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is; after zero_grad training goes on."""
    monkeypatch.setattr(offload, "PASSAGE_BYTES", 64)
    model = mlp(torch.bfloat16)
    optimizer = native(model)
    backward(model, 0)
    send, sent = Early.send_gradients, itertools.count()

    class Broken:
        def wait(self) -> None:
            raise OSError("the link broke")

    def fail(self: Early, index: int, copies: Sequence[Copy]) -> Any:
        found = send(self, index, copies)
        found.job.wait()
        return type("Sent", (), {"job": Broken()}) if next(sent) == part else found

    with monkeypatch.context() as patch:
        patch.setattr(Early, "send_gradients", fail)
        backward(model, 1)
    with pytest.raises(RuntimeError, match="are not complete"):
        optimizer.step()
    optimizer.zero_grad()
    assert trained(model, optimizer)
