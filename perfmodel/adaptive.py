"""The adaptive policy: which subgroups stay on the GPU, which are streamed and which are updated on the CPU."""

from __future__ import annotations

import math

from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.search import Search
from perfmodel.simulate import Scope, Simulator
from perfmodel.workload import Workload

TASKS_AT_ONCE = 1_000
"""Tasks that AdaptivePlanner simulates in one call, or those of one simulation; each takes two or three us."""


def adaptive(workload: Workload, profile: HardwareProfile) -> Plan:
    """The plan with the least exposed time that the search finds; all state on the GPU where that is about as good."""
    search = Search(workload, profile)
    search.advance(math.inf)
    return search.plan


class AdaptivePlanner:
    """What DOSAdam runs: `adaptive` piece by piece, so that no call takes long, and plans that stay while they can.

    While inputs stay the same, each call goes on with the search where the last one stopped. Until it has ended the
    plan of before remains if there is memory for it, else what the first piece gave. After that the plan of before
    remains if it is slower by no more than the share `tolerance` of the exposed time.
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
        if self._search is None or self._search.inputs != (workload, profile):
            self._search, self.settled = Search(workload, profile), False
            plan, n = self._plan, len(workload.subgroups)
            self._is_earlier = plan is not None and len(plan) == n and workload.has_room(plan)
            if not self._is_earlier:
                self._plan = None
        if self._plan is None:
            self._search.advance(TASKS_AT_ONCE)
            self._plan = self._search.plan
        elif not self._search.ended:
            self._search.advance(TASKS_AT_ONCE)
        elif not self.settled:  # in a call of its own: to compare takes as long as to search
            if not (self._is_earlier and self._good_enough(self._plan, self._search.plan, workload, profile)):
                self._plan = self._search.plan
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
