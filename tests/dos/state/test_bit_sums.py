"""Sums of bits that native code launches again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dos.kernels.native import Entry, Launched
from dos.state import bit_sums
from dos.state.bit_sums import BitSums, Summing


class FakePiece:
    """As much of a piece as sums of bits ask for."""

    def __init__(self) -> None:
        self.record, self.parameter_start, self.numel = SimpleNamespace(flat=torch.zeros(8)), 0, 8


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two; each launch for them can be repeated."""
    launched = Launched(Entry(1, 128, 0), 1, (), ())
    kernel = SimpleNamespace(sums_of=lambda numel: 1, sum_bits=lambda *_: launched)
    monkeypatch.setattr(bit_sums, "bits_kernel", lambda device: kernel)
    return [FakePiece(), FakePiece()]


def test_a_launch_is_repeated_for_the_same_pieces_alone(pieces: list[Any]) -> None:
    sums = BitSums(pieces)
    remember = Summing(sums, pieces, None)
    assert remember.kernel() is None, "nothing was launched"
    remember()
    first = remember.kernel()
    assert first is not None
    assert Summing(sums, pieces[::-1], None).kernel() is first
    assert Summing(sums, pieces[:1], None).kernel() is None
    Summing(sums, pieces[:1], None)()
    assert Summing(sums, pieces[:1], None).kernel() is not None
    assert remember.kernel() is None


def test_bits_that_a_kernel_remembers_are_known_and_not_compared(pieces: list[Any]) -> None:
    sums = BitSums(pieces)
    remember = Summing(sums, pieces, None)
    remember()
    sums.forget(pieces[:1])
    sums.compared.update(pieces[1:])
    assert remember.kernel() is not None
    assert (sums.known, sums.compared) == ({*pieces}, set())


def test_without_pinned_memory_for_the_answer_torch_compares(pieces: list[Any]) -> None:
    sums = BitSums(pieces)
    compare = Summing(sums, pieces, 0)
    for _ in range(2):
        assert compare.kernel() is None
        compare()
