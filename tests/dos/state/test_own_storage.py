"""Tensors with a storage of their own, and the entries of `optimizer.state`, which are such tensors in every mode."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices.pinned import lazy_zeros
from dos.state.own_storage import overlap_with, with_own_storage
from tests.support.training import FAST

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16]


@pytest.mark.parametrize("dtype", KINDS)
def test_the_storage_has_the_bytes_of_the_view_alone(dtype: torch.dtype) -> None:
    whole = torch.arange(60).to(dtype)
    for view in (whole[7:19].view(3, 4), whole[7:19].view(4, 3).t(), whole[5:9].view(1, 4, 1), whole[3:3]):
        own = with_own_storage(view)
        assert torch.equal(own, view)
        assert (own.dtype, own.stride(), own.storage_offset()) == (view.dtype, view.stride(), 0)
        assert own.data_ptr() == view.data_ptr()
        assert own.untyped_storage().nbytes() == view.nbytes
        own.fill_(1)
        assert torch.equal(own, view)


def test_it_keeps_the_memory_alive() -> None:
    whole = lazy_zeros(10_000, torch.float32)
    own = with_own_storage(whole[100:200])
    del whole
    gc.collect()
    others = [torch.full((10_000,), 7.0) for _ in range(10)]
    assert not own.any()
    del others


def test_memory_that_user_code_shares_between_processes_is_that_of_one_tensor() -> None:
    whole = torch.zeros(20)
    one, other = with_own_storage(whole[:10]), with_own_storage(whole[10:])
    one.share_memory_()
    one.fill_(3)
    other.fill_(4)
    assert whole.tolist() == [0.0] * 10 + [4.0] * 10


def test_overlap() -> None:
    memory = [torch.zeros(10), torch.zeros(5, dtype=torch.int8)]
    lies = overlap_with(memory)
    assert all(map(lies, (memory[0][3:], memory[1], memory[0].detach(), with_own_storage(memory[0][9:]))))
    assert not lies(torch.zeros(3))
    assert not overlap_with(())(memory[0])


def pickled(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def adam(parameters: Any, mode: str, folder: Path) -> DOSAdam:
    options: dict[str, Any] = {"subgroup_size": 5000}
    if mode != "parameters on the host":
        options["device"] = EmulatedDevice(FAST, 10**8)
    if mode == "on disk":
        options |= {"disk": folder, "host_memory": 300_000}
    if mode == "int8":
        options["state_format"] = "int8"
    if mode == "resident":
        options["policy"] = "resident"
    return DOSAdam(parameters, **options)


@pytest.mark.parametrize("mode", ["parameters on the host", "float32", "int8", "resident", "on disk"])
def test_entries_have_storages_of_their_own(mode: str, tmp_path: Path) -> None:
    def train(optimizer_of: Any) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
        optimizer = optimizer_of(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 96)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = train(lambda parameters: adam(parameters, mode, tmp_path))
    expected, adamw = train(torch.optim.AdamW)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert pickled(dict(optimizer.state[parameter])) <= pickled(adamw.state[other]) + 1000
    entries = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    assert len({t.untyped_storage().data_ptr() for t in entries}) == len(entries)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in entries)
    # Live all the same.
    first = next(iter(model.parameters()))
    optimizer.state[first]["exp_avg_sq" if mode != "int8" else "exp_avg_scales"].fill_(2.0)
    assert pickled(optimizer.state_dict()) <= 1.1 * pickled(adamw.state_dict()) + 5000


def test_entries_that_user_code_exchanges() -> None:
    """They are no views any more, and are still known as memory of other parameters' state."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    optimizer = DOSAdam(parameters, lr=0.0)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((4,), 1.0 + number)
    optimizer.step()
    before = [optimizer.state[p]["exp_avg"].clone() for p in parameters]
    entries = [optimizer.state[p] for p in parameters]
    entries[1]["exp_avg"].share_memory_()  # moves its memory, which comes back
    for parameter, entry in zip(parameters, entries[1:] + entries[:1], strict=True):
        optimizer.state[parameter] = entry
        parameter.grad = torch.zeros(4)
    optimizer.step()
    for parameter, value in zip(parameters, before[1:] + before[:1], strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.9 * value)
