"""Sums of the bits of a subgroup's parameters on their device, which show whether anything has written to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from dos.sharding.fingerprint import COLUMNS
from dos.state.subgroup import Piece
from dos.torch_internals.operators import copy_all, tensor_at

_WORD = torch.int64.itemsize


class BitSums:
    """The bits of one subgroup's parameters as they were, compared with them as they are, piece by piece.

    As `fingerprint`, of each piece: the sums of its 64-bit words in columns, and the elements that fill no row.
    `remember` and `compare` queue work, in the current queue of the device, and wait for nothing: a reduction for each
    piece and one to four operations for all. `other` reads the answer of the last comparison, once that has ended.

    known: the pieces whose bits are remembered. compared: those compared since.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._addresses = _addresses(pieces)
        device, dtype = pieces[0].record.flat.device, pieces[0].record.flat.dtype
        bits = torch.int32 if dtype.itemsize == torch.int32.itemsize else torch.int16
        words, self._others = list[tuple[Piece, Tensor]](), list[tuple[Piece, list[Tensor]]]()
        for piece, address in zip(pieces, self._addresses, strict=True):
            found, others = _cut(address, piece.numel, bits, device)
            self._others.append((piece, others))
            if found is not None:
                words.append((piece, found))
        self._words = words
        lengths = [len(each) for _, found in self._others for each in found]
        # Twice: as they were, and as they are.
        self._sums = torch.zeros(2, len(words), COLUMNS, dtype=torch.int64, device=device)
        self._rests = torch.zeros(2, sum(lengths), dtype=bits, device=device)
        self._split_rests = [list(rests.split(lengths)) if lengths else [] for rests in self._rests]
        self._differs = torch.empty(self._sums[0].numel() + sum(lengths), dtype=torch.bool, device=device)
        self.known: set[Piece] = set()
        self.compared: set[Piece] = set()
        self._ever: Tensor | None = None
        self._answers: dict[int, Tensor] = {}

    @property
    def current(self) -> bool:
        """Whether the parameters have the memory for which this was made."""
        return self._addresses == _addresses(self._pieces)

    def remember(self, pieces: Collection[Piece]) -> None:
        """Remember the bits of these pieces."""
        self._write(0, pieces)

    def compare(self, pieces: Collection[Piece], answer: int, *, ever: bool = False) -> None:
        """Compare the bits of these pieces with those remembered; see `other`.

        answer: a number for each answer that must last while others are given. ever: whether the answer keeps what
        earlier ones have found.
        """
        self._write(1, pieces)
        sums = self._sums[0].numel()
        torch.ne(self._sums[0].view(-1), self._sums[1].view(-1), out=self._differs[:sums])
        torch.ne(*self._rests, out=self._differs[sums:])
        differs = self._differs
        if ever:
            differs = self._ever = differs.clone() if self._ever is None else self._ever.logical_or_(differs)
        if answer not in self._answers:
            pinned = differs.device.type != "cpu"
            self._answers[answer] = torch.zeros(len(differs), dtype=torch.bool, device="cpu", pin_memory=pinned)
        self._answers[answer].copy_(differs, non_blocking=True)

    def _write(self, place: int, pieces: Collection[Piece]) -> None:
        chosen = set(pieces)
        for number, (piece, words) in enumerate(self._words):
            if piece in chosen:
                torch.sum(words, 0, out=self._sums[place, number])
        targets, sources = list[Tensor](), list[Tensor]()
        rests = iter(self._split_rests[place])
        for piece, found in self._others:
            for each in found:
                rest = next(rests)
                if piece in chosen:
                    targets.append(rest)
                    sources.append(each)
        if targets:
            copy_all(targets, sources)

    def other(self, pieces: Iterable[Piece], answer: int) -> set[Piece]:
        """Return those of the pieces whose bits the comparison has found to be others."""
        differs = self._answers[answer]
        if not differs.any():  # as in most steps
            return set()
        sums = differs[: self._sums[0].numel()].view(-1, COLUMNS)
        found = {piece for (piece, _), row in zip(self._words, sums, strict=True) if row.any()}
        start = sums.numel()
        for piece, others in self._others:
            end = start + sum(map(len, others))
            if differs[start:end].any():
                found.add(piece)
            start = end
        return found.intersection(pieces)


def _addresses(pieces: Iterable[Piece]) -> list[int]:
    return [p.record.flat.data_ptr() + p.parameter_start * p.record.flat.itemsize for p in pieces]


def _cut(address: int, numel: int, bits: torch.dtype, device: torch.device) -> tuple[Tensor | None, list[Tensor]]:
    """Return whole rows of 64-bit words in a run of elements, None if there is none, and the elements around them."""
    per_word = _WORD // bits.itemsize
    # A GPU reads words at multiples of their size alone, where a parameter need not begin.
    head = -address % _WORD // bits.itemsize
    rows = max(0, numel - head) // (COLUMNS * per_word)

    def part(start: int, stop: int) -> Tensor:
        return tensor_at(address + start * bits.itemsize, stop - start, bits, device)

    if not rows:
        return None, [part(0, numel)]
    tail = head + rows * COLUMNS * per_word
    words = tensor_at(address + head * bits.itemsize, rows * COLUMNS, torch.int64, device).view(rows, COLUMNS)
    return words, [part(*run) for run in ((0, head), (tail, numel)) if run[0] < run[1]]
