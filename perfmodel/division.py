"""How device memory is divided: which state stays there, how many staging slots there are, what leaves for them."""

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
SLOTS_TRIED = (2, 1, 4, 0)
"""Where memory for slots is taken from residents, in this order."""
AMOUNTS_TRIED = 17
"""Of saved tensors that leave, at most."""


@dataclass(frozen=True)
class Division:
    """One way to divide device memory.

    slots: for streamed subgroups. activation_bytes: of saved tensors that leave.
    residents: the subgroups whose state has room to stay, larger ones first.
    """

    slots: int
    activation_bytes: int
    residents: tuple[int, ...]

    def plan(self, workload: Workload, on_cpu: int) -> Plan:
        """The plan with this number of subgroups on the CPU.

        Residents are as many as there is room for and subgroups not on the CPU. Among the rest, CPU and streamed
        alternate evenly, so that no lane waits and parameters arrive evenly for the forward.
        """
        loads = workload.subgroups
        placements = [Placement.CPU] * len(loads)
        for i in self.residents[: len(loads) - on_cpu]:
            placements[i] = Placement.GPU_RESIDENT
        rest = [i for i, placement in enumerate(placements) if placement is Placement.CPU]
        if self.slots and on_cpu < len(rest):
            share = 1 - on_cpu / len(rest)
            # So that the first is streamed and the GPU starts at once.
            owed = (0.5 - share) * sum(loads[i].numel for i in rest) / len(rest)
            for i in rest:
                owed += share * loads[i].numel
                if owed >= (0.5 - 1e-9) * loads[i].numel:
                    placements[i] = Placement.GPU_STREAMED
                    owed -= loads[i].numel
        slots = min(self.slots, placements.count(Placement.GPU_STREAMED))
        return spilled(Plan(tuple(placements), tuple(range(len(loads))), slots, self.activation_bytes), workload)


def fits(workload: Workload) -> bool:
    """Whether all state has room on the device while no more saved tensors leave than have to."""
    return workload.state_bytes <= min(workload.peak_free_bytes, workload.shared_free_bytes)


def divisions(workload: Workload) -> list[Division]:
    """All that are worth a look, at least one; those of which less of the saved tensors leaves first."""
    loads = workload.subgroups
    larger_first = sorted(range(len(loads)), key=lambda i: -loads[i].state_bytes)
    taken = list(accumulate(loads[i].state_bytes for i in larger_first))
    if fits(workload):
        return [Division(0, _amounts(workload, taken)[0], tuple(larger_first))]
    slot, found = max(workload.slot_bytes, 1), dict[Division, None]()
    for activation_bytes in _amounts(workload, taken):
        shared = workload.shared_free(activation_bytes)
        slots = int(min(MAX_SLOTS, workload.update_free_bytes / slot))
        tried = [slots]
        if math.isfinite(shared):
            tried = [min(slots, most) for most in SLOTS_TRIED if most * slot <= shared]
        for count in tried:
            free = min(workload.peak_free(activation_bytes), shared - count * slot)
            found[Division(count, activation_bytes, _fitting(workload, larger_first, taken, free))] = None
    return list(found)


def _fitting(workload: Workload, larger_first: Sequence[int], taken: Sequence[int], free: float) -> tuple[int, ...]:
    """Subgroups whose state fits into `free` bytes, larger ones first. taken: by so many of the largest."""
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
    """How many bytes of saved tensors may leave, in ascending order: no more than makes room for all state.

    In between only those that make room for one more resident subgroup, AMOUNTS_TRIED of them at most.
    taken: by state, as for `_fitting`.
    """
    sums = accumulate((saved.nbytes for saved in workload.activations), initial=0)
    fitting = [nbytes for nbytes in dict.fromkeys(sums) if nbytes <= workload.activation_host_bytes]
    allowed = [nbytes for nbytes in fitting if nbytes >= workload.activation_least_bytes] or fitting[-1:]
    amounts: dict[int, int] = {}  # by how many can be resident: the least
    for nbytes in allowed:
        amounts.setdefault(bisect(taken, min(workload.peak_free(nbytes), workload.shared_free(nbytes))), nbytes)
    found = sorted({*amounts.values()} if len(taken) in amounts else {*amounts.values(), allowed[-1]})
    between = max(1, -(-(len(found) - 1) // (AMOUNTS_TRIED - 1)))
    return [*found[:-1:between], found[-1]]
