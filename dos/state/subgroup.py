"""Arenas cut into subgroups, and which pieces of parameters lie in each."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from dos.state.arena import Arena, State, aligned
from dos.state.record import ParameterRecord
from perfmodel import SubgroupLoad
from perfmodel.format import BYTES

_ROUNDED_FROM, _ROUNDING = 1 << 20, mmap.PAGESIZE // min(BYTES.values())
"""Parameters of a subgroup from which its size is rounded up, and to a multiple of how many.

So a subgroup begins on a page, and its host memory is made and pinned without its neighbours'. And
the part of a tensor that begins with it lies where a GPU loads 16 bytes at once. A tensor whose
length is no multiple of that still misaligns those behind it.
"""


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one parameter's elements within a subgroup.

    start, stop: within the subgroup. parameter_start: of the first element, within the parameter.
    """

    record: ParameterRecord
    start: int
    stop: int
    parameter_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def run(self) -> slice:
        """Its elements within the subgroup."""
        return slice(self.start, self.stop)

    def of_parameter(self, flat: Tensor) -> Tensor:
        """This piece of a tensor that is as long as the parameter."""
        return flat[self.parameter_start : self.parameter_start + self.numel]


@dataclass(frozen=True, eq=False)
class Subgroup:
    """A contiguous run of an arena, updated as one unit.

    start, stop: within the arena.
    batches: its updates by place, with the addresses to which each has followed; to be cleared when the memory of a
        parameter is another.
    newest: the pieces whose newest parameters are staged on the host. Of use where masters are split,
        which the host updates from there.
    """

    arena: Arena
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    batches: dict[tuple[str, int], tuple[Any, list[int]]] = field(default_factory=dict)
    newest: set[Piece] = field(default_factory=set)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def numbers(self) -> list[int]:
        """Of the records to which its pieces belong."""
        return [piece.record.number for piece in self.pieces]

    @cached_property
    def sharded(self) -> bool:
        """Whether any of its parameters is a DTensor."""
        return any(piece.record.sharded for piece in self.pieces)

    @property
    def state(self) -> State:
        """Views of the host state."""
        return self.arena.slice(self.start, self.stop)

    @property
    def gradient(self) -> Tensor:
        """The host staging of its gradients. Only where the parameters are on the accelerator."""
        return self.arena.gradient[self.start : self.stop]

    @property
    def parameter(self) -> Tensor | None:
        """The host staging of its new parameters; None where the master itself is sent."""
        return None if self.arena.parameter is None else self.arena.parameter[self.start : self.stop]

    @property
    def offloaded_gradient_bytes(self) -> int:
        """Bytes of a slot that takes its gradients as they are on the host."""
        return aligned(self.numel * self.arena.gradient.itemsize)

    @property
    def passing_bytes(self) -> int:
        """Bytes of a slot that takes these gradients, with the weights where those stream."""
        return self.offloaded_gradient_bytes + self.weight_bytes * self.arena.streams

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in a slot."""
        return aligned(self.numel * self.arena.dtype.itemsize)

    def load(self) -> SubgroupLoad:
        """Its bytes on every lane."""
        return SubgroupLoad.of(self.numel, self.arena.format, on_cpu=self.arena.rule.on_cpu)


def rounded(subgroup_size: int) -> int:
    """Parameters of a subgroup: a large size is rounded up a little."""
    return subgroup_size if subgroup_size < _ROUNDED_FROM else -(-subgroup_size // _ROUNDING) * _ROUNDING


def split(arena: Arena, records: Sequence[ParameterRecord], subgroup_size: int) -> list[Subgroup]:
    """The arena as subgroups of `subgroup_size` parameters, the last shorter: large tensors are split, small share.

    Where the rule updates parameters as a whole none is split: a subgroup is larger if its first parameter is.
    records: all of the arena, in order. subgroup_size: see `rounded`; where parameters share elements of the state,
        a multiple of as many.
    """
    block = arena.format.block
    size = -(-rounded(subgroup_size) // block) * block
    cuts = range(size, arena.numel + size, size)
    ends = list(_ends_of_whole(records, size)) if arena.rule.whole else [min(cut, arena.numel) for cut in cuts]
    pieces: list[list[Piece]] = [[] for _ in ends]
    number = start = 0  # of the subgroup, and where it begins
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


def _ends_of_whole(records: Iterable[ParameterRecord], size: int) -> Iterator[int]:
    """Where subgroups end that have whole parameters, `size` elements at most, or one parameter."""
    start = end = 0
    for record in records:
        if start < end and end + record.numel - start > size:
            yield end
            start = end
        end += record.numel
    if start < end:
        yield end
