"""Why state is not on the device though memory there is free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dos.deciding.policies import WORTH_A_CHANGE
from dos.memory.monitor import SPARE_TO_GROW, TOO_LITTLE
from perfmodel import Placement, Plan, Workload
from perfmodel.adaptive import adaptive
from perfmodel.hardware import HardwareProfile


def unused(
    plan: Plan, workload: Workload, profile: HardwareProfile | None, withheld: Sequence[tuple[int, str]]
) -> list[str]:
    """Lines that say for what memory is that state could have, and what to do if nothing fits.

    workload: for which the plan was made. profile: None if the policy asks for none.
    withheld: see MemoryMonitor.
    """
    loads = workload.subgroups
    away = [load for load, p in zip(loads, plan.placements, strict=True) if p is not Placement.GPU_RESIDENT]
    if not away:
        return []
    reasons: list[tuple[float, str]] = list(withheld)
    rest = min(workload.peak_free_bytes, workload.state_bytes) - _resident_bytes(plan, workload)
    if profile is not None:
        beyond = workload.shared_free_bytes - workload.peak_free_bytes  # is free in the update alone
        staged = min(rest, plan.slots * workload.slot_bytes - max(0, beyond))
        if staged > 0:
            reasons += [(staged, f"for {plan.slots} staging slots")]
            rest -= staged
    if rest >= min(load.state_bytes for load in away):
        reasons += [(rest, _why_not_resident(plan, workload, profile))]
    lines = [f"Kept from state: {', '.join(f'{size_of(n)} {why}' for n, why in reasons)}"] if reasons else []
    room = sum(nbytes for nbytes, why in withheld if why == TOO_LITTLE)
    if workload.shared_free_bytes == 0 < room:
        most = max(loads, key=lambda load: load.state_bytes)
        numel = int(room / (1 + SPARE_TO_GROW) * most.numel / most.state_bytes)
        advice = f"choose subgroup_size={numel:_} or less" if numel else "that of one parameter does not fit either"
        lines += [
            f"Nothing fits: a subgroup of {most.numel:,} parameters takes {size_of(most.state_bytes)} and "
            f"{size_of(room)} may be used; {advice}"
        ]
    return lines


def size_of(nbytes: float) -> str:
    """Bytes for people."""
    if not math.isfinite(nbytes):
        return "unlimited memory"
    for unit, each in ("GiB", 2**30), ("MiB", 2**20):
        if nbytes >= each / 10:
            return f"{nbytes / each:.2f} {unit}"
    return f"{nbytes / 2**10:.2f} KiB"


def _resident_bytes(plan: Plan, workload: Workload) -> int:
    return sum(workload.subgroups[i].state_bytes for i in plan.served(Placement.GPU_RESIDENT))


def _why_not_resident(plan: Plan, workload: Workload, profile: HardwareProfile | None) -> str:
    """Of state for which there is room."""
    if profile is None:
        return "as this policy does not use it"
    best = adaptive(workload, profile)
    if _resident_bytes(best, workload) > _resident_bytes(plan, workload):
        return f"as the plan of before is at most {WORTH_A_CHANGE:.0%} slower"
    return "as the step would not be faster"
