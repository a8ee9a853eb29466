"""The adaptive policy: which subgroups stay on the GPU, which are streamed and which are updated on the CPU.

As many subgroups are resident as fit: they cost nothing on a scarce lane. How many of the others the CPU updates, how
many staging slots there are where those take their memory from residents, and how much of the saved tensors moves is
decided by a closed form, at once, for the memory that there is now. The simulator improves on that when nothing waits
for it. Its results are remembered, so that memory that comes and goes finds its answers ready.
"""

from __future__ import annotations

import dataclasses
import math

from perfmodel.answers import Answers, Choice
from perfmodel.division import divisions
from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.workload import Workload

TASKS_AT_ONCE = 700
"""Simulated in one call of `AdaptivePlanner.learn`, or those of one plan; each takes three to five us."""
UNSEEN = 0.02
"""Share of an iteration below which exposed time is not told from noise."""
STEADY = 8
"""Calls of `AdaptivePlanner.learn` that find no better plan for the same inputs, after which the best one counts."""


def adaptive(workload: Workload, profile: HardwareProfile) -> Plan:
    """The plan with the least exposed time that is found; all state on the GPU where that is about as good."""
    planner = AdaptivePlanner()
    plan = planner(workload, profile)
    while not planner.settled:
        planner.learn()
        plan = planner(workload, profile)
    return plan


class AdaptivePlanner:
    """Makes a whole plan for each iteration's memory, at once; DOSAdam runs it.

    settled: whether `learn` has nothing more to find for the inputs of the last call.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        """tolerance: share of the exposed time by which another plan has to be better than the one of before."""
        self.settled = False
        self._tolerance = tolerance
        self._inputs: tuple[Workload, HardwareProfile] | None = None
        self._answers: Answers | None = None
        self._earlier: Choice | None = None
        """The choice for other inputs."""
        self._chosen: Choice | None = None
        self._plan: Plan | None = None
        self._unchanged = 0
        """Calls of `learn` for these inputs since it has nothing more to find."""

    def __call__(self, workload: Workload, profile: HardwareProfile) -> Plan:
        """The plan for this iteration; the last one until the inputs change or `learn` finds a better one."""
        if self._plan is None or self._inputs != (workload, profile):
            answers, before = self._answers_for(workload, profile), self._answers
            alike = before is not None and before.workload.subgroups == workload.subgroups
            self._earlier = self._chosen if alike else None
            self._inputs, self._answers, self.settled, self._unchanged = (workload, profile), answers, False, 0
            self._plan = self._choose(workload, answers)
        return self._plan

    def meanwhile(self, workload: Workload, profile: HardwareProfile) -> Plan:
        """The best plan for less memory, while the last plan remains the one of before."""
        best = self._answers_for(workload, profile).best(workload)
        return best.division.plan(workload, best.on_cpu)

    def learn(self) -> None:
        """Simulate a little for the inputs of the last call; the next call may give a better plan."""
        if self._inputs is None or self._answers is None or self._unchanged == STEADY:
            return
        workload, _ = self._inputs
        if self.settled:
            self._unchanged += 1
            if self._unchanged < STEADY:
                return
            self._earlier = None  # it was kept against noise, and the inputs have none
        else:
            self.settled = self._answers.learn(workload, TASKS_AT_ONCE)
        if self._answers.was_simulated(self._answers.best(workload).division):
            # Else each iteration would run the next plan that only seems good, until all such were simulated.
            self._plan = self._choose(workload, self._answers)

    def _answers_for(self, workload: Workload, profile: HardwareProfile) -> Answers:
        """Return the present answers if they are for the same workload but for memory, else new ones."""
        ample = dataclasses.replace(
            workload,
            peak_free_bytes=math.inf,
            shared_free_bytes=math.inf,
            passing_bytes=0,
            activation_least_bytes=0,
            activation_host_bytes=math.inf,
        )
        known = self._answers
        return known if known and (known.workload, known.profile) == (ample, profile) else Answers(ample, profile)

    def _choose(self, workload: Workload, answers: Answers) -> Plan:
        """The best plan, or the one of before if it loses little: plans must not follow noise.

        Where there is no memory for that, more of the saved tensors move if that frees enough. All state on the GPU is
        never given up for a plan of before.
        """
        best, earlier = answers.best(workload), self._earlier
        plan = best.division.plan(workload, best.on_cpu)
        if earlier is not None and set(plan.placements) != {Placement.GPU_RESIDENT}:
            kept = earlier.division.slots, earlier.division.residents, earlier.division.blocks
            alike = [each for each in divisions(workload) if (each.slots, each.residents, each.blocks) == kept]
            most = best.cost + self._tolerance * max(best.cost, UNSEEN * (answers.compute_s + best.cost))
            for division in (earlier.division, *alike):
                before = division.plan(workload, earlier.on_cpu)
                cost = answers.cost(division, earlier.on_cpu)
                if workload.has_room(before) and cost <= most:
                    best, plan = Choice(cost, division, earlier.on_cpu), before
                    break
        self._chosen = best
        return plan if plan != self._plan or self._plan is None else self._plan
