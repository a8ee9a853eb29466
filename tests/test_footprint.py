"""Host memory on paper against what is allocated in fact, to the byte."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path

import pytest
import torch
from conftest import FAST
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.subgroup import Arena
from experiments.gpt import GPT, GPTConfig
from perfmodel.footprint import host_bytes, host_footprint
from perfmodel.planner.main import main


class Recorder:
    """A host allocator that knows what is still alive."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(numel, dtype=dtype)
        key = id(tensor)
        self.live[key] = tensor.nbytes
        weakref.finalize(tensor, self.live.pop, key)
        return tensor

    @property
    def total(self) -> int:
        return sum(self.live.values())


class RecordingDevice(EmulatedDevice):
    """Counts the host memory that is asked of it."""

    def __init__(self) -> None:
        super().__init__(FAST, capacity=10**9)
        self.recorder = Recorder()

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.recorder(numel, dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("master_weights", "amsgrad", "offload_gradients"), list(itertools.product((True, False), repeat=3))
)
@pytest.mark.parametrize("policy", ["cpu", 0.5])
def test_host_memory_of_an_optimizer_to_the_byte(
    dtype: torch.dtype, master_weights: bool, amsgrad: bool, offload_gradients: bool, policy: str | float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 7, bias=False)).to(dtype)
    device = RecordingDevice()
    optimizer = DOSAdam(
        model.parameters(),
        policy=policy,
        subgroup_size=300,
        device=device,
        master_weights=master_weights,
        amsgrad=amsgrad,
        offload_gradients=offload_gradients,
    )
    for _ in range(2):
        model(torch.ones(3, 24, dtype=dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert device.recorder.total == host_bytes(
        sum(p.numel() for p in model.parameters()),
        dtype.itemsize,
        master_weights=master_weights,
        amsgrad=amsgrad,
        offload_gradients=offload_gradients,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("master_weights", "amsgrad", "accelerated"), list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("gradient", [None, torch.float32, torch.float16], ids=str)
def test_host_memory_of_an_arena_to_the_byte(
    dtype: torch.dtype, master_weights: bool, amsgrad: bool, accelerated: bool, gradient: torch.dtype | None
) -> None:
    recorder = Recorder()
    parameters = [torch.zeros(5, 3, dtype=dtype), torch.zeros(7, dtype=dtype)]
    arena = Arena(
        parameters, accelerated=accelerated, master_weights=master_weights, amsgrad=amsgrad, allocate=recorder
    )
    if gradient is not None:
        arena.stage_gradients_as(gradient)
    found = host_footprint(
        22,
        dtype.itemsize,
        master_weights=master_weights,
        amsgrad=amsgrad,
        accelerated=accelerated,
        other_gradient_dtype=gradient not in (None, dtype) and dtype != torch.float32,
    )
    assert recorder.total == found.total
    assert arena.state.nbytes == found.state


def test_the_planner_says_what_an_optimizer_then_allocates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main([str(path), "--gpu", "2GiB", "--seq", "16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)

    model = GPT(GPTConfig(2, width=64, heads=2, context=128, vocabulary=500), dtype=torch.bfloat16)
    device = RecordingDevice()
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    assert answer["host"]["all_ranks"] == answer["host"]["per_rank"] == device.recorder.total


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="numel must be 0 or more, found -1"):
        host_bytes(-1, 2)
    with pytest.raises(ValueError, match=r"value_bytes must be 2 .bfloat16, float16. or 4 .float32., found 8"):
        host_bytes(1, 8)
    assert host_bytes(0, 2) == 0
