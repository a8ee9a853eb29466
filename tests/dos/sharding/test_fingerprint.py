"""Fingerprints of tensors differ when their bits do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dos.sharding.fingerprint import fingerprint, look_at_bits


@dataclass
class Mark:
    bits: Tensor | None
    rewritten: bool = False


def rewritten(*marked: tuple[Tensor, Tensor]) -> list[bool]:
    """Of each (fingerprint, tensor)."""
    marks = [Mark(bits) for bits, _ in marked]
    look_at_bits(zip(marks, (tensor for _, tensor in marked), strict=True))
    return [mark.rewritten for mark in marks]


CHANGES = {
    "halved": lambda t: t.mul_(0.5),
    "negated": lambda t: t.neg_(),
    "zeroed": lambda t: t.zero_(),
    "one of them": lambda t: t[len(t) // 2 :][:1].add_(1),
    "the last one": lambda t: t[-1:].neg_(),
    "clipped a little": lambda t: t.mul_(0.99),
}


def tensor(numel: int, offset: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel + offset, generator=generator).to(dtype)[offset:]


@given(
    numel=st.integers(1, 3000),
    offset=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
    change=st.sampled_from(sorted(CHANGES)),
)
def test_a_fingerprint_differs_when_bits_do(
    numel: int, offset: int, dtype: torch.dtype, seed: int, change: str
) -> None:
    values = tensor(numel, offset, dtype, seed)
    before, bits = fingerprint(values), values.clone()
    assert rewritten((before, values), (before, bits)) == [False, False], "where it lies does not matter"
    CHANGES[change](values)
    assert rewritten((before, values))[0] != torch.equal(bits.view(torch.uint8), values.view(torch.uint8))


def test_several_are_told_apart() -> None:
    tensors = [
        tensor(n, o, d, 0) for n, o, d in ((5, 1, torch.bfloat16), (640, 0, torch.float32), (0, 0, torch.float32))
    ]
    before = [fingerprint(t) for t in tensors]
    tensors[1][3] = 7.0
    assert rewritten(*zip(before, tensors, strict=True)) == [False, True, False]
    assert rewritten((before[0], torch.zeros(99))) == [True]
    assert rewritten() == []


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: torch.complex(t, -t).conj().imag])
def test_any_layout(view) -> None:
    values = view(torch.randn(40, 30))
    before = fingerprint(values)
    assert rewritten((before, values), (before, values * 2)) == [False, True]


@pytest.mark.parametrize("width", [1, 2, 64, 128, 1024])
def test_rows_that_change_places_are_seen(width: int) -> None:
    values = torch.randn(4096 // width * 4, width)
    assert rewritten((fingerprint(values), values.flip(0))) == [True]
