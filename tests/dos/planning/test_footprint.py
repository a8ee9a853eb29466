"""Host memory on paper against what is allocated in fact, to the byte."""

from __future__ import annotations

import copy
import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from experiments.gpt import GPT, GPTConfig
from perfmodel.footprint import HostBytes
from perfmodel.format import format_of
from perfmodel.planner.main import main
from tests.support.devices import Pinning
from tests.support.training import bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_paper(numel: int, dtype: torch.dtype, **settings: Any) -> HostBytes:
    """Host memory of parameters on an accelerator, as `HostBytes` counts it."""
    return HostBytes.of(numel, format_of(str(dtype).removeprefix("torch."), **settings), accelerated=True)


def trained(
    device: EmulatedDevice, dtype: torch.dtype, micro_batches: int = 1, steps: int = 2, **settings: Any
) -> tuple[DOSAdam, int]:
    """An optimizer of a small model, and how many parameters that has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 7, bias=False)).to(dtype)
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, device=device, **settings)
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.ones(3, 24, dtype=dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("master_weights", "amsgrad", "offload_gradients", "micro_batches"),
    [(True, True, False, 1), (True, False, True, 1), (False, True, True, 1), (False, False, False, 2)],
)
def test_host_memory_of_an_optimizer_to_the_byte(
    dtype: torch.dtype, master_weights: bool, amsgrad: bool, offload_gradients: bool, micro_batches: int
) -> None:
    device = Pinning()
    settings = {"master_weights": master_weights, "amsgrad": amsgrad}
    optimizer, numel = trained(
        device, dtype, micro_batches, policy="cpu", offload_gradients=offload_gradients, **settings
    )
    expected = on_paper(numel, dtype, **settings).total
    assert device.made == expected
    assert optimizer.metrics()["host_held_bytes"] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("master_weights", "amsgrad", "policy"),
    [(True, True, 0.0), (True, False, "adaptive"), (False, True, "adaptive"), (False, False, 0.0)],
)
def test_state_that_is_on_the_device_takes_no_host_memory_until_it_leaves(
    dtype: torch.dtype, master_weights: bool, amsgrad: bool, policy: str | float
) -> None:
    device = Pinning()
    settings = {"master_weights": master_weights, "amsgrad": amsgrad}
    optimizer, numel = trained(device, dtype, steps=3, policy=policy, **settings)
    assert device.made == 0
    assert len(optimizer.state.items()) == 3, "reading brings it home"
    assert device.made == on_paper(numel, dtype, **settings).state


def test_host_memory_is_made_for_what_leaves() -> None:
    """Subgroups that begin on a page each have memory of their own."""
    page = mmap.PAGESIZE // 4
    device = Pinning()
    parameter = nn.Parameter(torch.ones(4 * page))
    optimizer = DOSAdam([parameter], policy=0.5, subgroup_size=page, device=device)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert device.made == on_paper(2 * page, torch.float32).total


@pytest.mark.parametrize(("dtype", "offload_gradients"), [(DTYPES[0], True), (DTYPES[1], False), (DTYPES[2], True)])
def test_state_that_never_leaves(dtype: torch.dtype, offload_gradients: bool) -> None:
    device = Pinning()
    settings = {"offload_gradients": offload_gradients, "max_grad_norm": 1.0}
    optimizer, numel = trained(device, dtype, policy="resident", **settings)
    reference, _ = trained(Pinning(), dtype, policy="cpu", **settings)
    held = device.usage().held
    assert held == on_paper(numel, dtype).state == optimizer.metrics()["memory_held_bytes"]
    state = {p: entry["exp_avg_sq"] for p, entry in optimizer.state.items()}
    assert device.usage().held == held, "reading gives what is on the device"
    assert device.made == (numel * dtype.itemsize if offload_gradients else 0)
    assert optimizer.release_memory() == 0
    for (p, there), (q, entry) in zip(state.items(), reference.state.items(), strict=True):
        assert bits([p.data, there]) == bits([q.data, entry["exp_avg_sq"]])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(state, reference.state, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer.step()
    reference.step()
    assert [bits([p.data]) for p in state] == [bits([q.data]) for q in reference.state]
    assert saved["state"][0]["step"] == 2


def test_a_device_without_room_for_state_that_never_leaves() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="policy='resident' keeps all optimizer state on the device"):
        trained(Pinning(capacity=4000), torch.float32, policy="resident")


def test_the_planner_says_what_an_optimizer_then_allocates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main([str(path), "--gpu", "2GiB", "--seq", "16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)

    model = GPT(GPTConfig(2, width=64, heads=2, context=128, vocabulary=500), dtype=torch.bfloat16)
    device = Pinning()
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    assert answer["host"]["per_node"] == answer["host"]["per_rank"] == device.made
