"""Random arrays for one update, and comparisons to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dos.kernels import gpu_update
from dos.kernels.adam import AdamArrays, AdamStep, joined, off_ties, rest_of
from dos.kernels.gpu_update import GpuBatch, _adam_update_torch
from dos.kernels.update import AdamBatch, adam_update, instruction_sets

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

SPECIAL = torch.tensor([0.0, 1e-45, 1e-40, 1.17549435e-38, 6e-8, 1.0, 65504.0, 65520.0, 3.4028235e38, math.inf])
SPECIAL = torch.cat([SPECIAL, -SPECIAL, torch.tensor([math.nan])])

STEP = AdamStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)

STEPS = [
    STEP,
    replace(STEP, decoupled_weight_decay=False, amsgrad=True, grad_scale=0.37),
    replace(STEP, maximize=True, amsgrad=True, weight_decay=0.0, step=1),
    replace(STEP, beta1=0.0, beta2=0.4, grad_scale=2.0**-16, eps=0.0),
    replace(STEP, beta1=0.4, decoupled_weight_decay=False, maximize=True, step=1000),
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern: denormals, infinities and NaN among them."""
    low, high, integer = (-(2**31), 2**31, torch.int32) if dtype == torch.float32 else (-(2**15), 2**15, torch.int16)
    return torch.randint(low, high, (numel,), generator=generator).to(integer).view(dtype)


def random_arrays(
    numel: int,
    step: AdamStep,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    seed: int,
) -> list[Tensor | None]:
    """Grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, out; one element in four is any bit pattern, or special."""
    generator = torch.Generator().manual_seed(seed)

    def array(dtype: torch.dtype, positive: bool = False) -> Tensor:
        values = torch.randn(numel, generator=generator)
        sane = (values.square() if positive else values).to(dtype)
        special = SPECIAL[torch.randint(len(SPECIAL), (numel,), generator=generator)].to(dtype)
        drawn = torch.rand(numel, generator=generator)
        usual = torch.where(drawn > 0.875, special, sane)
        return torch.where(drawn < 0.125, random_bits(numel, dtype, generator), usual)

    return [
        array(grad_dtype),
        array(param_dtype),
        array(torch.float32),
        array(torch.float32, positive=True),
        array(torch.float32, positive=True) if step.amsgrad else None,
        None if out_dtype is None else torch.zeros(numel, dtype=out_dtype),
    ]


def update(arrays: list[Tensor | None], step: AdamStep, **options: Any) -> None:
    adam_update(AdamArrays(*arrays), step=step, **options)


def clone(arrays: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if array is None else array.clone() for array in arrays]


def assert_same_bits(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"array {number}"


NOTHING = replace(STEP, lr=0.0, eps=1.0)
"""A step that gives every parameter back as it was."""

CHUNK = 1 << 24

ALL_FLOATS = "DOS_ALL_FLOATS"


def ties() -> Tensor:
    """Every tie, NaN with such bits among them."""
    return ((torch.arange(2**16, dtype=torch.int32) << 16) + 0x8000).view(torch.float32)


L2 = replace(STEP, decoupled_weight_decay=False, maximize=True, amsgrad=True, grad_scale=0.37)

Kernel = Callable[[AdamArrays, AdamStep], None]

KERNELS: dict[str, Kernel] = {
    f"C++ {isa}": lambda arrays, step, isa=isa: adam_update(arrays, step=step, isa=isa) for isa in instruction_sets()
} | {"torch": _adam_update_torch}


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """A master that is no tie as the parameter, rounded with integers alone, and the rest."""
    upper = (bits(master).to(torch.int64) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, rest_of(master)


def as_left(floats: Tensor) -> Tensor:
    """Masters as an update leaves them: off ties, and every NaN the canonical one."""
    left = off_ties(floats)
    return torch.where(left.isnan(), torch.full_like(bits(left), 0x7FC00000), bits(left)).view(torch.float32)


def splitting(mixed: AdamArrays) -> AdamArrays:
    """The same update with a split master, on memory of its own."""
    upper, rest = halves(mixed.param)
    grad, _, exp_avg, exp_avg_sq, max_exp_avg_sq, *_ = (None if a is None else a.clone() for a in mixed)
    return AdamArrays(grad, upper, exp_avg, exp_avg_sq, max_exp_avg_sq, rest=rest)


def mixed_arrays(numel: int, step: AdamStep, grad: torch.dtype, seed: int) -> AdamArrays:
    """Random arrays, one element in eight of any bits, with a float32 master as an update leaves it."""
    arrays = random_arrays(numel, step, grad, torch.float32, torch.bfloat16, seed)
    arrays[1] = as_left(arrays[1])
    return AdamArrays(*arrays)


def assert_alike(split: AdamArrays, mixed: AdamArrays) -> None:
    """What the split update left, and what the mixed one did."""
    assert_same_bits([split.param, split.rest], [mixed.out, rest_of(mixed.param)])
    assert_same_bits([joined(split.param, split.rest)], [mixed.param])
    assert_same_bits(list(split[2:5]), list(mixed[2:5]))


def update_batch(batch: AdamBatch, where: str, threads: int, which: Sequence[int]) -> None:
    """By the kernel of an instruction set, or "torch": its operations, as on a GPU without Triton."""
    if where != "torch":
        batch.update(STEPS, which, threads=threads, isa=where)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_update, "_triton_kernel", lambda: None)
        patch.setattr(batch, "_gpu", GpuBatch(torch.device("cpu")))
        batch.update(STEPS, which)
