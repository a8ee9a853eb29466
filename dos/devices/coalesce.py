"""Copies of many small pieces as one copy of their neighbourhood on the host, gathered or scattered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.pinned import pinned_parts
from dos.torch_internals.operators import copy_all

SMALL_BYTES = 1 << 17
"""Pieces below this size share a copy: a link moves about as much while the host issues one copy."""
RUN_BYTES = 1 << 24
"""The most bytes that a shared copy moves, and needs on the device meanwhile."""
PIECE_BYTES = 1 << 25
"""The most bytes that any copy moves. Between pieces of state of this size other copies can run: of saved tensors, for
which compute waits, or of the caller's next batch."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Return the copies, joined where they are neighbours on both sides, as gradients of an FSDP group are."""

    def follows(copy: Copy, run: Sequence[Copy]) -> bool:
        return all(_follows(*sides) for sides in zip(copy, run[-1], strict=True))

    runs = _grouped(copies, 0, follows)
    return [(_whole(run, 0), _whole(run, 1)) if len(run) > 1 else run[0] for run in runs]


def copy_runs(
    runs: Iterable[Sequence[Copy]], *, to_host: bool, before: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Queue all copies on the current stream. Pieces that are neighbours on the host are copied together if small.

    runs: as `runs` finds them. before: is called before each piece of PIECE_BYTES at most, with its bytes.
    """
    for run in runs:
        if len(run) == 1 or not _copy_together(run, to_host=to_host, before=before):
            for each in run:
                _copy_across(each, to_host=to_host, before=before)


def runs(copies: Iterable[Copy], *, host: int) -> list[list[Copy]]:
    """Return the copies in groups of small ones that are neighbours on the host.

    host: which of destination (0) and source (1) is on the host.
    """

    def follows(copy: Copy, run: Sequence[Copy]) -> bool:
        side, first, last = copy[host], run[0][host], run[-1][host]
        nbytes = side.data_ptr() + side.nbytes - first.data_ptr()
        return max(side.nbytes, last.nbytes) < SMALL_BYTES and nbytes <= RUN_BYTES and _follows(side, last)

    return _grouped(copies, host, follows)


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
    return run[0][side].as_strided((sum(copy[side].numel() for copy in run),), (1,))


def _copy_together(run: Sequence[Copy], *, to_host: bool, before: Callable[[int], object]) -> bool:
    """Queue the run as one transfer; return False if the device has no memory to stage it."""
    host, device = (0, 1) if to_host else (1, 0)
    whole = _whole(run, host)
    try:
        staged = torch.empty_like(whole, device=run[0][device].device)
    except torch.OutOfMemoryError:
        return False
    # Released here while queued work still uses it: safe, because it was allocated on the current stream, and the
    # allocator gives it only to later work of that stream.
    parts = list(staged.split([copy[host].numel() for copy in run]))
    if to_host:
        copy_all(parts, [copy[device] for copy in run])
        _copy_across((whole, staged), to_host=True, before=before)
    else:
        _copy_across((staged, whole), to_host=False, before=before)
        copy_all([copy[device] for copy in run], parts)
    return True


def _copy_across(copy: Copy, *, to_host: bool, before: Callable[[int], object]) -> None:
    """Queue one copy in pieces, cut also at the borders of pinned regions."""
    destination, source = copy
    parts = pinned_parts(destination if to_host else source)
    if len(parts) == 1 and source.nbytes <= PIECE_BYTES:  # most copies: slicing would take longer than the copy
        before(source.nbytes)
        destination.copy_(source, non_blocking=True)
        return
    most = PIECE_BYTES // source.itemsize
    for part in parts:
        for to, piece in zip(destination[part].split(most), source[part].split(most), strict=True):
            before(piece.nbytes)
            to.copy_(piece, non_blocking=True)


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensor begins where the other ends, in the same storage and of the same type."""
    # Two storages may be neighbours by chance: no view may span both, because each is released by itself.
    return (
        tensor.dtype == other.dtype
        and tensor.data_ptr() == other.data_ptr() + other.nbytes
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
