"""AdamW's moments in 8 bits an element: the definition of the codes, in torch operations.

Blocks of BLOCK elements share a float32 scale, as in 8-bit Adam (Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization"). `exp_avg` is coded linearly, from -127 to 127 times the scale. Of `exp_avg_sq` the square
root is, from 1 to 256 times the scale; taking the root before quantising is the companding of FlashOptim
(Gonzalez Ortiz et al. 2026). No code stands for a root of 0, so that no element is divided by eps alone because its
neighbours are larger. ::

    exp_avg    = code * scale                   code: int8,  scale = largest |exp_avg| / 127, up to 17 bits
    exp_avg_sq = ((code + 1) * scale) ** 2      code: uint8, scale = largest root / 256

Codes are rounded up or down with a probability that makes them right in the mean, because with rounding to nearest
`exp_avg_sq` would stand still: beta2 = 0.999 moves it by less than half a step. The chance is drawn from the bits of
the new moments themselves, so that a result depends on nothing but the values: not on plan, threads or ranks.

Every operation is correctly rounded, so all kernels write the same codes. Values that were decoded get the codes
from which they come. A value that is not finite makes its block NaN, as does one of the seven largest of `exp_avg`,
because its code times the scale would overflow. Values of `exp_avg` of less than 2**-113 in a block of no greater
ones become 0.
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


def encode(exp_avg: Tensor, exp_avg_sq: Tensor, root: Tensor | None = None) -> Codes:
    """float32 moments, 1-D and of whole blocks, as codes. root: the square root of `exp_avg_sq`, if that is known."""
    if root is None:
        root = rooted(exp_avg_sq)
    drawn = (_bits(exp_avg) ^ _bits(exp_avg_sq)) * 0x9E3779B1 & 0xFFFFFFFF

    most = _largest(exp_avg)
    least = ((most.view(torch.float32) / 127).view(torch.int32) + 0x7F & ~0x7F).view(torch.float32)
    scale = torch.where(least < _LEAST_SCALE, 0.0, least)
    scale = torch.where(most < _TOO_LARGE, scale, torch.nan)
    levels = _scaled(exp_avg, scale) + (drawn >> 17 & 0x7F) >> 7
    means = levels.to(torch.int8), scale

    most = _largest(root)
    scale = torch.where(most < _INFINITE, most.view(torch.float32) / 256, torch.nan)
    levels = _scaled(root, scale) + (drawn >> 25) >> 7
    return Codes(*means, (levels.clamp_(min=1) - 1).to(torch.uint8), scale)


def decode(codes: Codes) -> tuple[Tensor, Tensor]:
    """`exp_avg` and `exp_avg_sq` in float32."""
    exp_avg = codes.exp_avg.float().view(-1, BLOCK) * codes.exp_avg_scale[:, None]
    root = (codes.exp_avg_sq.float() + 1).view(-1, BLOCK) * codes.exp_avg_sq_scale[:, None]
    return exp_avg.view(-1), (root * root).view(-1)


def rooted(exp_avg_sq: Tensor) -> Tensor:
    """The square root, correctly rounded. torch's in float32 is not on every processor; by way of double it is."""
    return exp_avg_sq.double().sqrt().float()


def _bits(values: Tensor) -> Tensor:
    """All NaN alike, for processors make different ones."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32)).long()


def _largest(values: Tensor) -> Tensor:
    """The bits of the largest magnitude in each block. They have the order of the magnitudes, any NaN above them."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    return magnitudes.view(-1, BLOCK).amax(dim=1)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """In 128ths of the scale of their block, rounded to nearest; 0 where that is 0 or NaN."""
    factor = torch.where(scale > 0, 1 / scale, 0.0)[:, None]
    return (
        torch.where(scale.isnan()[:, None], 0.0, values.view(-1, BLOCK)).mul_(factor).mul_(128).round_().view(-1).int()
    )
