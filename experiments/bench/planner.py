"""Plan on every built-in machine and compare: adaptive, the best stride, the best ratio, CPU-only, and the bound.

    python -m experiments.planner --json

Times are simulated, of the update beside a backward that copies gradients (`Scope.beside`), less that backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.command import Parser, table_of
from experiments.harness import Limit, finish, measuring, timed
from perfmodel.adaptive import AdaptivePlanner, adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import CODED, MIXED
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.plan import Plan
from perfmodel.policies import cpu_only, static_ratio, stride
from perfmodel.simulate import Scope, exposed, simulate
from perfmodel.workload import BlockLoad, SavedTensors, Workload

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


class Kind(NamedTuple):
    """What else a workload has, beside exact state and gradients on the device."""

    offloads: bool = False
    int8: bool = False
    saved: bool = False
    blocks: bool = False


KINDS = {
    "plain": Kind(),
    "offload": Kind(offloads=True),
    "int8": Kind(int8=True),
    "int8, offload": Kind(int8=True, offloads=True),
    "saved": Kind(saved=True),
    "saved, offload": Kind(saved=True, offloads=True),
    "weights": Kind(offloads=True, blocks=True),
    "weights, int8, saved": Kind(offloads=True, int8=True, saved=True, blocks=True),
}
KIND_SUBGROUPS = 50
"""Subgroups of all kinds but the plain one."""
KIND_BUDGETS = ("tenth", "shared", "forward")
"""Their budgets; of saved tensors and of weights only the last one, for they are compared by their forward."""
LAYERS = 24
"""Groups of saved tensors, a third of all state together; blocks that may stream."""
OTHERS = ("best_stride_s", "best_ratio_s", "cpu_only_s")
"""Times of other policies in a row."""
LOOSE = ("slot", "shared", "forward")
"""Where the bound is loose: a single slot's turns, two uses of one memory and the order of layers are not in it."""
BACKWARD_SHARE = 0.5
"""Backward over the CPU-only update; about what the published runs have."""
MAX_STRIDE = 12
CALL_LIMIT_S = 30e-3
"""For a plan for memory and compute that were not seen before, in the median of the machines."""
CACHED_LIMIT_S = 50e-6


def workload(profile: HardwareProfile, n: int, budget: Budget, kind: Kind = KINDS["plain"]) -> Workload:
    """n equal subgroups with the memory of a budget, beside compute in proportion to the update."""
    plain = Workload.of_sizes([SUBGROUP_PARAMS] * n, CODED if kind.int8 else MIXED)
    update_s = simulate(cpu_only(plain), plain, profile).makespan
    load = plain.subgroups[0]
    each, passing = load.parameter_bytes * n // LAYERS, 0
    if kind.offloads:
        load = dataclasses.replace(load, returned_bytes=load.gradient_bytes)
        passing = load.returned_bytes + load.parameter_bytes * kind.blocks
    edges = [1 + b * (n - 2) // LAYERS for b in range(LAYERS + 1)]
    blocks = tuple(BlockLoad(each, *part) for part in itertools.pairwise(edges)) if kind.blocks else ()
    saved = int(plain.state_bytes / 3 / LAYERS)
    activations = tuple(SavedTensors(saved, (g + 1) / LAYERS, 1 - g / LAYERS) for g in range(LAYERS))
    work = Workload((load,) * n, blocks=blocks, passing_bytes=passing, activations=activations if kind.saved else ())
    free = budget.share * n * work.slot_bytes + work.weight_bytes(())
    return dataclasses.replace(
        work,
        forward_s=budget.forward * update_s,
        backward_s=BACKWARD_SHARE * update_s,
        peak_free_bytes=free,
        update_free_bytes=math.inf if budget.slots is None else budget.slots * (work.slot_bytes + passing),
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


def row(profile: HardwareProfile, n: int, name: str, kind: str = "plain") -> dict[str, Any]:
    """One comparison, with the budget and the kind of these names; times in seconds.

    plan_s: the processor's, of a plan that was not asked for before; the least of 5, the one that other work on the
    machine disturbed least.
    """
    work = workload(profile, n, BUDGETS[name], KINDS[kind])
    scope = Scope.beside(work)

    def seconds(plan: Plan) -> float:
        return exposed(plan, work, profile, scope)

    strides, ratios = fixed_plans(work, BUDGETS[name])
    return {
        "profile": profile.name,
        "n": n,
        "memory_budget": name,
        "kind": kind,
        "plan_s": min(timed(partial(adaptive, work, profile), time.thread_time) for _ in range(5)),
        "adaptive_s": seconds(adaptive(work, profile)),
        "best_stride_s": min(map(seconds, strides), default=math.inf),
        "best_ratio_s": min(map(seconds, ratios), default=math.inf),
        "cpu_only_s": seconds(cpu_only(work)),
        "bound_s": lower_bound(work, profile, scope).seconds,
        "compute_s": scope.compute_s(work),
    }


def limits(rows: Sequence[dict[str, Any]]) -> list[Limit]:
    """Within 1% of every other policy, none below the bound, 5% of a bound that is tight, planning times.

    The bound is tight from 50 subgroups on, of the plain kind. Where transfers hide behind compute, times are those of
    the iteration. Planning times are medians over machines, by subgroups and budget.
    """
    found = []
    for r in rows:
        where = f"{r['profile']}, {r['n']} subgroups, {r['memory_budget']}, {r['kind']}:"
        compute_s = 0.0 if r["kind"] == "plain" else r["compute_s"]
        for other in OTHERS:
            ratio = (compute_s + r["adaptive_s"]) / (compute_s + r[other])
            found.append(Limit.at_most(f"{where} adaptive over {other}", ratio, 1.01))
        least = min(r[policy] for policy in ("adaptive_s", *OTHERS))
        below = (r["compute_s"] + r["bound_s"]) / (r["compute_s"] + least)
        found.append(Limit.at_most(f"{where} bound over the best policy", below, 1 + 1e-6))
        if r["kind"] == "plain" and r["n"] >= 50 and r["memory_budget"] not in LOOSE:
            found.append(Limit.at_most(f"{where} adaptive over bound", r["adaptive_s"] / r["bound_s"], 1.05))
    for n, budget, kind in sorted({(r["n"], r["memory_budget"], r["kind"]) for r in rows}):
        alike = [r["plan_s"] for r in rows if (r["n"], r["memory_budget"], r["kind"]) == (n, budget, kind)]
        name = f"{n} subgroups, {budget}, {kind}: median plan_s"
        found.append(Limit.at_most(name, statistics.median(alike), CALL_LIMIT_S))
    return found


def rows_of(profile: HardwareProfile) -> Iterator[dict[str, Any]]:
    """All comparisons on one machine."""
    for n, budget in itertools.product(SUBGROUPS, BUDGETS):
        yield row(profile, n, budget)
    for (name, kind), budget in itertools.product(KINDS.items(), KIND_BUDGETS):
        if name != "plain" and (budget == "forward" or not (kind.saved or kind.blocks)):
            yield row(profile, KIND_SUBGROUPS, budget, name)


def cached_s() -> float:
    """Seconds in which unchanged inputs, of 1,000 subgroups, return the last plan."""
    profile = HardwareProfile.builtin("h100")
    work = workload(profile, 1000, BUDGETS["slots"])
    planner = AdaptivePlanner()
    planner(work, profile)
    unchanged = [dataclasses.replace(work) for _ in range(7)]
    return min(timed(partial(planner, again, profile), time.thread_time) for again in unchanged)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status, 1 when a figure is missed."""
    profiles = builtin_profiles()
    parser = Parser("planner", __doc__)
    parser.add_argument("--profile", action="append", choices=profiles, help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    with measuring(options.json, emulated=False) as (console, progress):
        rows: list[dict[str, Any]] = []
        for name in options.profile or profiles:
            progress(name)
            rows += rows_of(profiles[name])
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
