"""Updates of moments in codes, as tests of several kernels want them: all kinds of blocks beside each other."""

from __future__ import annotations

import torch
from torch import Tensor

from dos.kernels.update import AdamArrays
from perfmodel.format import BLOCK
from tests.support.arrays import random_bits

PARAMETERS = [
    (torch.bfloat16, None, True),
    (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.float16, False),
    (torch.float32, None, False),
    (torch.bfloat16, None, False),
    (torch.float16, None, False),
]
"""Types of parameter and copy, and whether the parameter is half of its master."""


def coded_arrays(
    numel: int, grad: torch.dtype, param: torch.dtype, out: torch.dtype | None, split: bool, seed: int
) -> AdamArrays:
    """Random arrays. Each block has values of one kind.

    They are usual, 0, subnormal, large, some of any bits, usual but for a special one, of any
    exponent, or usual beside a mean that is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = numel // BLOCK, BLOCK
    kinds, index = torch.randint(8, shape[:1], generator=generator), torch.arange(shape[0])

    def array(dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        wild = random_bits(numel, dtype, generator).view(shape)
        wild = torch.where(torch.rand(shape, generator=generator) < 0.125, wild, values)
        lone = values.clone()
        lone[:, 5] = torch.tensor([torch.inf, torch.nan, -0.0, torch.finfo(dtype).max])[index % 4].to(dtype)
        spread = values * 2.0 ** torch.randint(-60, 60, shape, generator=generator)
        several = [values, 0 * values, values * 2.0**-130, values * 2.0**63, wild, lone, spread.to(dtype), values]
        return torch.stack(several)[kinds, index].view(-1)

    def scale(least: float, most: float, last: float) -> Tensor:
        usual = torch.rand(shape[0], generator=generator) * 0.01
        several = [usual, 0 * usual, usual * 0 + least, usual * 0 + most, usual * torch.nan, usual, usual * 1e-9]
        several.append(usual * last)
        kept = torch.stack(several)[kinds, index].view(torch.int32) & ~0x7F  # of 17 bits, as kernels write them
        return torch.where(kept.view(torch.float32).isnan(), 0x7FC00000, kept).view(torch.float32)

    codes = [torch.randint(low, low + 256, (numel,), generator=generator) for low in (-128, 0)]
    return AdamArrays(
        array(grad),
        array(param),
        codes[0].clamp(min=-127).to(torch.int8),
        codes[1].to(torch.uint8),
        None,
        None if out is None else torch.zeros(numel, dtype=out),
        random_bits(numel, torch.bfloat16, generator).view(torch.int16) if split else None,
        scale(2.0**-120, 2.0**120, torch.nan),
        scale(2.0**-82, 2.0**50, 1.0),
    )
