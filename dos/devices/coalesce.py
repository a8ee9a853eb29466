"""Copies of many small pieces as one copy of their neighbourhood on the host, gathered or scattered on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.pinned import pinned_parts

SMALL_BYTES = 1 << 17
"""Pieces below this share a copy: in the few microseconds that issuing a copy takes, a link moves about as much."""
RUN_BYTES = 1 << 24
"""The most that one such copy moves, and needs on the device meanwhile."""
PIECE_BYTES = 1 << 25
"""The most that any copy moves: a link serves streams in turn, and saved tensors, which compute waits for, come between
pieces of state."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, those as one that follow each other on both sides: gradients of an FSDP group lie so."""
    found: list[Copy] = []
    parts: list[Copy] = []

    def end() -> None:
        if len(parts) > 1:
            numel = sum(destination.numel() for destination, _ in parts)
            found.append((parts[0][0].as_strided((numel,), (1,)), parts[0][1].as_strided((numel,), (1,))))
        else:
            found.extend(parts)

    for copy in sorted(copies, key=lambda copy: copy[0].data_ptr()):
        if not (parts and _follows(copy[0], parts[-1][0]) and _follows(copy[1], parts[-1][1])):
            end()
            parts = []
        parts.append(copy)
    end()
    return found


def copy_pieces(copies: Iterable[Copy], *, to_host: bool) -> None:
    """Queue all copies on the current stream. Pieces that are neighbours on the host are copied together if small."""
    for run in runs(copies, host=0 if to_host else 1):
        if len(run) == 1 or not _copy_together(run, to_host=to_host):
            for each in run:
                _copy_across(each, to_host=to_host)


def runs(copies: Iterable[Copy], *, host: int) -> list[Sequence[Copy]]:
    """The copies, grouped so that within a group they are small and follow each other on the host.

    host: which of destination (0) and source (1) is there.
    """
    found: list[list[Copy]] = []
    nbytes = 0
    for copy in sorted(copies, key=lambda copy: copy[host].data_ptr()):
        side = copy[host]
        if (
            found
            and side.nbytes < SMALL_BYTES
            and nbytes + side.nbytes <= RUN_BYTES
            and _follows(side, found[-1][-1][host])
        ):
            found[-1].append(copy)
            nbytes += side.nbytes
        else:
            found.append([copy])
            # What is large is a run of its own.
            nbytes = side.nbytes if side.nbytes < SMALL_BYTES else RUN_BYTES
    return list(found)


def _copy_together(run: Sequence[Copy], *, to_host: bool) -> bool:
    """Queue the run as one transfer; False if the device has no memory for that."""
    host, device = (0, 1) if to_host else (1, 0)
    first = run[0][host]
    whole = first.as_strided((sum(copy[host].numel() for copy in run),), (1,))
    try:
        staged = torch.empty_like(whole, device=run[0][device].device)
    except torch.OutOfMemoryError:
        return False
    # Of the current stream's memory, so that the allocator gives it to work that comes after this.
    parts = list(staged.split([copy[host].numel() for copy in run]))
    if to_host:
        torch._foreach_copy_(parts, [copy[device] for copy in run])
        _copy_across((whole, staged), to_host=True)
    else:
        _copy_across((staged, whole), to_host=False)
        torch._foreach_copy_([copy[device] for copy in run], parts)
    return True


def _copy_across(copy: Copy, *, to_host: bool) -> None:
    """Queue one copy in pieces, cut also where host memory that was pinned in one go ends."""
    destination, source = copy
    most = PIECE_BYTES // source.itemsize
    for part in pinned_parts(destination if to_host else source):
        for to, piece in zip(destination[part].split(most), source[part].split(most), strict=True):
            to.copy_(piece, non_blocking=True)


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Whether the tensor begins where the other ends, in the same memory and of the same type."""
    return (
        tensor.dtype == other.dtype
        and tensor.data_ptr() == other.data_ptr() + other.nbytes
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
