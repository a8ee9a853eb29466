"""Forward and backward in a schedule: in pieces, with the saved tensors that leave and come back beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from perfmodel.lanes import Stream
from perfmodel.plan import Placement, Plan
from perfmodel.timeline import Op
from perfmodel.weights import Add, WeightFetches
from perfmodel.workload import AHEAD, Workload

BACKWARD, FORWARD = (Op.BACKWARD, Stream.COMPUTE), (Op.FORWARD, Stream.COMPUTE)
SAVE, RESTORE = (Op.SAVE, Stream.SAVE), (Op.RESTORE, Stream.RESTORE)

Run = tuple[int, int, tuple[int, ...]]
"""A part of compute: as in `Workload.runs`, and the tasks that it waits for."""


def backward_pieces(
    add: Add,
    workload: Workload,
    offloaded: int = 0,
    weights: WeightFetches | None = None,
    parts: Collection[int | None] | None = None,
) -> dict[int, int]:
    """Add backward, last subgroup first, a piece for each in proportion to its size. Return these by subgroup.

    parts: of `Workload.backward_runs`, after which a piece has to end; None: after each.
    offloaded: how many of the saved tensors are on the host. They come back in reverse, each while backward uses those
    saved AHEAD places after it, or at once. weights: of blocks that stream.
    """
    saved, restores = workload.activations, dict[int, int]()
    groups = range(min(offloaded + AHEAD, len(saved)) - 1, -1, -1) if offloaded else ()

    def restore(number: int, after: tuple[int, ...] = ()) -> None:
        if 0 <= number < offloaded:
            restores[number] = add(RESTORE, None, saved[number].nbytes, after)

    def due(place: int, piece: int) -> tuple[int, ...]:
        restore(groups[place] - AHEAD, (piece,))
        return (restores[groups[place]],) if groups[place] < offloaded else ()

    for number in range(len(saved) - 1, len(saved) - 1 - AHEAD, -1):
        restore(number)
    if weights is not None:
        weights.begin(backward=True)
    runs, size, last = list[Run](), 0, workload.backward_runs[-1][0]
    for part, each in workload.backward_runs:
        size += each
        if parts is None or weights is not None or part in parts or part == last:
            runs.append((part, size, ()))
            size = 0
    return _pieces(add, BACKWARD, runs, [saved[g].due for g in groups], due, weights)


def issued_after(workload: Workload) -> int | None:
    """Return the part of backward at whose end the host issues the step; None: before all."""
    found, done, until = None, 0.0, (workload.backward_s - workload.ahead_s) * (1 - 1e-9)
    if not workload.ahead_s:
        return workload.backward_runs[-1][0]
    for part, size in workload.backward_runs:
        if done >= until:
            break
        found, done = part, done + workload.seconds_by_size[0] * size
    return found


def memory_freed(plan: Plan, workload: Workload, slots: int) -> tuple[int, ...]:
    """By slot, the number of pieces of backward, one a subgroup, whose end frees memory for it; 0: it is free before.

    By `Workload.half_freed_bytes`. Where that is not known, free memory grows evenly during backward, from the bytes
    beside resident state at the peak to those while updating.
    """
    held = workload.state_bytes_of(plan.served(Placement.GPU_RESIDENT)) + workload.weight_bytes(plan.blocks_on_device)
    spare, pieces = workload.peak_free(plan.activation_bytes) - held, len(workload.backward_runs)
    if workload.half_freed_bytes is not None:
        fits = workload.staging_bytes(slots) <= spare + workload.half_freed_bytes
        return (-(-pieces // 2) if fits else pieces,) * slots
    update = min(workload.update_free_bytes, workload.shared_free(plan.activation_bytes) - held)
    gained, found = update - spare, list[int]()
    for slot in range(slots):
        missing = workload.staging_bytes(slot + 1) - spare
        freed = min(1.0, missing / gained) if gained > 0 else 1.0
        found.append(0 if missing <= 0 else max(1, min(pieces, math.ceil(freed * pieces))))
    return tuple(found)


def forward_pieces(
    add: Add, workload: Workload, activation_bytes: int, runs: Sequence[Run], weights: WeightFetches | None = None
) -> None:
    """Add the next forward, with `activation_bytes` of saved tensors that move, each at once. weights: that stream."""
    moved = workload.moved(activation_bytes)

    def born(number: int, piece: int) -> tuple[int, ...]:
        add(SAVE, None, moved[number].nbytes, (piece,))
        return ()

    _pieces(add, FORWARD, runs, [each.born for each in moved], born, weights)


def _pieces(
    add: Add,
    what: tuple[Op, Stream],
    runs: Sequence[Run],
    shares: Sequence[float],
    passed: Callable[[int, int], tuple[int, ...]],
    weights: WeightFetches | None,
) -> dict[int, int]:
    """Add pieces of compute. Return the last one of each run.

    shares: of their size, where pieces end in between. passed: called with the places of a share and of the
    task that ends there, returns the tasks that the next piece waits for.
    """
    pieces, waits, number, done, end = dict[int, int](), tuple[int, ...](), 0, 0, 0
    size = sum(size for _, size, _ in runs)
    for i, numel, after in runs:
        end, waits = end + numel, waits + after
        if weights is not None:
            waits += weights.wanted(i)
        while number < len(shares) and (shares[number] * size < end or end == size):
            at = min(max(round(shares[number] * size), done), end)
            waits = passed(number, add(what, None, at - done, waits))
            number, done = number + 1, at
        pieces[i] = add(what, None, end - done, waits)
        done, waits = end, ()
        if weights is not None:
            weights.passed(i, pieces[i])
    return pieces
