"""The float32 master of a bfloat16 parameter is never a tie, so that parameter and lower half give it back."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

from dos import DOSAdam
from dos.kernels.adam import AdamArrays, AdamStep, off_ties
from dos.kernels.update import instruction_sets
from tests.support.arrays import (
    ALL_FLOATS,
    CHUNK,
    KERNELS,
    NOTHING,
    STEPS,
    Kernel,
    assert_same_bits,
    bits,
    clone,
    random_arrays,
    ties,
    update,
)
from tests.support.training import bits as bytes_of
from tests.support.training import mlp, train


def recovered(out: Tensor, lower: Tensor) -> Tensor:
    """The master's bits from the parameter and the master's lower half, as DESIGN has it."""
    upper = bits(out).to(torch.int32)
    return (upper << 16 | lower) - torch.where(lower > 0x8000, 0x10000, 0).to(torch.int32)


def moved(before: Tensor, kernel: Kernel) -> int:
    """How many masters an update by nothing moves, all of it checked."""
    after, out = before.clone(), torch.empty(len(before), dtype=torch.bfloat16)
    kernel(AdamArrays(torch.zeros(len(before)), after, *torch.zeros(2, len(before)), None, out), NOTHING)
    nan = before.isnan()
    expected = before.to(torch.bfloat16)
    assert torch.equal(bits(out), torch.where(nan, 0x7FC0, bits(expected)).to(torch.int16))
    lower = bits(after) & 0xFFFF
    assert not (lower == 0x8000).any()
    assert torch.equal(recovered(out, lower), bits(after))
    tie = (bits(before) & 0xFFFF == 0x8000) & ~nan
    assert torch.equal(bits(after)[nan], torch.full_like(bits(after)[nan], 0x7FC00000))
    assert torch.equal(bits(after)[~tie & ~nan], bits(before)[~tie & ~nan])
    assert ((bits(after)[tie] - bits(before)[tie]).abs() == 1).all()
    return int(tie.sum())


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tie_moves_and_nothing_else_does(kernel: str) -> None:
    random = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    beside = [(bits(ties()) + shift).view(torch.float32) for shift in (-0x8000, -1, 1, 0x7FFF)]
    assert moved(ties(), KERNELS[kernel]) == 65_280
    assert moved(torch.cat(beside), KERNELS[kernel]) == 0
    moved(random.view(torch.float32), KERNELS[kernel])


@pytest.mark.skipif(ALL_FLOATS not in os.environ, reason=f"takes minutes; set {ALL_FLOATS}=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_floats(kernel: str) -> None:
    starts = range(-(2**31), 2**31, CHUNK)
    floats = (torch.arange(start, start + CHUNK).to(torch.int32).view(torch.float32) for start in starts)
    assert sum(moved(chunk, KERNELS[kernel]) for chunk in floats) == 65_280


@pytest.mark.parametrize(
    ("param", "out"),
    [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, None), (torch.float16, None)],
)
@pytest.mark.parametrize("isa", instruction_sets())
def test_no_other_parameters_are_concerned(isa: str, param: torch.dtype, out: torch.dtype | None) -> None:
    arrays = [torch.zeros(2**16), ties().to(param), torch.zeros(2**16), torch.zeros(2**16), None]
    arrays.append(None if out is None else torch.zeros(2**16, dtype=out))
    before = clone(arrays)
    update(arrays, NOTHING, isa=isa)
    kept = ~ties().isnan()
    assert_same_bits([arrays[1][kept]], [before[1][kept]])


@pytest.mark.parametrize("step", STEPS)
def test_the_rule_is_the_last_of_the_update(step: AdamStep) -> None:
    """Moments know nothing of it; the master is what it would be beside a float32 parameter, off ties."""
    plain = random_arrays(1 << 20, step, torch.bfloat16, torch.float32, None, seed=0)
    ruled = [*clone(plain)[:-1], torch.zeros(1 << 20, dtype=torch.bfloat16)]
    update(plain, step)
    update(ruled, step)
    master = plain[1]
    assert master is not None
    assert_same_bits(ruled[1:5], [off_ties(master), *plain[2:5]])
    assert not torch.equal(bits(off_ties(master)), bits(master)), "no tie came out, so nothing was compared"


def test_masters_that_are_loaded_are_off_ties() -> None:
    """So that a step from them gives the same bits however state is kept."""
    ends = []
    for settle, state_format in itertools.product((Tensor.clone, off_ties), (None, "float32")):
        model = mlp(torch.bfloat16)
        optimizer = DOSAdam(model.parameters(), state_format=state_format)
        train(model, optimizer, 1)
        saved = optimizer.state_dict()
        for parameter, entry in zip(model.parameters(), saved["state"].values(), strict=True):
            tie = (bits(optimizer.adamw_state(parameter)["master_param"]) & -0x10000) + 0x8000
            entry["master_param"] = settle(tie.view(torch.float32))
            entry.pop("master_rest", None)
            parameter.data = entry["master_param"].bfloat16()
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1, first_step=1)
        ends.append(bytes_of(p.detach() for p in model.parameters()))
        ends[-1] += bytes_of(optimizer.adamw_state(p)["master_param"] for p in model.parameters())
    assert ends == ends[:1] * 4
