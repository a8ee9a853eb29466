"""Sums of the bits of a subgroup's parameters on their device, which show whether anything has written to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from dos.sharding.fingerprint import COLUMNS
from dos.state.subgroup import Piece
from dos.torch_internals.operators import copy_all, tensor_at

_WORD = torch.int64.itemsize


class _Part(NamedTuple):
    """The bits of one piece.

    address: of the memory of which they are. words: whole rows of 64-bit words, None if there is none; row: of their
    sums. others: the elements around these; run: of their bits.
    """

    address: int
    words: Tensor | None
    row: int
    others: list[Tensor]
    run: slice


class BitSums:
    """The bits of one subgroup's parameters as they were, compared with them as they are, piece by piece.

    As `fingerprint`, of each piece: the sums of its 64-bit words in columns, and the elements that fill no row.
    All of it allocates and queues work in the current queue of the device, and waits for nothing: a reduction for each
    piece and one to four operations for all. `other` reads the answer of the last comparison, once that has ended.

    known: the pieces whose bits are remembered. compared: those compared since.
    """

    def __init__(self, pieces: Sequence[Piece], before: BitSums | None = None) -> None:
        """before: of the same pieces, of which some have other memory now; the others are known as they were."""
        flat = pieces[0].record.flat
        bits = torch.int32 if flat.dtype.itemsize == torch.int32.itemsize else torch.int16
        self._parts: dict[Piece, _Part] = {}
        rows = rests = 0
        for piece in pieces:
            address = _address(piece)
            words, others = _cut(address, piece.numel, bits, flat.device)
            run = slice(rests, rests + sum(map(len, others)))
            self._parts[piece] = _Part(address, words, rows, others, run)
            rows, rests = rows + (words is not None), run.stop
        # Twice: as they were, and as they are.
        self._sums = torch.zeros(2, rows, COLUMNS, dtype=torch.int64, device=flat.device)
        self._rests = torch.zeros(2, rests, dtype=bits, device=flat.device)
        found = list(self._parts.items())
        lengths = [len(each) for _, part in found for each in part.others]
        splits = [iter(place.split(lengths) if lengths else ()) for place in self._rests]
        # Made once, because views cost microseconds each.
        self._places = [
            {p: (sums[part.row : part.row + 1], [next(split) for _ in part.others]) for p, part in found}
            for sums, split in zip(self._sums, splits, strict=True)
        ]
        self._differs = torch.empty(rows * COLUMNS + rests, dtype=torch.bool, device=flat.device)
        self.known = set[Piece]() if before is None else set(before.comparable(pieces))
        self.compared: set[Piece] = set()
        self._answers: dict[int, Tensor] = {}
        if before is not None:
            self._before = before._sums, before._rests  # held: another queue may have allocated them, this one reads
            for piece in self.known:
                part, was = self._parts[piece], before._parts[piece]
                self._rests[0, part.run] = before._rests[0, was.run]
                if part.words is not None:
                    self._sums[0, part.row] = before._sums[0, was.row]

    @property
    def current(self) -> bool:
        """Whether all parameters have the memory for which this was made."""
        return not self._moved(self._parts)

    def comparable(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return those of the pieces that are known and have the memory for which this was made."""
        known = [piece for piece in pieces if piece in self.known]
        moved = self._moved(known)
        return [piece for piece in known if piece not in moved] if moved else known

    def _moved(self, pieces: Iterable[Piece]) -> set[Piece]:
        """Return those of the pieces that have other memory than that for which this was made."""
        flats = [(piece, piece.record.flat) for piece in pieces]
        return {
            piece
            for piece, flat in flats
            if self._parts[piece].address != flat.data_ptr() + piece.parameter_start * flat.itemsize
        }

    def remember(self, pieces: Collection[Piece]) -> None:
        """Remember the bits of these pieces."""
        self._write(0, pieces)
        self.known.update(pieces)
        self.compared.clear()

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Forget the bits of these pieces, which are updated without `remember`."""
        self.known.difference_update(pieces)
        self.compared.difference_update(pieces)

    def compare(self, pieces: Collection[Piece], answer: int) -> None:
        """Compare the bits of these pieces with those remembered; see `other`.

        answer: a number for each answer that must last while others are given.
        """
        self._write(1, pieces)
        sums = self._sums[0].numel()
        torch.ne(self._sums[0].view(-1), self._sums[1].view(-1), out=self._differs[:sums])
        torch.ne(*self._rests, out=self._differs[sums:])
        if answer not in self._answers:
            self._answers[answer] = _on_host(len(self._differs), pinned=self._differs.device.type != "cpu")
        self._answers[answer].copy_(self._differs, non_blocking=True)

    def _write(self, place: int, pieces: Iterable[Piece]) -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for piece in pieces:
            part, (row, rests) = self._parts[piece], self._places[place][piece]
            if part.words is not None:
                torch.sum(part.words, 0, keepdim=True, out=row)
            targets += rests
            sources += part.others
        if targets:
            copy_all(targets, sources)

    def other(self, pieces: Iterable[Piece], answer: int) -> set[Piece]:
        """Return those of the pieces whose bits the comparison has found to be others."""
        differs = self._answers[answer]
        if not differs.any():  # as in most steps
            return set()
        sums, rests = differs[: self._sums[0].numel()].view(-1, COLUMNS), differs[self._sums[0].numel() :]
        parts = ((piece, self._parts[piece]) for piece in pieces)
        return {
            p for p, (_, words, row, _, run) in parts if rests[run].any() or (words is not None and sums[row].any())
        }


def _on_host(count: int, *, pinned: bool) -> Tensor:
    """Return a place on the host for an answer."""
    if pinned:
        with suppress(RuntimeError):  # nothing more can be pinned; the copy waits for its stream then
            return torch.zeros(count, dtype=torch.bool, device="cpu", pin_memory=True)
    return torch.zeros(count, dtype=torch.bool, device="cpu")


def _address(piece: Piece) -> int:
    flat = piece.record.flat
    return flat.data_ptr() + piece.parameter_start * flat.itemsize


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
