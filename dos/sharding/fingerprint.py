"""Whether the bits of tensors changed, where no version counter tells.

Operations on lists of DTensors (`torch._foreach_mul_`, which gradient clipping is made of) change
values and count nowhere, with object and address as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LANES = 509
"""Prime, so that rows of a matrix that change places are seen: no row is a multiple of it."""
_WORD = torch.int64.itemsize


def fingerprint(tensor: Tensor) -> Tensor:
    """1-D int64 on the tensor's device, equal for equal bits in the same order; made without waiting.

    The tensor as 64-bit words in 509 columns, each summed up, and the elements that fill no row as they
    are. What multiplies, negates, zeroes or replaces all elements, or one, changes at least one sum.
    """
    tensor = tensor.detach()
    per_word = _WORD // tensor.itemsize
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    elif tensor.storage_offset() % per_word:
        tensor = tensor.clone()  # words begin with the first element, wherever that lies
    flat, row = tensor.view(-1), _LANES * per_word
    end = len(flat) // row * row
    if not end:
        return flat.view(_bits(tensor)).to(torch.int64)
    sums = flat[:end].view(torch.int64).view(-1, _LANES).sum(0)
    return sums if end == len(flat) else torch.cat([sums, flat[end:].view(_bits(tensor)).to(torch.int64)])


def _bits(tensor: Tensor) -> torch.dtype:
    return torch.int32 if tensor.itemsize == torch.int32.itemsize else torch.int16


def unchanged(then: Sequence[Tensor], now: Sequence[Tensor]) -> list[bool]:
    """Whether each fingerprint is as it was; waits for the device, once for all."""
    found = [False] * len(then)
    same = [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a.shape == b.shape and a.device == b.device]
    if same:
        equal = (torch.cat([then[i] for i in same]) == torch.cat([now[i] for i in same])).cpu()
        for i, part in zip(same, equal.split([len(then[i]) for i in same]), strict=True):
            found[i] = bool(part.all())
    return found


def still(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of each (fingerprint, tensor), whether the tensor still has that fingerprint; waits as `unchanged`."""
    return unchanged([bits for bits, _ in pairs], [fingerprint(tensor) for _, tensor in pairs])
