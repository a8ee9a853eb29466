"""Copies of many small pieces as one copy of their neighbourhood on the host, gathered or scattered on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.pinned import changes, pinned_as_one, pinned_parts, without_borders
from dos.torch_internals.alike import alike
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
"""Called before each part, with its bytes; returns what must be queued before it, or None."""


class Part(NamedTuple):
    """Copies that one call queues, of PIECE_BYTES at most.

    host: their sides there. device: of each other side, the place of its copy and the elements, None for all of them.
    whole: the sides on the host as one, where small ones share a copy; None: each has its own.
    """

    nbytes: int
    host: Sequence[Tensor]
    device: Sequence[tuple[int, slice | None]]
    whole: Tensor | None


class Parts(NamedTuple):
    """The parts of copies in the order of addresses on the host.

    plain: where the device's runtime can copy the bytes as they are, each copy's address there, place and bytes; None
        where any is joined or converted, or not within one pinned region.
    changes: `pinned.changes` as these were found.
    """

    parts: Sequence[Part]
    plain: Sequence[tuple[int, int, int]] | None
    changes: int


def queue_parts(
    parts: Sequence[Part], device: Sequence[Tensor], *, to_host: bool, before: Turn = lambda n: None
) -> None:
    """Queue copies on the current stream. device: their sides there. before: see `Turn`."""
    for nbytes, here, places, whole in parts:
        there = [device[n] if part is None else device[n].view(-1)[part] for n, part in places]
        staged = None if whole is None else _room_like(whole, there[0].device)
        flat = pieces = list[Tensor]()
        if whole is not None and staged is not None:
            # Released here while queued work still uses it: safe, because it was allocated on the current stream, and
            # the allocator gives it only to later work of that stream.
            flat, pieces = [each.view(-1) for each in there], [*staged.split([each.numel() for each in here])]
            here, there = [whole], [staged]
            if to_host:
                copy_all(pieces, flat)
        give_way = before(nbytes)
        if give_way is not None:
            give_way()
        if to_host:
            queue_copies([*here], there)
            continue
        queue_copies(there, [*here])
        if pieces:
            copy_all(flat, pieces)


def _room_like(whole: Tensor, device: torch.device) -> Tensor | None:
    """Return memory on the device to gather small pieces in, or scatter them from; None: the device has none."""
    try:
        return torch.empty_like(whole, device=device)
    except torch.OutOfMemoryError:
        return None


class Kept(list[Copy]):
    """Copies between the same memory, step after step, whose parts are found once."""

    parts: Parts | None = None
    recorded = False
    """Whether the allocator knows of the stream that uses this memory. It forgets that only when the memory is freed,
    which these copies prevent."""

    def forget(self) -> None:
        """Let there be none, until others are added."""
        self.clear()
        self.parts, self.recorded = None, False


class Lent(list[Copy]):
    """Copies of gradients, which are kept until these have ended; see `CudaDevice.copy`. lending: made them, if any."""

    lending: Lending | None = None


class Lending:
    """The way of gradients to the same memory on the host, step after step: only the gradients are others."""

    def __init__(self, host: Sequence[Tensor], gradients: Sequence[Tensor], runs: Sequence[slice | None]) -> None:
        """host: where each goes. runs: the elements that go there, None for all."""
        self.parts: Parts | None = None
        self._runs = runs
        # In the shape of the gradient, which then needs no view: a view lets go of Python's lock.
        each = zip(host, gradients, runs, strict=True)
        self._host = [there.view(g.shape) if run is None else there for there, g, run in each]
        usable = all(each.is_contiguous() and not (each.requires_grad or each.is_neg()) for each in gradients)
        self._are_alike = alike(gradients) if usable else None

    def lend(self, gradients: Sequence[Tensor]) -> Lent | None:
        """Return the copies of these, which are different tensors; None if they are not like the first ones."""
        if self._are_alike is None or not self._are_alike(*gradients):
            return None
        sides = [g if run is None else g.view(-1)[run] for g, run in zip(gradients, self._runs, strict=True)]
        found = Lent(zip(self._host, sides, strict=True))
        found.lending = self
        return found


def parts_of(copies: Sequence[Copy], *, host: int) -> Parts:
    """Return the parts of copies, of which there are some. Many small pieces that are neighbours on the host share one.

    host: which of destination (0) and source (1) is on the host.
    """
    keeper = copies if isinstance(copies, Kept) else copies.lending if isinstance(copies, Lent) else None
    now = changes()
    if keeper is not None and keeper.parts is not None and keeper.parts.changes == now:
        return keeper.parts
    found = _runs(copies, host)
    first, last = found[0][0][1], found[-1][-1][1]
    whole = without_borders(first, last)
    parts, sides, places, total = list[Part](), list[Tensor](), list[tuple[int, slice | None]](), 0
    for run in found:
        together = None
        if len(run) > FEW:
            together = run[0][1].as_strided((sum([side.numel() for _, side in run]),), (1,))
        if together is not None and (whole or len(pinned_parts(together)) == 1):
            parts.append(Part(together.nbytes, [side for _, side in run], [(n, None) for n, _ in run], together))
            continue
        for n, side in run:
            for part, piece in _pieces(side, whole=whole):
                if sides and total + piece.nbytes > PIECE_BYTES:
                    parts.append(Part(total, sides, places, None))
                    sides, places, total = [], [], 0
                sides.append(piece)
                places.append((n, part))
                total += piece.nbytes
    if sides:
        parts.append(Part(total, sides, places, None))
    made = Parts(parts, _plain(copies, found), now)
    if keeper is not None:
        keeper.parts = made
    return made


def _plain(copies: Sequence[Copy], runs: Sequence[Sequence[tuple[int, Tensor]]]) -> list[tuple[int, int, int]] | None:
    """Return `Parts.plain`."""
    found, as_one = list[tuple[int, int, int]](), pinned_as_one(runs[0][0][1], runs[-1][-1][1])
    for run in runs:
        if len(run) > FEW:
            return None
        for n, side in run:
            to, source = copies[n]
            plain = to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous() and not source.is_neg()
            if not (plain and (as_one or pinned_as_one(side, side))):
                return None
            found.append((side.data_ptr(), n, side.nbytes))
    return found


def _pieces(side: Tensor, *, whole: bool) -> Iterator[tuple[slice | None, Tensor]]:
    """Yield pieces of one side on the host, cut also at borders of pinned regions unless there are none."""
    if whole and side.nbytes <= PIECE_BYTES:  # most sides
        yield None, side
        return
    flat, most = side.view(-1), PIECE_BYTES // side.itemsize
    for part in (slice(0, len(flat)),) if whole else pinned_parts(flat):
        for start in range(part.start, part.stop, most):
            run = slice(start, min(part.stop, start + most))
            yield run, flat[run]


def _runs(copies: Iterable[Copy], host: int) -> list[list[tuple[int, Tensor]]]:
    """Return the sides on the host, each with the place of its copy, in groups of small ones that are neighbours."""
    # In one loop, because hooks on gradients wait for it. Sorted, because neighbours may be given in any order.
    found = list[list[tuple[int, Tensor]]]()
    first = end = -1
    for address, n, side in sorted([(copy[host].data_ptr(), n, copy[host]) for n, copy in enumerate(copies)]):
        nbytes = side.nbytes
        small = nbytes < SMALL_BYTES
        joins = small and address == end and address + nbytes - first <= RUN_BYTES
        if joins and _follows(side, found[-1][-1][1]):
            found[-1].append((n, side))
        else:
            found.append([(n, side)])
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


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensor begins where the other ends, in the same storage and of the same type."""
    # Two storages may be neighbours by chance: no view may span both, because each is released by itself.
    return (
        tensor.dtype == other.dtype
        and tensor.data_ptr() == other.data_ptr() + other.nbytes
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
