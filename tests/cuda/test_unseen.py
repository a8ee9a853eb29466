"""On a GPU: writes to parameters that raise no version, which the device finds where the host updates a copy."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam
from dos.devices import cuda
from dos.devices.cuda import CudaDevice
from dos.sharding.fingerprint import COLUMNS
from dos.state import bit_sums
from perfmodel import Op
from tests.support.gpu import DEVICE, NEEDS_GPU, late, not_simulated
from tests.support.training import Make, batch, bits, mlp
from tests.support.unseen_writes import run

pytestmark = NEEDS_GPU

HALF = not_simulated("layer norm in 16 bits")
UNTIL_BACKWARD_ENDS = ("forward", "after the step")
MODES: dict[str, dict[str, Any]] = {"plain": {}, "attached": {}, "offloaded": {"offload_gradients": True}}


def ends(dtype: torch.dtype, make: Make, **settings: Any) -> tuple[list[bytes], list[str]]:
    """Parameters after a run, and the warnings of writes that were lost."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parameters = run(make, dtype, device=DEVICE, **settings)
    texts = [str(each.message) for each in told]
    return bits(p.cpu() for p in parameters), [text for text in texts if "raises no version" in text]


def making(policy: Any, mode: str, **settings: Any) -> Make:
    shape = {"policy": policy, "lr": 0.01, "subgroup_size": 1500, **MODES[mode], **settings}
    return lambda parameters: DOSAdam(parameters, **shape)


@pytest.mark.parametrize(
    ("dtype", "policy", "mode", "settings"),
    [
        (torch.float32, "cpu", "plain", {}),
        (torch.float32, 0.5, "offloaded", {"state_format": "int8"}),
        (torch.float32, "stride:2", "attached", {}),
        pytest.param(torch.bfloat16, "cpu", "attached", {}, marks=HALF),
        pytest.param(torch.bfloat16, "stride:2", "plain", {"state_format": "int8"}, marks=HALF),
        pytest.param(torch.float16, "cpu", "plain", {}, marks=HALF),
    ],
)
def test_writes_count(dtype: torch.dtype, policy: Any, mode: str, settings: dict[str, Any]) -> None:
    make, given = making(policy, mode, **settings), {"moments": UNTIL_BACKWARD_ENDS, "attach": mode == "attached"}
    assert ends(dtype, make, **given) == (ends(dtype, make, counted=True, **given)[0], [])


def test_native_code_launches_the_sums_of_bits_once_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    found, call = list[object](), CudaDevice._call

    def counted(*arguments: Any) -> None:
        found.append(arguments[6] if len(arguments) > 6 else None)
        call(*arguments)

    monkeypatch.setattr(CudaDevice, "_call", counted)
    model = nn.ParameterList(torch.randn(4096, device=DEVICE) for _ in range(6))
    if bit_sums.bits_kernel(model[0].device) is None or cuda.runtime() is None:
        pytest.skip("needs Triton and the functions of the runtime")
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=2 * 4096)
    for _ in range(4):
        found.clear()
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
    kernels = [kernel for kernel in found if kernel is not None]
    # Of three subgroups: compared behind their gradients, and behind backward once more, and remembered.
    assert len(kernels) == len(found) == 3 * 3


class Products(nn.Module):
    """A model in 16 bits of operations that are simulated."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, 3000)
        self.blocks = nn.ModuleList(nn.ParameterList([values.to(dtype), (values + i).to(dtype)]) for i in range(3))


@pytest.mark.parametrize("policy", ["resident", "stride:1", "stride:2", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_masters_take_over_what_user_code_has_written(dtype: torch.dtype, policy: str) -> None:
    found = []
    for counted in (False, True):
        model = Products(dtype).to(DEVICE)
        optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=2500, lr=0.01, state_format="float32")
        for step in range(5):
            for p in model.parameters():
                p.grad = (torch.arange(3000) % (step + 3) - 1).to(dtype).to(DEVICE)
            optimizer.step()
            optimizer.synchronize()
            for p in list(model.parameters())[step % 2 :: 2]:
                p.data.clamp_(-0.5, 0.75)
            if counted:
                torch.autograd.graph.increment_version(list(model.parameters()))
        found.append(bits(p.cpu() for p in model.parameters()))
    assert found[0] == found[1]


@pytest.mark.parametrize("attach", [False, True])
def test_a_write_behind_gradients_that_have_left_is_said_and_later_ones_count(attach: bool) -> None:
    model = mlp(width=256).to(DEVICE)
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=1500, lr=0.01)
    if attach:
        optimizer.attach(model)
    told: list[int] = []
    for step in range(9):
        optimizer.zero_grad()
        model(batch(step).to(DEVICE)).square().mean().backward()
        if step > 3:
            model[0].weight.data.zero_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.synchronize()
        told += [step for each in caught if "raises no version" in str(each.message)]
        # The device may compare before the write or behind it. One step moves each element by the learning rate or so.
        assert step < 4 or told == [step] or float(model[0].weight.detach().abs().max()) < 0.05
    assert len(told) <= 1


def test_sums_are_not_in_memory_that_the_callers_work_still_reads() -> None:
    """The CPU lane makes them while the caller's work is queued, in memory that the caller has released."""
    model = mlp(width=256).to(DEVICE)
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=10**6, lr=0.01)
    optimizer.attach(model)
    inputs = batch(0).to(DEVICE)
    torch.cuda.synchronize()
    late(Op.GRADIENT, 0.3)  # until the caller has released its memory
    model(inputs).square().mean().backward()
    optimizer.step()
    taken = [torch.full((2 * 2 * COLUMNS,), 7, dtype=torch.int64, device=DEVICE) for _ in range(8)]
    torch.cuda._sleep(10**9)
    read = [torch.empty_like(each).copy_(each) for each in taken]
    del taken
    time.sleep(0.7)
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert all(bool((each.cpu() == 7).all()) for each in read)


def test_where_nothing_more_can_be_pinned_writes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refusing(*shape: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*shape, **settings)

    make, given = making("cpu", "plain"), {"moments": ("after the step",)}
    expected = ends(torch.float32, make, counted=True, **given)[0]
    monkeypatch.setattr(torch, "zeros", refusing)
    assert ends(torch.float32, make, **given) == (expected, [])
