"""AdamW's moments in 8 bits an element: the definition of the codes, in torch operations.

Blocks of BLOCK elements share a float32 scale, as in 8-bit Adam (Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization"). `exp_avg` is coded linearly, from -127 to 127 times the scale. Of `exp_avg_sq` the square
root is, from 1 to 256 times the scale; taking the root before quantising is the companding of FlashOptim
(Gonzalez Ortiz et al. 2026). No code stands for a root of 0, so that no element is divided by eps alone because its
neighbours are larger. ::

    exp_avg    = code * scale                   code: int8,  scale = largest |exp_avg| / 127, up to 17 bits
    exp_avg_sq = ((code + 1) * scale) ** 2      code: uint8, scale = largest root / 256

Codes are rounded up or down with chances that make them right in the mean, because with rounding to nearest
`exp_avg_sq` would stand still: beta2 = 0.999 moves it by less than half a step. The chances are multiples of 1/128
for `exp_avg` and 1/4096 for the root. They are drawn from the bits of the new moments, the number of the step and the
place in the block, so that a result depends on nothing else: not on plan, threads or ranks.

Every operation is correctly rounded, so all kernels write the same codes. Values that were decoded get the codes
from which they come. Where a value of either moment is not finite, both are NaN in the whole block; so they are where
one of `exp_avg` is among the seven largest floats, because its code times the scale would overflow. Values of
`exp_avg` of less than 2**-113 in a block of no greater ones become 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.format import BLOCK

_INFINITE = 0x7F800000
_TOO_LARGE = 0x7F7FFFF9
_LEAST_SCALE = 2.0**-120


class Codes(NamedTuple):
    """Moments in codes: 1-D, of whole blocks, with a scale for each block."""

    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor


def encode(exp_avg: Tensor, exp_avg_sq: Tensor, root: Tensor | None = None, seed: int = 0) -> Codes:
    """Encode float32 moments, 1-D and of whole blocks.

    root: the square root of `exp_avg_sq`, if it is known. seed: of the step, 32 bits.
    """
    if root is None:
        root = rooted(exp_avg_sq)
    salt = torch.arange(BLOCK, dtype=torch.int64, device=root.device) * 0x85EBCA6B & 0xFFFFFFFF ^ seed
    bits = _bits(exp_avg) ^ _bits(exp_avg_sq)
    drawn = (bits.view(-1, BLOCK) ^ salt).view(-1) * 0x9E3779B1 & 0xFFFFFFFF
    most, most_root = _largest(exp_avg), _largest(root)
    finite = (most < _TOO_LARGE) & (most_root < _INFINITE)

    # Division by a tensor: on CUDA, division by a number is multiplication by its reciprocal.
    scale = most.view(torch.float32) / torch.full_like(finite, 127, dtype=torch.float32)
    scale = (scale.view(torch.int32) + 0x7F & ~0x7F).view(torch.float32)
    scale = torch.where(finite, torch.where(scale < _LEAST_SCALE, 0.0, scale), torch.nan)
    levels = _parts(exp_avg, scale, 128) + (drawn >> 16 & 0x7F) >> 7

    root_scale = torch.where(finite, most_root.view(torch.float32) * 2**-8, torch.nan)
    root_levels = _parts(root, root_scale, 4096) + (drawn >> 20) >> 12
    return Codes(levels.to(torch.int8), scale, (root_levels.clamp_(min=1) - 1).to(torch.uint8), root_scale)


def decode_mean(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `exp_avg` in float32, 1-D."""
    return (codes.float().view(-1, BLOCK) * scale[:, None]).view(-1)


def decode_square(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `exp_avg_sq` in float32, 1-D."""
    root = (codes.float() + 1).view(-1, BLOCK) * scale[:, None]
    return (root * root).view(-1)


def rooted(exp_avg_sq: Tensor) -> Tensor:
    """Return the square root, correctly rounded: via double, because torch's in float32 is not on every processor."""
    return exp_avg_sq.double().sqrt().float()


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long()


def _largest(values: Tensor) -> Tensor:
    """Return the bits of the largest magnitude in each block. Bits sort as magnitudes do, any NaN above all."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    return magnitudes.view(-1, BLOCK).amax(dim=1)


def _parts(values: Tensor, scale: Tensor, parts: int) -> Tensor:
    """Return the values in units of their block's scale / `parts`, rounded to nearest; 0 where that is 0 or NaN."""
    factor = torch.where(scale > 0, 1 / scale * parts, 0.0)[:, None]
    finite = torch.where(scale.isnan()[:, None], 0.0, values.view(-1, BLOCK))
    return finite.mul_(factor).round_().view(-1).int()
