"""The adaptive policy: which subgroups stay on the GPU, which are streamed and which are updated on the CPU."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate

from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.policies import spilled
from perfmodel.search import Search
from perfmodel.simulate import Scope, Simulator
from perfmodel.workload import Workload

TASKS_AT_ONCE = 700
"""Tasks that AdaptivePlanner simulates in one call, or those of one simulation; each takes three to five us."""


def adaptive(workload: Workload, profile: HardwareProfile) -> Plan:
    """The plan with the least exposed time that the search finds; all state on the GPU where that is about as good."""
    search = Search(workload, profile)
    search.advance(math.inf)
    return search.plan


def trimmed(plan: Plan, workload: Workload) -> Plan | None:
    """The plan as far as there is memory for it: more saved tensors leave, then fewer are resident, then none streamed.

    What does not fit on the host is on disk. None if the workload has other subgroups, or no such plan has room.
    """
    if len(plan) != len(workload.subgroups):
        return None
    plan = spilled(plan, workload)
    if workload.has_room(plan):
        return plan
    sums = accumulate((saved.nbytes for saved in workload.activations), initial=0)
    allowed = [n for n in sums if workload.activation_least_bytes <= n <= workload.activation_host_bytes]
    amounts = [n for n in allowed if n >= plan.activation_bytes] or allowed[-1:] or [plan.activation_bytes]
    staged = plan.slots * workload.slot_bytes
    rooms = {n: min(workload.peak_free(n), workload.shared_free(n) - staged) for n in amounts}
    residents = list(plan.served(Placement.GPU_RESIDENT))
    held = workload.state_bytes_of(residents)
    leaving = next((n for n in amounts if rooms[n] >= held), max(amounts, key=rooms.__getitem__))
    without = []
    while residents and held > rooms[leaving]:
        without.append(residents.pop())
        held -= workload.subgroups[without[-1]].state_bytes
    found = spilled(dataclasses.replace(plan.on_host(frozenset(without)), activation_bytes=leaving), workload)
    if not workload.has_room(found):
        found = dataclasses.replace(found.on_host(found.served(Placement.GPU_STREAMED)), slots=0)
    return found if workload.has_room(found) else None


class AdaptivePlanner:
    """What DOSAdam runs: `adaptive` piece by piece, so that no call takes long, and plans that stay while they can.

    While inputs stay the same, each call goes on with the search where the last one stopped. Until it has ended the
    plan of before remains, as far as there is memory for it. After that the plan of before
    remains if it is slower by no more than the share `tolerance` of the exposed time. Where there is no memory for all
    of it, as much of it remains as there is memory for.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self._tolerance = tolerance
        self._search: Search | None = None
        self._plan: Plan | None = None
        self._is_earlier = False
        """Whether the plan is of other inputs."""
        self.settled = False
        """Whether more calls with the same inputs give the same plan, at once."""

    def __call__(self, workload: Workload, profile: HardwareProfile) -> Plan:
        """The plan for this iteration."""
        search = self._search
        # Where rates alone have changed a search comes to its end first, or none ever would where they change often.
        if search is None or search.workload != workload or (self.settled and search.profile != profile):
            search, self.settled = Search(workload, profile), False
            self._search = search
            self._plan = None if self._plan is None else trimmed(self._plan, workload)
            self._is_earlier = self._plan is not None
        if self._plan is None:
            search.advance(TASKS_AT_ONCE)
            self._plan = search.plan
        elif not search.ended:
            search.advance(TASKS_AT_ONCE)
        elif not self.settled:  # in a call of its own: to compare takes as long as to search
            if not (self._is_earlier and self._good_enough(self._plan, search.plan, workload, profile)):
                self._plan = search.plan
            self.settled = True
        return self._plan

    def _good_enough(self, earlier: Plan, best: Plan, workload: Workload, profile: HardwareProfile) -> bool:
        """Whether the plan of before loses little: plans must not follow noise."""
        if set(best.placements) == {Placement.GPU_RESIDENT}:
            return earlier == best
        scope = Scope.beside(workload)
        simulator = Simulator(workload, profile, scope)
        now, then = simulator.makespan(earlier), simulator.makespan(best)
        return now - then <= self._tolerance * (then - scope.compute_s(workload))
