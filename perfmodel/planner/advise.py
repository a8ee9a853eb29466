"""The planner's answer: what each policy would take, what more would buy, and the largest model that fits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from perfmodel.bounds import Bound, lower_bound
from perfmodel.plan import Placement
from perfmodel.planner.disk import Traffic
from perfmodel.planner.outcome import Outcome, adaptive_outcome, baselines
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.whatif import Lever, Remedy, largest, levers, most, remedies


@dataclass(frozen=True)
class Advice:
    """The answer to a question. Each part is computed when it is first asked for."""

    situation: Situation

    @functools.cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Of all policies, adaptive last; with parameters on the host, only the one there is."""
        return (*(baselines(self.situation) if self._placed else ()), self.best)

    @functools.cached_property
    def bound(self) -> Bound | None:
        """Of the update alone; None if nothing fits, or the update is where it has to be."""
        situation = self.situation
        return lower_bound(situation.update_workload, situation.profile) if situation.fits and self._placed else None

    @functools.cached_property
    def levers(self) -> tuple[Lever, ...]:
        """What would help."""
        return tuple(levers(self.situation.question, self.best))

    @functools.cached_property
    def largest(self) -> int:
        """Parameters of the largest model of the usual shape that would fit; 0 if none does."""
        return largest(self.situation.question)

    @functools.cached_property
    def largest_batch(self) -> int:
        """Of this model, with sequences as they are; 0 if nothing fits."""
        return most(self.situation.question, "batch")

    @functools.cached_property
    def largest_sequence(self) -> int:
        """Of this model, with the batch as it is; 0 if nothing fits."""
        return most(self.situation.question, "sequence", self.situation.question.model.longest)

    @property
    def all_resident_bytes(self) -> int | None:
        """Device memory with which all optimizer state stays on the device; None if it never does."""
        needed = self.situation.peak + self.situation.update_workload.state_bytes
        return math.ceil(needed / (1 - MARGIN)) if self._placed else None

    @functools.cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """If it does not fit, settings with which it does, the best first."""
        return () if self.situation.fits else tuple(remedies(self.situation.question))

    @functools.cached_property
    def best(self) -> Outcome:
        """The adaptive policy's."""
        return adaptive_outcome(self.situation)

    @property
    def alternative(self) -> Outcome | None:
        """The fastest of the policies that fit and are not adaptive; None if there is none."""
        fitting = [outcome for outcome in self.outcomes[:-1] if outcome.fits]
        return min(fitting, key=lambda outcome: outcome.seconds, default=None)

    @property
    def resident_bytes(self) -> int:
        """Optimizer state of one rank that stays on the device with the best plan."""
        if self.best.plan is None:
            return 0
        loads = self.situation.update_workload.subgroups
        return sum(loads[i].state_bytes for i in self.best.plan.served(Placement.GPU_RESIDENT))

    @property
    def on_disk_bytes(self) -> int:
        """Optimizer state of one rank that rests on disk with the best plan."""
        loads = self.situation.update_workload.subgroups
        return sum(loads[i].state_bytes for i in self.best.plan.on_disk) if self.best.plan else 0

    @property
    def written_bytes(self) -> float:
        """What all ranks of a node write to disk in a step with the best plan."""
        situation = self.situation
        if self.best.plan is None:
            return 0.0
        traffic = Traffic.of(self.best.plan, situation.update_workload, situation.profile)
        return traffic.moved_bytes * situation.question.layout.per_node

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs together; None if nothing fits, or the compute is not known."""
        if self.best.iteration_s is None:
            return None
        question = self.situation.question
        return question.tokens * question.micro_batches * question.ranks / self.best.iteration_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds for which each resource works in an iteration; empty if that is not known."""
        plan, situation = self.best.plan, self.situation
        return {} if plan is None else situation.job.busy_s(plan, situation.update_workload)

    @property
    def limit(self) -> str:
        """What limits the job: memory that it does not fit into, else the resource that works longest.

        Empty if the compute is not known.
        """
        if not self.situation.fits_device:
            return "memory on the device"
        if not self.situation.fits_host:
            return "host memory"
        if not self.situation.fits_disk:
            return "room on disk"
        return max(self.busy_s, key=self.busy_s.__getitem__, default="")

    @property
    def _placed(self) -> bool:
        """Whether there is a choice of where to update."""
        return not self.situation.question.offload_parameters


def advise(question: Question) -> Advice:
    """Everything the planner has to say; every time in it is simulated, every size counted."""
    return Advice(Situation(question))
