"""Decides where subgroups are updated: pure functions of what is known, no device and no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from perfmodel import Plan, Workload
from perfmodel.policies import cpu_only, static_ratio, stride

Policy = Callable[[Workload], Plan]

_KNOWN = (
    "'cpu', 'stride:K' with K of 1 or more, a ratio in [0, 1] (the share on the CPU), or a callable Workload -> Plan"
)


def resolve_policy(policy: str | float | Policy) -> Policy:
    """The function behind what a user passes as `policy`.

    Raises ValueError for an unknown name, a stride below 1 or a ratio outside [0, 1], TypeError for another type.
    """
    if callable(policy):
        return policy
    if isinstance(policy, (int, float)) and not isinstance(policy, bool):
        if not 0.0 <= policy <= 1.0 or math.isnan(policy):
            raise ValueError(f"policy: a ratio is the share updated on the CPU and lies in [0, 1], found {policy}")
        return partial(static_ratio, ratio=float(policy))
    if not isinstance(policy, str):
        raise TypeError(f"policy: expected {_KNOWN}, found {policy!r}")
    name, _, argument = policy.partition(":")
    if name == "cpu" and not argument:
        return cpu_only
    if name == "stride":
        try:
            k = int(argument)
        except ValueError:
            raise ValueError(f"policy: expected a whole number after 'stride:', found {policy!r}") from None
        if k < 1:
            raise ValueError(f"policy: a stride is 1 or more (2: every second subgroup on the GPU), found {policy!r}")
        return partial(stride, k=k)
    raise ValueError(f"policy: expected {_KNOWN}, found {policy!r}")


class Controller:
    """Asks the policy for a plan when the workload has changed, and remembers the last one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: tuple[Workload, Plan] | None = None

    def plan(self, workload: Workload) -> Plan:
        """The plan for this iteration. Raises TypeError or ValueError if the policy returns something else."""
        if self._last is not None and self._last[0] == workload:
            return self._last[1]
        plan = self._policy(workload)
        if not isinstance(plan, Plan):
            raise TypeError(f"the policy must return a perfmodel.Plan, found {type(plan).__name__}")
        if len(plan) != len(workload.subgroups):
            raise ValueError(
                f"the policy returned a plan of {len(plan)} subgroups for a workload of {len(workload.subgroups)}"
            )
        self._last = workload, plan
        return plan
