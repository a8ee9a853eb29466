"""Arenas cut into subgroups, and the pieces of parameters in each."""

from __future__ import annotations

import itertools
import mmap
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dos.devices.coalesce import Kept, Lending, Lent
from dos.state.arena import Arena, State, aligned
from dos.state.record import ParameterRecord
from dos.torch_internals.operators import tensor_at
from perfmodel import SubgroupLoad
from perfmodel.format import BYTES

_ROUNDED_FROM, _ROUNDING = 1 << 20, mmap.PAGESIZE // min(BYTES.values())
"""The least size of a subgroup that is rounded up, and the number of which it is then a multiple, both in parameters.

A rounded subgroup begins on a page, so that its host memory is allocated and pinned without its neighbours', and the
part of a tensor at its start is aligned for GPU loads of 16 bytes. A tensor whose length is no multiple of 16 bytes
still misaligns the tensors behind it.
"""

MOST_SLOTS = 8
"""In which a subgroup's state is remembered."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one parameter's elements within a subgroup.

    start, stop: within the subgroup. parameter_start: of the first element, within the parameter.
    """

    record: ParameterRecord
    start: int
    stop: int
    parameter_start: int

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def run(self) -> slice:
        """The slice of its elements within the subgroup."""
        return slice(self.start, self.stop)

    @cached_property
    def of_record(self) -> slice:
        """The slice of its elements within the parameter."""
        return slice(self.parameter_start, self.parameter_start + self.numel)

    def of_parameter(self, flat: Tensor) -> Tensor:
        """Return this piece of a tensor that is as long as the parameter."""
        return flat[self.of_record]


@dataclass(frozen=True, eq=False)
class Subgroup:
    """A contiguous run of an arena, updated as one unit.

    start, stop: within the arena.
    batches: batches of its updates by placement, with the addresses to which each has followed. uploads: the copies of
        all new parameters from the staging to the device, once they were made. Both are cleared when the memory of a
        parameter is replaced.
    staged: the staging of all gradients, and of each piece's, by piece. lending: the last gradients' way there.
    slots: its state in slots, by their addresses.
    newest: the pieces whose newest parameters are staged on the host, where the host updates them as masters, or halves
        of masters.
    """

    arena: Arena
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    batches: dict[tuple[str, int], tuple[Any, list[int]]] = field(default_factory=dict)
    newest: set[Piece] = field(default_factory=set)
    uploads: Kept = field(default_factory=Kept)
    staged: dict[Piece, tuple[Tensor, Tensor]] = field(default_factory=dict)
    lending: list[tuple[Tensor, Lending]] = field(default_factory=list)
    slots: dict[int, State] = field(default_factory=dict)

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start

    def forget_memory(self) -> None:
        """Forget what refers to the memory of its parameters, because that was replaced."""
        self.batches.clear()
        self.uploads.forget()

    @cached_property
    def inputs_of(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Takes what each of its pieces has in a list by the numbers of records."""
        return taking([piece.record.number for piece in self.pieces])

    @cached_property
    def sharded(self) -> bool:
        """Whether any of its parameters is a DTensor."""
        return any(piece.record.sharded for piece in self.pieces)

    @cached_property
    def state(self) -> State:
        """Views of the host state."""
        return self.arena.slice(self.start, self.stop)

    @property
    def gradient(self) -> Tensor:
        """The host staging of its gradients. Only where the parameters are on the accelerator."""
        return self.arena.incoming.tensor[self.start : self.stop]

    def in_slot(self, slot: Tensor) -> State:
        """Return its state in a slot, which must be kept. Remembered, as slots mostly have the same addresses."""
        address = slot.data_ptr()
        found = self.slots.get(address)
        if found is None:
            if len(self.slots) == MOST_SLOTS:
                self.slots.clear()
            # Of no memory: a view would keep that of the slot.
            alias = tensor_at(address, self.state.carved_bytes, torch.uint8, slot.device)
            found = self.slots[address] = self.state.carve(alias)
        return found

    def staged_gradient(self, piece: Piece) -> Tensor:
        """Return the host staging of the gradient of one of its pieces. Remembered, as each step needs the same views.

        A view lets go of Python's lock, for which other threads wait.
        """
        whole = self.arena.incoming.tensor
        known = self.staged.get(piece)
        if known is None or known[0] is not whole:  # a wider one may have replaced it
            known = whole, whole[self.start + piece.start : self.start + piece.stop]
            self.staged[piece] = known
        return known[1]

    def lend(self, gradients: Sequence[Tensor]) -> Lent | None:
        """Return the copies of all gradients to their staging; None if any needs a look.

        gradients: in the order of the pieces.
        """
        staging = self.arena.incoming.tensor
        known = self.lending[0] if self.lending else None
        found = known[1].lend(gradients) if known is not None and known[0] is staging else None
        if found is not None or not all(map(_in_order, self.pieces, gradients)):
            return found
        runs = [None if p.numel == p.record.numel else p.of_record for p in self.pieces]
        made = Lending([*map(self.staged_gradient, self.pieces)], gradients, runs)
        self.lending[:] = [(staging, made)]
        return made.lend(gradients)

    @property
    def parameter(self) -> Tensor | None:
        """The host staging of its new parameters; None where the host updates none."""
        outgoing = self.arena.outgoing
        return None if outgoing is None else outgoing.tensor[self.start : self.stop]

    @property
    def offloaded_gradient_bytes(self) -> int:
        """Bytes of a slot for its gradients as they are on the host."""
        return aligned(self.numel * self.arena.incoming.tensor.itemsize)

    @property
    def passing_bytes(self) -> int:
        """Bytes of a slot for these gradients, and for the weights where they stream."""
        return self.offloaded_gradient_bytes + self.weight_bytes * self.arena.streams

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in a slot."""
        return aligned(self.numel * self.arena.dtype.itemsize)

    def load(self) -> SubgroupLoad:
        """Return its bytes on every lane."""
        return SubgroupLoad.of(self.numel, self.arena.format)


def _in_order(piece: Piece, gradient: Tensor) -> bool:
    """Return whether a gradient is in the order of its record's memory as it is."""
    record = piece.record
    return record.numel == gradient.numel() and record.layout is None and not record.wrapped


def taking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes the values at these places, at least one, of a list."""
    first, *others = places
    return operator.itemgetter(first, *others) if others else lambda values: (values[first],)


def rounded(subgroup_size: int) -> int:
    """Return the size of a subgroup in parameters: a large size is rounded up a little."""
    return subgroup_size if subgroup_size < _ROUNDED_FROM else -(-subgroup_size // _ROUNDING) * _ROUNDING


def split(arena: Arena, records: Sequence[ParameterRecord], subgroup_size: int) -> list[Subgroup]:
    """Cut the arena into subgroups of `subgroup_size` parameters; the last one may be shorter.

    Large tensors are divided, small ones share a subgroup.
    records: all records of the arena, in order. subgroup_size: see `rounded`; it is rounded up to a multiple of the
        format's block.
    """
    block = arena.format.block
    size = -(-rounded(subgroup_size) // block) * block
    ends = [min(cut, arena.numel) for cut in range(size, arena.numel + size, size)]
    pieces: list[list[Piece]] = [[] for _ in ends]
    number = start = 0  # the subgroup's number, and its begin
    for record in records:
        first, end = record.offset, record.offset + record.numel
        while first < end:
            last = min(end, ends[number])
            pieces[number].append(Piece(record, first - start, last - start, first - record.offset))
            first = last
            if last == ends[number]:
                number, start = number + 1, last
    return [
        Subgroup(arena, start, stop, tuple(mine))
        for (start, stop), mine in zip(itertools.pairwise((0, *ends)), pieces, strict=True)
    ]
