"""Detects writes to tensors by their bits, where no version counter does: DTensors and inference tensors.

Operations on lists of DTensors (`torch._foreach_mul_`, which gradient clipping uses) change values without raising a
version counter, and keep object and address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

COLUMNS = 509
"""A prime, so that exchanged rows of a matrix change a sum: no row's length is a multiple of it."""
_WORD = torch.int64.itemsize


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 1-D int64 tensor on the tensor's device, equal for equal bits in the same order; without waiting.

    It consists of the sums of the tensor's 64-bit words in 509 columns, and of the elements that fill no row. An
    operation that multiplies, negates, zeroes or replaces all elements, or one, changes at least one sum.
    """
    tensor = tensor.detach()
    per_word = _WORD // tensor.itemsize
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    elif tensor.storage_offset() % per_word:
        tensor = tensor.clone()  # so that the first word begins with the first element
    flat, row = tensor.view(-1), COLUMNS * per_word
    numel = flat.numel()  # `len` makes four calls
    end = numel // row * row
    bits = torch.int32 if tensor.itemsize == torch.int32.itemsize else torch.int16
    if not end:
        return flat.view(bits).to(torch.int64)
    sums = flat[:end].view(torch.int64).view(-1, COLUMNS).sum(0)
    return sums if end == numel else torch.cat([sums, flat[end:].view(bits).to(torch.int64)])


class Marked(Protocol):
    """The owner of a tensor's fingerprint, if one is needed. rewritten: set if the tensor was written to."""

    bits: Tensor | None
    rewritten: bool


def look_at_bits(marked: Iterable[tuple[Marked, Tensor]]) -> None:
    """Set `rewritten` of each whose tensor was written to since its fingerprint was made.

    Waits once for each device, to read one flag, and again only where a tensor has changed.
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
        owners, before, after = zip(*found, strict=True)
        if not torch.equal(torch.cat(before), torch.cat(after)):
            changed = torch.stack([(bits != now).any() for _, bits, now in found]).tolist()
            for each, is_other in zip(owners, changed, strict=True):
                each.rewritten |= is_other
