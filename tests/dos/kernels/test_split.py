"""A split master, bfloat16 parameter and 16-bit rest, against a float32 master: the same bits in every kernel."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dos.kernels.adam import AdamArrays, AdamStep, joined
from dos.kernels.update import AdamBatch, adam_update, instruction_sets
from tests.support.arrays import (
    ALL_FLOATS,
    CHUNK,
    FLOATS,
    KERNELS,
    L2,
    NOTHING,
    STEP,
    STEPS,
    Kernel,
    as_left,
    assert_alike,
    assert_same_bits,
    bits,
    halves,
    mixed_arrays,
    random_bits,
    splitting,
    ties,
    update_batch,
)


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_floats_go_through_the_split_and_back(kernel: str) -> None:
    sampled = random_bits(1 << 20, torch.float32, torch.Generator().manual_seed(0))
    beside = [(bits(ties()) + shift).view(torch.float32) for shift in (-0x8000, -1, 0, 1, 0x7FFF)]
    through(KERNELS[kernel], torch.cat([sampled, *beside]))


@pytest.mark.skipif(ALL_FLOATS not in os.environ, reason=f"takes minutes; set {ALL_FLOATS}=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_floats_go_through_the_split_and_back(kernel: str) -> None:
    for start in range(-(2**31), 2**31, CHUNK):
        through(KERNELS[kernel], torch.arange(start, start + CHUNK).to(torch.int32).view(torch.float32))


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("step", [*STEPS, L2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_updates_have_the_bits_of_a_float32_master(kernel: str, step: AdamStep, grad: torch.dtype) -> None:
    mixed = mixed_arrays(10_007, step, grad, seed=1)
    split = splitting(mixed)
    for count in range(3):
        now = replace(step, step=step.step + count)
        KERNELS[kernel](split, now)
        adam_update(mixed, step=now, threads=1, isa="portable")
        assert_alike(split, mixed)


kinds = st.tuples(
    st.sampled_from([0, 1, 15, 16, 31, 33, 63, 64, 65, 300, 17_000, 40_001]),
    st.sampled_from(FLOATS),
    st.sampled_from(range(len(STEPS))),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    drawn=st.lists(kinds, min_size=1, max_size=7),
    threads=st.integers(1, 3),
    shift=st.integers(0, 3),
    where=st.sampled_from([*instruction_sets(), "torch"]),
    seed=st.integers(0, 1000),
)
def test_a_batch_of_both_kinds(
    drawn: list[tuple[int, torch.dtype, int, bool]], threads: int, shift: int, where: str, seed: int
) -> None:
    """Split and unsplit runs in one batch, at any alignment, by any number of threads."""
    which = [number for _, _, number, _ in drawn]
    whole = [
        mixed_arrays(numel + shift, replace(STEP, amsgrad=True), grad, seed + i)
        for i, (numel, grad, _, _) in enumerate(drawn)
    ]
    copies = [
        splitting(run) if is_split else AdamArrays(*(None if a is None else a.clone() for a in run))  # type: ignore[arg-type]
        for run, (*_, is_split) in zip(whole, drawn, strict=True)
    ]
    runs, expected = ([run.slice(shift, len(run.param)) for run in made] for made in (copies, whole))
    for run, number in zip(expected, which, strict=True):
        adam_update(run, step=STEPS[number], threads=1, isa="portable")
    update_batch(AdamBatch(runs), where, threads, which)
    for ours, theirs in zip(runs, expected, strict=True):
        if ours.rest is None:
            assert_same_bits(list(ours), list(theirs))
        else:
            assert_alike(ours, theirs)


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
def test_what_cannot_be_split(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    split = splitting(mixed_arrays(8, STEP, torch.float32, seed=0))
    with pytest.raises(error, match=message):
        adam_update(split._replace(**change), step=STEP)
