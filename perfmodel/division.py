"""Divisions of device memory: the state that stays there, the staging slots, the saved tensors that make way."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from perfmodel.plan import Placement, Plan
from perfmodel.policies import spilled
from perfmodel.workload import Workload

MAX_SLOTS = 8
"""Three keep both links busy; more let prefetches go on while the GPU updates resident subgroups."""
SLOTS_TRIED = (1, 2, 3, 4)
"""Numbers of slots where their memory is taken from residents."""
PASSING_TRIED = (1, 2)
"""The same where only offloaded gradients of residents pass through them."""
AMOUNTS_TRIED = 17
"""The most amounts of saved tensors that move."""
BLOCKS_TRIED = 9
"""Numbers of blocks that stay, at most, and beside these amounts of saved tensors."""


@dataclass(frozen=True)
class Division:
    """One way to divide device memory.

    slots: for subgroups that are streamed, and for the offloaded gradients of residents.
    activation_bytes: of saved tensors that move.
    residents: the subgroups whose state has room to stay: larger ones first, unless all fit or backward updates.
    blocks: whose weights stay.
    streams: whether state passes through the slots; else they have room for offloaded gradients alone.
    """

    slots: int
    activation_bytes: int
    residents: tuple[int, ...]
    blocks: frozenset[int] = frozenset()
    streams: bool = True

    def counts(self, subgroups: int, on_cpu: int) -> dict[Placement, int]:
        """The number of subgroups by placement in `plan`, of so many in all; none where that is 0."""
        resident = min(len(self.residents), subgroups - on_cpu)
        streamed = (subgroups - resident - on_cpu) * self.streams
        found = {Placement.GPU_RESIDENT: resident, Placement.GPU_STREAMED: streamed}
        found[Placement.CPU] = subgroups - resident - streamed
        return {placement: count for placement, count in found.items() if count}

    def plan(self, workload: Workload, on_cpu: int) -> Plan:
        """The plan with this number of subgroups on the CPU.

        Residents are as many as there is room for and subgroups not on the CPU. Among the rest, CPU and streamed
        alternate evenly, so that no lane waits and parameters arrive evenly for the forward; those whose weights are
        on the host are streamed only if all others are.
        """
        loads = workload.subgroups
        placements = [Placement.CPU] * len(loads)
        for i in self.residents[: len(loads) - on_cpu]:
            placements[i] = Placement.GPU_RESIDENT
        rest = [i for i, placement in enumerate(placements) if placement is Placement.CPU]
        left, moving = (len(rest) - on_cpu) * self.streams, workload.streaming(self.blocks)
        # Updates on the device move weights that are on the host, and updates there need no copy of them.
        for group in ([i for i in rest if i not in moving], [i for i in rest if i in moving]):
            count = min(left, len(group))
            if count <= 0:
                continue
            left -= count
            share = 1 - (len(group) - count) / len(group)
            # So that the first is streamed and the GPU starts at once.
            owed = (0.5 - share) * sum(loads[i].numel for i in group) / len(group)
            for i in group:
                owed += share * loads[i].numel
                if owed >= (0.5 - 1e-9) * loads[i].numel:
                    placements[i] = Placement.GPU_STREAMED
                    owed -= loads[i].numel
        through = placements.count(Placement.GPU_STREAMED)
        if workload.returns:
            through += placements.count(Placement.GPU_RESIDENT)
        slots = min(self.slots, through)
        order = tuple(range(len(loads)))
        plan = Plan(tuple(placements), order, slots, self.activation_bytes, blocks_on_device=self.blocks)
        return spilled(plan, workload)


def fits(workload: Workload) -> bool:
    """Whether all state and weights have room on the device while no more saved tensors move than have to."""
    weights = workload.weight_bytes(range(len(workload.blocks)))
    free = min(workload.peak_free_bytes, workload.shared_free_bytes)
    return workload.state_bytes + weights <= free and workload.blocks_most >= len(workload.blocks)


def divisions(workload: Workload) -> list[Division]:
    """Return the divisions that are worth a look, at least one, those first by which fewer saved tensors move."""
    loads = workload.subgroups
    # Where backward updates, leading ones stay, of what sizes they are: their gradients come last, and the GPU needs
    # less time then than the CPU.
    sizes = [0 if workload.in_backward else -load.state_bytes for load in loads]
    larger_first = sorted(range(len(loads)), key=sizes.__getitem__)
    taken = list(accumulate(loads[i].state_bytes for i in larger_first))
    amounts = _amounts(workload, taken)
    if fits(workload):
        everything = frozenset(range(len(workload.blocks)))
        weights, all_fit = workload.weight_bytes(everything), []
        for slots in PASSING_TRIED if workload.returns else (0,):
            # A second slot may shorten the iteration by more than the residents do that it takes the place of.
            shared = workload.shared_free_bytes - workload.staging_bytes(slots, streams=False)
            residents = _fitting(workload, larger_first, taken, min(workload.peak_free_bytes, shared) - weights)
            # In their order: of what the CPU updates, gradients come first then.
            all_fit.append(Division(slots, amounts[0], tuple(sorted(residents)), everything, streams=False))
        return all_fit
    found = dict[Division, None]()
    first = {frozenset[int](): larger_first}
    for activation_bytes in amounts:
        shared = workload.shared_free(activation_bytes)
        for count, streams in _slots(workload, activation_bytes):
            free = min(workload.peak_free(activation_bytes), shared - workload.staging_bytes(count, streams=streams))
            for blocks in _blocks(workload, free):
                left = free - workload.weight_bytes(blocks)
                if left < 0 and workload.blocks:
                    continue
                if blocks not in first:  # others move their weights when they are updated on the device
                    moving = workload.streaming(blocks)
                    first[blocks] = sorted(larger_first, key=lambda i: (sizes[i], i in moving))
                residents = _fitting(workload, first[blocks], taken, left)
                found[Division(count, activation_bytes, residents, blocks, streams)] = None
    slots = _passing_slots(workload, 0)
    return list(found) or [Division(slots, amounts[-1], (), _blocks(workload, 0)[0], streams=False)]


def _slots(workload: Workload, activation_bytes: int) -> list[tuple[int, bool]]:
    """Numbers of slots that may be worth a look, each with whether state passes through them."""
    shared, update = workload.shared_free(activation_bytes), workload.update_free_bytes
    most = workload.slots_within(update, MAX_SLOTS)
    found = [most]
    if math.isfinite(shared):
        # As many as take nothing from residents, besides.
        # No more: another process may want the memory, and with none for slots the CPU would update everything.
        beside = workload.slots_within(shared - workload.peak_free(activation_bytes), min(most, SLOTS_TRIED[-1]))
        found = [
            n for n in sorted({*(min(most, n) for n in SLOTS_TRIED), beside}) if workload.staging_bytes(n) <= shared
        ]
    passing = _passing_slots(workload, min(shared, update))
    alone = sorted({min(passing, n) for n in PASSING_TRIED}) if math.isfinite(shared) or not most else []
    return [*((n, True) for n in found if n), *((n, False) for n in alone)]


def _passing_slots(workload: Workload, free: float) -> int:
    """The most slots for offloaded gradients of residents, in this much memory; 0 if there are none."""
    return max(1, workload.slots_within(free, MAX_SLOTS, streams=False)) if workload.returns else 0


def _blocks(workload: Workload, free: float) -> list[frozenset[int]]:
    """Blocks whose weights may stay in this much memory, BLOCKS_TRIED sets of them at most."""
    counts = workload.block_counts(free)
    between = max(1, -(-(len(counts) - 1) // (BLOCKS_TRIED - 1)))
    return [workload.staying(count) for count in (*counts[:-1:between], counts[-1])]


def _fitting(workload: Workload, larger_first: Sequence[int], taken: Sequence[int], free: float) -> tuple[int, ...]:
    """Subgroups whose state fits into `free` bytes, larger ones first. taken: bytes of 1, 2, ... of the largest."""
    loads, count = workload.subgroups, bisect(taken, free)
    found = list(larger_first[:count])
    left = free - (taken[count - 1] if count else 0)
    if count < len(loads) and left >= loads[larger_first[-1]].state_bytes:
        for i in larger_first[count:]:
            if loads[i].state_bytes <= left:
                left -= loads[i].state_bytes
                found.append(i)
    return tuple(found)


def _amounts(workload: Workload, taken: Sequence[int]) -> list[int]:
    """Bytes of saved tensors that may move, in ascending order: no more than makes room for all state.

    In between only those that make room for one more resident subgroup, AMOUNTS_TRIED of them at most.
    taken: by state, as for `_fitting`.
    """
    tried = AMOUNTS_TRIED
    if workload.blocks:  # or for the weights of one more
        sizes = *(load.state_bytes for load in workload.subgroups), *(block.nbytes for block in workload.blocks)
        taken, tried = list(accumulate(sorted(sizes, reverse=True))), BLOCKS_TRIED
    sums = accumulate((saved.nbytes for saved in workload.activations), initial=0)
    fitting = [nbytes for nbytes in dict.fromkeys(sums) if nbytes <= workload.activation_host_bytes]
    allowed = [nbytes for nbytes in fitting if nbytes >= workload.activation_least_bytes] or fitting[-1:]
    amounts: dict[int, int] = {}  # by how many can be resident: the least
    for nbytes in allowed:
        amounts.setdefault(bisect(taken, min(workload.peak_free(nbytes), workload.shared_free(nbytes))), nbytes)
    found = sorted({*amounts.values()} if len(taken) in amounts else {*amounts.values(), allowed[-1]})
    between = max(1, -(-(len(found) - 1) // (tried - 1)))
    return [*found[:-1:between], found[-1]]
