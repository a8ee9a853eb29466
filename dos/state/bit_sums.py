"""Sums of the bits of a subgroup's parameters on their device, which show whether anything has written to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dos.kernels.gpu_update import SentTable, bits_kernel
from dos.kernels.native import NO_ANSWER, Answer
from dos.sharding.fingerprint import COLUMNS
from dos.state.subgroup import Piece
from dos.torch_internals.operators import copy_all, tensor_at

_WORD = torch.int64.itemsize


class _Part(NamedTuple):
    """A piece in memory. address: of the memory whose bits are summed. run: of the sums."""

    address: int
    run: slice


class _Way(Protocol):
    """A way to sum the bits of pieces."""

    def add(self, piece: Piece, address: int, first: int) -> int:
        """Add a piece, whose sums begin at `first`; return their number."""

    def write(self, pieces: Collection[Piece], sums: Tensor) -> None:
        """Queue the sums of the bits of these pieces, as they are."""

    def compare(self, pieces: Collection[Piece], sums: Tensor, differs: Tensor) -> None:
        """Queue a comparison of these sums with those of the bits as they are, with the answers in `differs`."""

    def kernel(self, pieces: Collection[Piece], answer: Answer = NO_ANSWER) -> Any | None:
        """Return the last one of these as a kernel, if it was for the same pieces; None: only by a call of it.

        answer: a copy of the answers to the host.
        """


@dataclass(eq=False, slots=True)
class Summing:
    """Work of a job on the bits of pieces; see `Behind`. answer: as for `compare`; None: they are remembered."""

    sums: BitSums
    pieces: Collection[Piece]
    answer: int | None

    def __call__(self) -> None:
        """Queue it in the current queue of the device."""
        if self.answer is None:
            self.sums.remember(self.pieces)
        else:
            self.sums.compare(self.pieces, self.answer)

    def kernel(self) -> Any | None:
        """Return it as a kernel, which will be launched; None: it must be called."""
        return self.sums.kernel(self.pieces, self.answer)


class BitSums:
    """The bits of one subgroup's parameters as they were, compared with them as they are, piece by piece.

    On a GPU by one kernel for all pieces; elsewhere as `fingerprint`, of each piece: the sums of its 64-bit words in
    columns, and the elements that fill no row. All of it allocates and queues work in the current queue of the device,
    and waits for nothing. `other` reads the answer of the last comparison, once that has ended.

    known: the pieces whose bits are remembered. compared: those compared since.
    """

    def __init__(self, pieces: Sequence[Piece], before: BitSums | None = None) -> None:
        """before: of the same pieces, of which some have other memory now; the others are known as they were."""
        flat = pieces[0].record.flat
        kernel = bits_kernel(flat.device)
        # A table for each of the two streams that send it.
        self._ways: list[_Way] = [_ByTorch(flat) if kernel is None else _ByKernel(flat, kernel) for _ in range(2)]
        self._parts: dict[Piece, _Part] = {}
        first = 0
        for piece in pieces:
            address = _address(piece)
            count, _ = (way.add(piece, address, first) for way in self._ways)
            self._parts[piece] = _Part(address, slice(first, first + count))
            first += count
        self._records = [piece.record for piece in pieces]
        self._addresses = [record.flat.data_ptr() for record in self._records]
        self._sums = torch.zeros(first, dtype=torch.int64, device=flat.device)
        self._differs = torch.zeros(first, dtype=torch.bool, device=flat.device)
        self.known = set[Piece]() if before is None else set(before.comparable(pieces))
        self.compared: set[Piece] = set()
        self._answers: dict[int, tuple[Tensor, NDArray[np.bool_], bool]] = {}
        """Where each is on the host, and whether that is pinned."""
        if before is not None:
            self._before = before._sums  # held: another queue may have allocated them, this one reads
            for piece in self.known:
                self._sums[self._parts[piece].run] = before._sums[before._parts[piece].run]

    @property
    def current(self) -> bool:
        """Whether all parameters have the memory for which this was made."""
        return [*map(Tensor.data_ptr, [record.flat for record in self._records])] == self._addresses

    def comparable(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return those of the pieces that are known and have the memory for which this was made."""
        whole = len(self.known) == len(self._parts)
        known = [*pieces] if whole else [piece for piece in pieces if piece in self.known]
        moved = () if self.current else self._moved(known)
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
        self._ways[0].write(pieces, self._sums)
        self._note(pieces)

    def _note(self, pieces: Iterable[Piece]) -> None:
        """Note that the bits of these pieces are remembered."""
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
        self._ways[1].compare(pieces, self._sums, self._differs)
        if answer not in self._answers:
            there = _on_host(len(self._differs), pinned=self._differs.device.type != "cpu")
            self._answers[answer] = there, there.numpy(), there.is_pinned()
        self._answers[answer][0].copy_(self._differs, non_blocking=True)

    def kernel(self, pieces: Collection[Piece], answer: int | None) -> Any | None:
        """Return `remember`, if there is no answer, or `compare` as a kernel, which will be launched; see `Summing`."""
        if answer is not None:
            there = self._answers.get(answer)
            if there is None or not there[2]:
                return None
            copied = there[0].data_ptr(), self._differs.data_ptr(), len(there[1])
            return self._ways[1].kernel(pieces, copied)
        found = self._ways[0].kernel(pieces)
        if found is not None:
            self._note(pieces)
        return found

    def other(self, pieces: Iterable[Piece], answer: int) -> set[Piece]:
        """Return those of the pieces whose bits the comparison has found to be others."""
        _, differs, _ = self._answers[answer]  # by numpy, because torch would give up the interpreter's lock to read it
        return {piece for piece in pieces if differs[self._parts[piece].run].any()} if differs.any() else set()


def _on_host(count: int, *, pinned: bool) -> Tensor:
    """Return a place on the host for an answer."""
    if pinned:
        with suppress(RuntimeError):  # nothing more can be pinned; the copy waits for its stream then
            return torch.zeros(count, dtype=torch.bool, device="cpu", pin_memory=True)
    return torch.zeros(count, dtype=torch.bool, device="cpu")


def _address(piece: Piece) -> int:
    flat = piece.record.flat
    return flat.data_ptr() + piece.parameter_start * flat.itemsize


class _ByKernel:
    """One launch for all pieces; see `dos.kernels.triton_bits.sum_bits`."""

    def __init__(self, flat: Tensor, kernel: Any) -> None:
        self._device, self._itemsize, self._kernel = flat.device, flat.itemsize, kernel
        self._table = SentTable(flat.device)
        self._rows: dict[Piece, tuple[int, int, int, int]] = {}
        self._last: tuple[Collection[Piece], NDArray[np.int64]] = frozenset(), np.empty((0, 4), dtype=np.int64)
        self._launched: Any = None
        """How native code can launch what was launched last."""
        self._kernels: dict[Answer, Any] = {}

    def add(self, piece: Piece, address: int, first: int) -> int:
        self._rows[piece] = address, piece.numel, first, 0
        return self._kernel.sums_of(piece.numel)

    def write(self, pieces: Collection[Piece], sums: Tensor) -> None:
        self._launch(pieces, sums)

    def compare(self, pieces: Collection[Piece], sums: Tensor, differs: Tensor) -> None:
        self._launch(pieces, sums, differs)

    def _launch(self, pieces: Collection[Piece], sums: Tensor, differs: Tensor | None = None) -> None:
        known, rows = self._last
        these = frozenset(pieces)  # gradients leave in another order than that in which the step compares
        if these != known:
            rows = np.array([self._rows[piece] for piece in pieces if piece.numel], dtype=np.int64)
            self._last = these, rows
        self._launched, self._kernels = None, {}
        if len(rows):
            self._launched = self._kernel.sum_bits(rows, self._table.send, sums, self._itemsize, differs)

    def kernel(self, pieces: Collection[Piece], answer: Answer = NO_ANSWER) -> Any | None:
        if self._launched is None or frozenset(pieces) != self._last[0]:
            return None
        if answer not in self._kernels:
            self._kernels[answer] = self._launched.kernel(answer)
        return self._kernels[answer]


class _ByTorch:
    """A reduction for each piece, and a copy of all elements around them."""

    def __init__(self, flat: Tensor) -> None:
        self._device = flat.device
        self._bits = torch.int32 if flat.itemsize == torch.int32.itemsize else torch.int16
        self._parts: dict[Piece, tuple[int, Tensor | None, list[Tensor]]] = {}
        self._places: dict[Piece, tuple[Tensor | None, list[Tensor]]] = {}
        self._now: Tensor | None = None
        """The sums as they are, where they are compared."""

    def add(self, piece: Piece, address: int, first: int) -> int:
        words, others = _cut(address, piece.numel, self._bits, self._device)
        self._parts[piece] = first, words, others
        return COLUMNS * (words is not None) + sum(map(len, others))

    def write(self, pieces: Collection[Piece], sums: Tensor) -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for piece in pieces:
            _, words, others = self._parts[piece]
            row, rests = self._place(piece, sums)
            if words is not None:
                torch.sum(words, 0, keepdim=True, out=row)
            targets += rests
            sources += others
        if targets:
            copy_all(targets, sources)

    def compare(self, pieces: Collection[Piece], sums: Tensor, differs: Tensor) -> None:
        if self._now is None:
            self._now = torch.zeros_like(sums)
        self.write(pieces, self._now)
        torch.ne(sums, self._now, out=differs)

    def kernel(self, pieces: Collection[Piece], answer: Answer = NO_ANSWER) -> None:
        return None

    def _place(self, piece: Piece, sums: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Return where the sums of a piece and the elements around them are. Made once: views take microseconds."""
        found = self._places.get(piece)
        if found is None:
            first, words, others = self._parts[piece]
            at = first + COLUMNS * (words is not None)
            rests = sums[at : at + sum(map(len, others))].split([len(each) for each in others]) if others else ()
            found = None if words is None else sums[first:at].view(1, COLUMNS), [*rests]
            self._places[piece] = found
        return found


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
