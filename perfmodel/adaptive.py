"""The adaptive policy: which subgroups stay on the GPU, which are streamed and which are updated on the CPU.

As many subgroups are resident as fit: they cost nothing on a scarce lane. How many of the others the CPU updates, how
many staging slots there are where those take their memory from residents, how much of the saved tensors moves, and how
many threads update on the CPU follows from the memory that there is, the compute that transfers run beside, and the
rates of the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from perfmodel.answers import AMPLE, Answers
from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.workload import Workload

FEWER = 0.02
"""Share of an iteration by which it may be longer with fewer threads of the CPU update: they disturb the host less."""


def adaptive(workload: Workload, profile: HardwareProfile) -> Plan:
    """The plan with the least exposed time that is found; all state on the GPU where that is about as good."""
    return AdaptivePlanner()(workload, profile)


class AdaptivePlanner:
    """The function `adaptive`, which remembers what it has found for other memory of the last workload."""

    def __init__(self) -> None:
        self._answers: dict[int, Answers] = {}
        """By number of threads."""
        self._last: tuple[Workload, HardwareProfile, Plan] | None = None

    def __call__(self, workload: Workload, profile: HardwareProfile) -> Plan:
        """The plan for these inputs, whatever was asked before."""
        if self._last is not None and self._last[:2] == (workload, profile):
            return self._last[2]
        plan = self._plan(workload, profile)
        if self._last is not None and self._last[2] == plan:
            plan = self._last[2]
        self._last = workload, profile, plan
        return plan

    def _plan(self, workload: Workload, profile: HardwareProfile) -> Plan:
        """Return the best plan of the best number of threads, beginning with the one that the closed form proposes.

        Of numbers that are about as good, the one with most residents, and of these the fewest threads. Those that were
        measured are looked at first, from one to the next as long as that is better, then those halfway to neighbours.
        """
        ample = dataclasses.replace(workload, **AMPLE)
        counts = sorted({each.cpu_threads for each in profile.by_threads}) or [0]
        found = dict[int, tuple[float, Plan]]()

        def best_of(some: Iterable[int]) -> int:
            for threads in some:
                if threads not in found:
                    found[threads] = self._answers_for(threads, ample, profile).best(workload)
            limit = (1 + FEWER) * min(seconds for seconds, _ in found.values())
            good = {threads: plan for threads, (seconds, plan) in found.items() if seconds <= limit}
            return min(good, key=lambda threads: (-good[threads].placements.count(Placement.GPU_RESIDENT), threads))

        proposed = min(counts, key=lambda n: self._answers_for(n, ample, profile).proposed_s(workload))
        best, before = best_of([proposed]), -1
        if found[best][1].placements.count(Placement.GPU_RESIDENT) == len(workload.subgroups):
            return found[best][1]
        while best != before:
            before, place = best, counts.index(best)
            best = best_of(counts[max(0, place - 1) : place + 2])
        # With more threads only where all those of the next number are too many.
        limit = (1 + FEWER) * found[best][0]
        best = best_of(
            (best + n) // 2 for n in counts[max(0, place - 1) : place + 2] if n < best or found[n][0] > limit
        )
        return dataclasses.replace(found[best][1], threads=best)

    def _answers_for(self, threads: int, ample: Workload, profile: HardwareProfile) -> Answers:
        """Return the present answers if they are for the same workload but for memory, else new ones."""
        known, of = self._answers.get(threads), profile.with_threads(threads)
        if known is None or (known.workload, known.profile) != (ample, of):
            known = self._answers[threads] = Answers(ample, of)
        return known
