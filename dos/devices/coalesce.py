"""Copies of many small pieces as one copy of their neighbourhood on the host, gathered or scattered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.pinned import pinned_parts, without_borders
from dos.torch_internals.operators import copy_all, queue_copies
from perfmodel.lanes import PIECE_BYTES

SMALL_BYTES = 1 << 17
"""Pieces below this size share a copy: a link moves about as much while the host issues one copy."""
FEW = 4
"""As many small neighbours go apart: memory to join them in, and to gather or scatter them, would take the host longer
than their copies."""
RUN_BYTES = 1 << 24
"""The most bytes that a shared copy moves, and needs on the device meanwhile."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Return the copies, joined where they are neighbours on both sides, as gradients of an FSDP group are."""

    def follows(copy: Copy, run: Sequence[Copy]) -> bool:
        return all(_follows(*sides) for sides in zip(copy, run[-1], strict=True))

    copies = list(copies)
    if len(copies) == 1 or len({source.untyped_storage().data_ptr() for _, source in copies}) == len(copies):
        return copies  # as where each gradient has memory of its own
    runs = _grouped(copies, 0, follows)
    return [(_whole(run, 0), _whole(run, 1)) if len(run) > 1 else run[0] for run in runs]


Turn = Callable[[int], Callable[[], object] | None]
"""Called before each piece of PIECE_BYTES at most, with its bytes; returns what must be queued before it, or None."""


def copy_runs(runs: Sequence[Sequence[Copy]], *, to_host: bool, before: Turn = lambda nbytes: None) -> None:
    """Queue all copies on the current stream. Many small pieces that are neighbours on the host are copied together.

    runs: as `runs` finds them, in the order of addresses on the host. before: see `Turn`.
    """
    if not runs:
        return
    host = 0 if to_host else 1
    whole = without_borders(runs[0][0][host], runs[-1][-1][host])
    across = _Across(host, before, whole=whole)
    for run in runs:
        if len(run) <= FEW or not _copy_together(run, host, across):
            for each in run:
                across.add(each)
    across.flush()


class Kept(list[Copy]):
    """Copies between the same memory, step after step, whose runs are found once."""

    runs: list[list[Copy]] | None = None
    recorded = False
    """Whether the allocator knows of the stream that uses this memory. It forgets that only when the memory is freed,
    which these copies prevent."""

    def forget(self) -> None:
        """Let there be none, until others are added."""
        self.clear()
        self.runs, self.recorded = None, False


class Lent(list[Copy]):
    """Copies of gradients that `p.grad` keeps until the step: rarely are they released before these have ended."""


def runs(copies: Iterable[Copy], *, host: int) -> list[list[Copy]]:
    """Return the copies in groups of small ones that are neighbours on the host.

    host: which of destination (0) and source (1) is on the host.
    """
    if not isinstance(copies, Kept):
        return _runs(copies, host)
    if copies.runs is None:
        copies.runs = _runs(copies, host)
    return copies.runs


def _runs(copies: Iterable[Copy], host: int) -> list[list[Copy]]:
    # In one loop, because hooks on gradients wait for it. Sorted, because neighbours may be given in any order.
    found = list[list[Copy]]()
    first = end = -1
    for address, _, copy in sorted([(copy[host].data_ptr(), n, copy) for n, copy in enumerate(copies)]):
        side = copy[host]
        nbytes = side.nbytes
        small = nbytes < SMALL_BYTES
        joins = small and address == end and address + nbytes - first <= RUN_BYTES
        if joins and _follows(side, found[-1][-1][host]):
            found[-1].append(copy)
        else:
            found.append([copy])
            first = address
        end = address + nbytes if small else -1  # nothing joins a large copy
    return found


def _grouped(copies: Iterable[Copy], side: int, follows: Callable[[Copy, Sequence[Copy]], bool]) -> list[list[Copy]]:
    """Return the copies sorted by address on one side, in a new list wherever one does not follow the list so far."""
    # Sorted, because neighbours on one side may be given in any order.
    found: list[list[Copy]] = []
    for copy in sorted(copies, key=lambda copy: copy[side].data_ptr()):
        if found and follows(copy, found[-1]):
            found[-1].append(copy)
        else:
            found.append([copy])
    return found


def _whole(run: Sequence[Copy], side: int) -> Tensor:
    """Return one tensor for one side of copies that are neighbours there."""
    return run[0][side].as_strided((sum([copy[side].numel() for copy in run]),), (1,))


def _copy_together(run: Sequence[Copy], host: int, across: _Across) -> bool:
    """Queue the run as one transfer; return False if the device has no memory to stage it."""
    device = 1 - host
    whole = _whole(run, host)
    try:
        staged = torch.empty_like(whole, device=run[0][device].device)
    except torch.OutOfMemoryError:
        return False
    # Released here while queued work still uses it: safe, because it was allocated on the current stream, and the
    # allocator gives it only to later work of that stream.
    parts = list(staged.split([copy[host].numel() for copy in run]))
    if host == 0:
        copy_all(parts, [copy[device] for copy in run])
        across.add((whole, staged))
    else:
        across.add((staged, whole))
        across.flush()
        copy_all([copy[device] for copy in run], parts)
    return True


class _Across:
    """Copies between host and device, queued by one call for as many as possible.

    host: which of destination (0) and source (1) is on the host. whole: whether no host side has a border of pinned
        regions within it.
    """

    def __init__(self, host: int, before: Turn, *, whole: bool) -> None:
        self._host, self._before, self._is_whole = host, before, whole
        self._destinations = list[Tensor]()
        self._sources = list[Tensor]()

    def add(self, copy: Copy) -> None:
        """Add one copy in pieces, cut also at the borders of pinned regions."""
        destination, source = copy
        nbytes = source.nbytes
        parts = () if self._is_whole else pinned_parts(copy[self._host])
        if len(parts) <= 1 and nbytes <= PIECE_BYTES:  # most copies: slicing would take longer than the copy
            self._add(destination, source, nbytes)
            return
        most = PIECE_BYTES // source.itemsize
        for part in parts or (slice(None),):
            for to, piece in zip(destination[part].split(most), source[part].split(most), strict=True):
                self._add(to, piece, piece.nbytes)

    def _add(self, destination: Tensor, source: Tensor, nbytes: int) -> None:
        give_way = self._before(nbytes)
        if give_way is not None:
            self.flush()
            give_way()
        self._destinations.append(destination)
        self._sources.append(source)

    def flush(self) -> None:
        """Queue what was added."""
        if self._destinations:
            queue_copies(self._destinations, self._sources)
            self._destinations, self._sources = [], []


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensor begins where the other ends, in the same storage and of the same type."""
    # Two storages may be neighbours by chance: no view may span both, because each is released by itself.
    return (
        tensor.dtype == other.dtype
        and tensor.data_ptr() == other.data_ptr() + other.nbytes
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
