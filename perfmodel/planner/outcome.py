"""Outcomes of policies in a situation: the plan of each, and how long it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from perfmodel.adaptive import adaptive
from perfmodel.format import float32
from perfmodel.plan import Placement, Plan
from perfmodel.planner.situation import Situation
from perfmodel.policies import DEFAULT_SLOTS, balanced_stride, cpu_only, resident, spilled, static_ratio, stride
from perfmodel.simulate import Phase

FUSED, CPU_ONLY = "fused AdamW", "CPU only"
"""Names of two policies."""
RATIOS_TRIED = 12
"""Ratios between nothing and all that fits being resident."""


def by_label(shares: Mapping[Placement, float]) -> dict[str, float]:
    """Shares of the parameters with the names of placements in reports."""
    return {placement.label: share for placement, share in shares.items()}


@dataclass(frozen=True)
class Outcome:
    """A policy's plan and its times, in seconds; None where it does not fit.

    exposed_s: by which the optimizer makes the iteration longer.
    shares: of the parameters by placement.
    """

    policy: str
    plan: Plan | None
    update_s: float | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None
    shares: dict[Placement, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether there is the memory for it."""
        return self.plan is not None

    @property
    def seconds(self) -> float:
        """Seconds of the iteration; infinite if it does not fit."""
        return math.inf if self.iteration_s is None else self.iteration_s

    def to_json(self) -> dict[str, Any]:
        """Return the fields; of the plan its number of slots."""
        rest = {"fits": self.fits, "shares": by_label(self.shares), "slots": self.plan and self.plan.slots}
        return {name: value for name, value in vars(self).items() if name != "plan"} | rest


def adaptive_outcome(situation: Situation) -> Outcome:
    """Outcome of DOSAdam's adaptive policy, which measures the compute that transfers can run beside.

    Parameters on the host are updated in place, under any policy.
    """
    if situation.question.offload_parameters:
        return _outcome("in place, on the host", situation, cpu_only(situation.update_workload))
    scope, beside = situation.scope, situation.iteration_workload
    work = dataclasses.replace(
        beside,
        forward_s=beside.forward_s if scope.forward is Phase.OVERLAPPED else 0.0,
        backward_s=0.0 if scope.backward is Phase.SERIAL else beside.backward_s,
    )
    # The forward and backward that DOSAdam measures have collectives in them, beside which less is worth while.
    plans = dict.fromkeys([adaptive(work, situation.profile), resident(work)])
    return min((_outcome("adaptive", situation, plan) for plan in plans), key=lambda outcome: outcome.seconds)


def outcomes(situation: Situation) -> list[Outcome]:
    """Outcomes of all policies, adaptive last; with parameters on the host, of the only one there is."""
    work, adapted = situation.update_workload, adaptive_outcome(situation)
    if situation.question.offload_parameters:
        return [adapted]
    # AdamW alone has float32 masters of 16-bit parameters.
    whole = work.numel * float32(situation.question.format.values).state_bytes
    everything, window = resident(work), work.weight_bytes(())
    whole += work.weight_bytes(everything.blocks_on_device) - window
    fits = int(whole) <= situation.room and len(everything.blocks_on_device) == len(work.blocks)
    k = balanced_stride(max(work.subgroups, key=lambda load: load.numel), situation.profile)
    slots = max(1, work.slots_within(work.shared_free_bytes - window, DEFAULT_SLOTS))
    return [
        _outcome(FUSED, situation, everything, fits),
        _outcome(CPU_ONLY, situation, cpu_only(work)),
        _best_ratio(situation),
        _outcome(f"stride {k} (paper)", situation, stride(work, k, slots=slots)),
        adapted,
    ]


def _best_ratio(situation: Situation) -> Outcome:
    """The fastest of some ratios whose resident state fits."""
    work = situation.update_workload
    held = accumulate((load.state_bytes for load in work.subgroups), initial=0)
    shares = [nbytes / work.state_bytes for nbytes in held if nbytes <= work.peak_free_bytes]
    tried = sorted({shares[round(i * (len(shares) - 1) / RATIOS_TRIED)] for i in range(RATIOS_TRIED + 1)})
    outcomes = [_outcome(f"best ratio, {1 - share:.2f}", situation, static_ratio(work, 1 - share)) for share in tried]
    return min(outcomes, key=lambda outcome: outcome.seconds)


def _outcome(policy: str, situation: Situation, plan: Plan, fits: bool | None = None) -> Outcome:
    """Outcome of a plan. fits: whether memory suffices, if its workload does not say that."""
    work = situation.update_workload
    plan = dataclasses.replace(plan, activation_bytes=max(plan.activation_bytes, situation.least_offloaded))
    plan = spilled(plan, work)
    if not (situation.fits and work.has_room(plan) if fits is None else fits):
        return Outcome(policy, None)
    iteration_s = situation.iteration_s(plan)
    return Outcome(
        policy,
        plan,
        situation.update_s(plan),
        iteration_s,
        max(0.0, iteration_s - situation.training_s),
        {place: sum(work.subgroups[i].numel for i in plan.served(place)) / work.numel for place in Placement},
    )
