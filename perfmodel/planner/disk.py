"""State on disk: what of it does not fit on the host, and what that asks of the drives."""

from __future__ import annotations

import math
from typing import NamedTuple

from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Plan
from perfmodel.windows import WINDOWS
from perfmodel.workload import Workload

DAY_S = 86_400


class Spill(NamedTuple):
    """What of one rank's state is on the host, at least, while none is on the device; the rest is on disk.

    numel: parameters of it. free_bytes: host memory for state; infinite if there is enough for all.
    windows: of one subgroup each, through which the rest passes. window_bytes: of them all.
    """

    numel: int
    free_bytes: float = math.inf
    windows: int = 0
    window_bytes: int = 0

    @classmethod
    def of(cls, numel: int, subgroup_size: int, parameter_bytes: float, free_bytes: float) -> Spill:
        """For `numel` parameters that take so many bytes each, with as much host memory for them and windows."""
        if numel * parameter_bytes <= free_bytes:
            return cls(numel)
        each = math.ceil(min(subgroup_size, numel) * parameter_bytes)
        left = max(0.0, free_bytes - WINDOWS * each)
        # Whole subgroups go to disk, and the last one may be among them, which is smaller than others.
        gone = math.ceil((numel * parameter_bytes - left) / each) * subgroup_size + numel % subgroup_size
        return cls(max(0, numel - gone), left, WINDOWS, WINDOWS * each)


class Traffic(NamedTuple):
    """What one rank moves in a step. moved_bytes: that it reads, and writes as well. busy_s: of the disk."""

    moved_bytes: float
    busy_s: float

    @classmethod
    def of(cls, plan: Plan, work: Workload, profile: HardwareProfile) -> Traffic:
        """With the plan; reading takes turns with writing, or runs beside it, whichever is faster."""
        loads = [work.subgroups[i] for i in plan.on_disk]
        kept = min(work.windows, len(loads)) if work.reverses else 0
        share = 1 - kept / len(loads) if loads else 0.0
        costs = [demand(plan.placements[i], work.subgroups[i], profile, on_disk=True) for i in plan.on_disk]
        read_s, write_s = (share * sum(cost[way].seconds for cost in costs) for way in (Stream.READ, Stream.WRITE))
        reads = profile.disk_read_bandwidth_duplex / profile.disk_read_bandwidth
        writes = profile.disk_write_bandwidth_duplex / profile.disk_write_bandwidth
        both_s = min(read_s / reads, write_s / writes)
        busy_s = read_s + write_s - max(0.0, reads + writes - 1) * both_s
        return cls(share * sum(load.state_bytes for load in loads), busy_s)
