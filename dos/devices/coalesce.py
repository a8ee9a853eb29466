"""Copies of many small pieces as one copy of their neighbourhood on the host, gathered or scattered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.pinned import pinned_parts
from dos.torch_internals.operators import copy_all

SMALL_BYTES = 1 << 17
"""Pieces below this share a copy: in the few microseconds that issuing a copy takes, a link moves about as much."""
RUN_BYTES = 1 << 24
"""The most that one such copy moves, and needs on the device meanwhile."""
PIECE_BYTES = 1 << 25
"""The most that any copy moves. Between such pieces of state there is room for others' copies: of saved tensors, which
compute waits for, or of the caller's next batch."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, those as one that follow each other on both sides: gradients of an FSDP group lie so."""

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
    """The copies, grouped so that within a group they are small and follow each other on the host.

    host: which of destination (0) and source (1) is there.
    """

    def follows(copy: Copy, run: Sequence[Copy]) -> bool:
        side, first, last = copy[host], run[0][host], run[-1][host]
        nbytes = side.data_ptr() + side.nbytes - first.data_ptr()
        return max(side.nbytes, last.nbytes) < SMALL_BYTES and nbytes <= RUN_BYTES and _follows(side, last)

    return _grouped(copies, host, follows)


def _grouped(copies: Iterable[Copy], side: int, follows: Callable[[Copy, Sequence[Copy]], bool]) -> list[list[Copy]]:
    """The copies by their addresses on one side, in one list as long as each follows those before it."""
    found: list[list[Copy]] = []
    for copy in sorted(copies, key=lambda copy: copy[side].data_ptr()):
        if found and follows(copy, found[-1]):
            found[-1].append(copy)
        else:
            found.append([copy])
    return found


def _whole(run: Sequence[Copy], side: int) -> Tensor:
    """One side of copies that follow each other there."""
    return run[0][side].as_strided((sum(copy[side].numel() for copy in run),), (1,))


def _copy_together(run: Sequence[Copy], *, to_host: bool, before: Callable[[int], object]) -> bool:
    """Queue the run as one transfer; False if the device has no memory for that."""
    host, device = (0, 1) if to_host else (1, 0)
    whole = _whole(run, host)
    try:
        staged = torch.empty_like(whole, device=run[0][device].device)
    except torch.OutOfMemoryError:
        return False
    # Of the current stream's memory, so that the allocator gives it to work that comes after this.
    parts = list(staged.split([copy[host].numel() for copy in run]))
    if to_host:
        copy_all(parts, [copy[device] for copy in run])
        _copy_across((whole, staged), to_host=True, before=before)
    else:
        _copy_across((staged, whole), to_host=False, before=before)
        copy_all([copy[device] for copy in run], parts)
    return True


def _copy_across(copy: Copy, *, to_host: bool, before: Callable[[int], object]) -> None:
    """Queue one copy in pieces, cut also where host memory that was pinned in one go ends."""
    destination, source = copy
    parts = pinned_parts(destination if to_host else source)
    if len(parts) == 1 and source.nbytes <= PIECE_BYTES:  # as most are: the slices below take longer than the copy
        before(source.nbytes)
        destination.copy_(source, non_blocking=True)
        return
    most = PIECE_BYTES // source.itemsize
    for part in parts:
        for to, piece in zip(destination[part].split(most), source[part].split(most), strict=True):
            before(piece.nbytes)
            to.copy_(piece, non_blocking=True)


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Whether the tensor begins where the other ends, in the same memory and of the same type."""
    # Storages may be neighbours by chance: a view cannot reach from one into the other, and each is freed by itself.
    return (
        tensor.dtype == other.dtype
        and tensor.data_ptr() == other.data_ptr() + other.nbytes
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
