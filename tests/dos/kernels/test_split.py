"""Float32 masters of bfloat16 parameters: never a tie, so that the parameter and the lower half give them back.

Split ones, parameter and 16-bit rest, against whole ones: the same bits in every kernel.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

from dos import DOSAdam
from dos.kernels.adam import AdamArrays, AdamStep, joined, off_ties, rest_of
from dos.kernels.update import adam_update, instruction_sets
from tests.support.arrays import (
    ALL_FLOATS,
    CHUNK,
    KERNELS,
    NOTHING,
    STEP,
    STEPS,
    Kernel,
    as_left,
    assert_alike,
    assert_same_bits,
    bits,
    clone,
    halves,
    mixed_arrays,
    random_arrays,
    random_bits,
    splitting,
    ties,
    update,
)
from tests.support.training import bits as bytes_of
from tests.support.training import mlp, train


def through(kernel: Kernel, floats: Tensor) -> None:
    """Masters go into halves, through an update by nothing and back."""
    master = as_left(floats)
    upper, rest = halves(master)
    assert torch.equal(bits(joined(upper, rest)), bits(master))
    grad, exp_avg, exp_avg_sq = (torch.zeros(len(master)) for _ in range(3))
    kernel(AdamArrays(grad, upper, exp_avg, exp_avg_sq, rest=rest), NOTHING)
    assert_same_bits([joined(upper, rest)], [master])
    assert_same_bits([upper, rest], list(halves(master)))
    number = ~master.isnan()
    assert torch.equal(bits(upper[number]), bits(master[number].to(torch.bfloat16))), "the master is rounded"


def moved(before: Tensor, kernel: Kernel) -> int:
    """How many masters an update by nothing moves, all of it checked."""
    after, out = before.clone(), torch.empty(len(before), dtype=torch.bfloat16)
    kernel(AdamArrays(torch.zeros(len(before)), after, *torch.zeros(2, len(before)), None, out), NOTHING)
    nan = before.isnan()
    expected = before.to(torch.bfloat16)
    assert torch.equal(bits(out), torch.where(nan, 0x7FC0, bits(expected)).to(torch.int16))
    lower = bits(after) & 0xFFFF
    assert not (lower == 0x8000).any()
    assert_same_bits([joined(out, rest_of(after))], [after])
    tie = (bits(before) & 0xFFFF == 0x8000) & ~nan
    assert torch.equal(bits(after)[nan], torch.full_like(bits(after)[nan], 0x7FC00000))
    assert torch.equal(bits(after)[~tie & ~nan], bits(before)[~tie & ~nan])
    assert ((bits(after)[tie] - bits(before)[tie]).abs() == 1).all()
    return int(tie.sum())


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tie_moves_and_all_floats_go_through_the_split_and_back(kernel: str) -> None:
    sampled = random_bits(1 << 20, torch.float32, torch.Generator().manual_seed(0))
    beside = torch.cat([(bits(ties()) + shift).view(torch.float32) for shift in (-0x8000, -1, 1, 0x7FFF)])
    assert moved(ties(), KERNELS[kernel]) == 65_280
    assert moved(beside, KERNELS[kernel]) == 0
    moved(sampled, KERNELS[kernel])
    through(KERNELS[kernel], torch.cat([sampled, ties(), beside]))


@pytest.mark.skipif(ALL_FLOATS not in os.environ, reason=f"takes minutes; set {ALL_FLOATS}=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_floats(kernel: str) -> None:
    ties_moved = 0
    for start in range(-(2**31), 2**31, CHUNK):
        floats = torch.arange(start, start + CHUNK).to(torch.int32).view(torch.float32)
        ties_moved += moved(floats, KERNELS[kernel])
        through(KERNELS[kernel], floats)
    assert ties_moved == 65_280


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_halves_are_joined_alike(kernel: str) -> None:
    """Also those that no update leaves: every rest beside 0, infinities, NaN and random parameters."""
    rest = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0], dtype=torch.bfloat16)
    random = random_bits(len(rest), torch.bfloat16, torch.Generator().manual_seed(0))
    for upper in [*(one.expand(len(rest)).clone() for one in special), random]:
        master = joined(upper, rest)
        assert torch.equal(bits(master[rest >= 0]), ((bits(upper).to(torch.int32) << 16) + rest)[rest >= 0])
        ours = AdamArrays(torch.ones(len(rest)), upper, *(torch.zeros(len(rest)) for _ in range(2)), rest=rest.clone())
        theirs = ours._replace(
            param=master, rest=None, out=upper.clone(), exp_avg=ours.exp_avg.clone(), exp_avg_sq=ours.exp_avg_sq.clone()
        )
        KERNELS[kernel](ours, STEP)
        adam_update(theirs, step=STEP, threads=1, isa="portable")
        assert_alike(ours, theirs)
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert joined(zero, torch.tensor([-5, 5], dtype=torch.int16)).tolist() == [0.0, 5 * 2.0**-149]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rest": torch.zeros(8)}, TypeError, "rest: expected torch.int16, found torch.float32"),
        ({"rest": torch.zeros(7, dtype=torch.int16)}, ValueError, "rest: expected 8 elements, found 7"),
        ({"param": torch.zeros(8)}, TypeError, "rest: expected only beside a bfloat16 param, found torch.float32"),
        ({"out": torch.zeros(8)}, TypeError, "out: expected only beside a float32 param, found torch.bfloat16"),
    ],
)
def test_arrays_that_cannot_be_split_are_refused(
    change: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    split = splitting(mixed_arrays(8, STEP, torch.float32, seed=0))
    with pytest.raises(error, match=message):
        adam_update(split._replace(**change), step=STEP)


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
