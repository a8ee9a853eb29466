"""Plan on every built-in machine and compare: adaptive, the best stride, the best ratio, CPU-only, and the bound.

    python -m experiments.planner --json

Times are simulated, of the update beside a backward that copies gradients (`Scope.beside`), less that backward.
The first plan for a workload is the closed form's; the simulator improves on it call by call.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.command import Parser, table_of
from experiments.harness import Limit, finish, measuring, timed
from perfmodel.adaptive import AdaptivePlanner
from perfmodel.bounds import lower_bound
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.plan import Plan
from perfmodel.policies import cpu_only, static_ratio, stride
from perfmodel.simulate import Scope, exposed, simulate
from perfmodel.workload import Workload

SUBGROUPS = (10, 50, 100, 128, 1000)
SUBGROUP_PARAMS = 50_000_000


class Budget(NamedTuple):
    """Memory that a plan may use.

    share: of the state that may be resident. slots: that fit beside it; None: they take their memory from it.
    forward: beside which the update ends, over the CPU-only update.
    """

    share: float
    slots: int | None
    forward: float = 0.0


BUDGETS = {
    "slot": Budget(0.0, 1),
    "slots": Budget(0.0, 2),
    "tenth": Budget(0.1, 4),
    "fifth": Budget(0.2, 6),
    "shared": Budget(0.2, None),
    "forward": Budget(0.2, None, forward=0.25),
}
OTHERS = ("best_stride_s", "best_ratio_s", "cpu_only_s")
"""Times of other policies in a row."""
LOOSE = ("slot", "shared", "forward")
"""Where the bound is loose: a single slot's turns, two uses of one memory and the order of layers are not in it."""
BACKWARD_SHARE = 0.5
"""Backward over the CPU-only update; about what the published runs have."""
MAX_STRIDE = 12
CALL_LIMIT_S = 5e-3
"""For what planning adds to one hook or step(), in the median of the machines."""
SEARCH_LIMIT_S = 50e-3
"""For all calls until the plan is the final one, however many subgroups there are; in the median, too."""
FIRST = 1.10
"""Times the best of all policies that the first plan may take, in FIRST_SHARE of the comparisons."""
FIRST_SHARE = 0.9
CACHED_LIMIT_S = 50e-6


def workload(profile: HardwareProfile, n: int, budget: Budget) -> Workload:
    """n equal subgroups with the memory of a budget, beside compute in proportion to the update."""
    alone = Workload.of_sizes([SUBGROUP_PARAMS] * n)
    update_s = simulate(cpu_only(alone), alone, profile).makespan
    free = budget.share * n * alone.slot_bytes
    return dataclasses.replace(
        alone,
        forward_s=budget.forward * update_s,
        backward_s=BACKWARD_SHARE * update_s,
        peak_free_bytes=free,
        update_free_bytes=math.inf if budget.slots is None else budget.slots * alone.slot_bytes,
        shared_free_bytes=free if budget.slots is None else math.inf,
    )


def fixed_plans(work: Workload, budget: Budget) -> tuple[list[Plan], list[Plan]]:
    """Strides and ratios that have the memory. Strides come with no and with all residents for which there is room."""
    n = len(work.subgroups)
    ratios = sorted({1.0, 1.0 - budget.share, *(tenth / 10 for tenth in range(11))})
    strides = [
        stride(work, k, ratio=ratio, slots=s)
        for k in range(1, min(n, MAX_STRIDE) + 1)
        for s in sorted({2, budget.slots or 4})
        for ratio in {1.0, 1.0 - budget.share if budget.slots else min(1.0, 1.0 - budget.share + s / n)}
    ]
    return list(filter(work.has_room, strides)), list(filter(work.has_room, (static_ratio(work, r) for r in ratios)))


def planned(work: Workload, profile: HardwareProfile) -> tuple[Plan, Plan, list[float]]:
    """The first plan and the final one, and the processor's seconds of each call until that is there."""
    planner = AdaptivePlanner()
    calls = [timed(partial(planner, work, profile), time.thread_time)]
    first = planner(work, profile)
    while not planner.settled:
        calls.append(timed(planner.learn, time.thread_time))
    return first, planner(work, profile), calls


def row(profile: HardwareProfile, n: int, name: str) -> dict[str, Any]:
    """One comparison, with the budget of that name; times in seconds.

    first_s: with the first plan, adaptive_s: with the final one. plan_s: the longest call of `AdaptivePlanner` until
    then. search_s: all of them. Each call's is the least of 5: the one that other work on the machine disturbed least.
    """
    work = workload(profile, n, BUDGETS[name])
    scope = Scope.beside(work)

    def seconds(plan: Plan) -> float:
        return exposed(plan, work, profile, scope)

    first, plan, _ = planned(work, profile)
    spent = [min(same) for same in zip(*(planned(work, profile)[2] for _ in range(5)), strict=True)]
    strides, ratios = fixed_plans(work, BUDGETS[name])
    return {
        "profile": profile.name,
        "n": n,
        "memory_budget": name,
        "plan_s": max(spent),
        "search_s": sum(spent),
        "calls": len(spent),
        "first_s": seconds(first),
        "adaptive_s": seconds(plan),
        "best_stride_s": min(map(seconds, strides), default=math.inf),
        "best_ratio_s": min(map(seconds, ratios)),
        "cpu_only_s": seconds(cpu_only(work)),
        "bound_s": lower_bound(work, profile, scope).seconds,
    }


def limits(rows: Sequence[dict[str, Any]]) -> list[Limit]:
    """Within 1% of every other policy, 5% of a bound that is tight, first plans, planning times.

    The bound is tight from 50 subgroups on. Planning times are medians over machines, by subgroups and budget.
    """
    found = []
    if over := sorted(r["first_s"] / min(r[policy] for policy in ("adaptive_s", *OTHERS)) for r in rows):
        name = f"first plan over the best of all policies, in {FIRST_SHARE:.0%} of the comparisons"
        found.append(Limit.at_most(name, over[math.ceil(FIRST_SHARE * len(over)) - 1], FIRST))
    for r in rows:
        where = f"{r['profile']}, {r['n']} subgroups, {r['memory_budget']}: adaptive over"
        found += [Limit.at_most(f"{where} {other}", r["adaptive_s"] / r[other], 1.01) for other in OTHERS]
        if r["n"] >= 50 and r["memory_budget"] not in LOOSE:
            found.append(Limit.at_most(f"{where} bound", r["adaptive_s"] / r["bound_s"], 1.05))
    for n, budget in sorted({(r["n"], r["memory_budget"]) for r in rows}):
        alike = [r for r in rows if (r["n"], r["memory_budget"]) == (n, budget)]
        for key, limit in (("plan_s", CALL_LIMIT_S), ("search_s", SEARCH_LIMIT_S)):
            median = statistics.median(r[key] for r in alike)
            found.append(Limit.at_most(f"{n} subgroups, {budget}: median {key}", median, limit))
    return found


def cached_s() -> float:
    """Seconds in which unchanged inputs, of 1,000 subgroups, return the last plan."""
    profile = HardwareProfile.builtin("h100")
    work = workload(profile, 1000, BUDGETS["slots"])
    planner = AdaptivePlanner()
    planner(work, profile)
    while not planner.settled:
        planner.learn()
    unchanged = [dataclasses.replace(work) for _ in range(7)]
    return min(timed(partial(planner, again, profile), time.thread_time) for again in unchanged)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status, 1 when a figure is missed."""
    profiles = builtin_profiles()
    parser = Parser("planner", __doc__)
    parser.add_json()
    parser.add_argument("--profile", action="append", choices=profiles, help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    with measuring(options.json, emulated=False) as (console, progress):
        rows = []
        for name in options.profile or profiles:
            progress(name)
            rows += [row(profiles[name], n, budget) for n in SUBGROUPS for budget in BUDGETS]
        cached = Limit.at_most("seconds in which unchanged inputs return the last plan", cached_s(), CACHED_LIMIT_S)
    console.print(table_of("Seconds of an update, and of planning it", rows))
    found = [*limits(rows), cached]
    for limit in found:
        if limit.missed:
            console.print(f"{limit.name}: {limit.measured:.4g}, {limit.allowed}")
    console.print(f"unchanged inputs: {1e6 * (cached.measured or 0):.1f} us")
    return finish({"rows": rows}, console, options.json, found)


if __name__ == "__main__":
    sys.exit(main())
