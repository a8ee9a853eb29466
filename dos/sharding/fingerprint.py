"""Whether the bits of tensors changed, where no version counter tells: of DTensors and inference tensors.

Operations on lists of DTensors (`torch._foreach_mul_`, which gradient clipping is made of) change
values and count nowhere, with object and address as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

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


class Marked(Protocol):
    """The holder of a tensor's fingerprint, if one is needed, which is told whether the tensor was rewritten."""

    bits: Tensor | None
    rewritten: bool


def look_at_bits(marked: Iterable[tuple[Marked, Tensor]]) -> None:
    """Tell each whether its tensor was written to since its fingerprint was made.

    Waits once for each device, to read one flag; again only where something has changed.
    """
    alike: defaultdict[torch.device, list[tuple[Marked, Tensor, Tensor]]] = defaultdict(list)
    for each, tensor in marked:
        if each.bits is not None:
            now = fingerprint(tensor)
            if each.bits.device == now.device and each.bits.shape == now.shape:
                alike[now.device].append((each, each.bits, now))
            else:
                each.rewritten = True
    for found in alike.values():
        if not torch.equal(torch.cat([bits for _, bits, _ in found]), torch.cat([now for *_, now in found])):
            changed = torch.stack([(bits != now).any() for _, bits, now in found]).tolist()
            for (each, *_), is_other in zip(found, changed, strict=True):
                each.rewritten |= is_other
