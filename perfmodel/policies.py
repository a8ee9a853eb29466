"""Placement policies: pure functions from a Workload to a Plan."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate

from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Placement, Plan
from perfmodel.workload import SubgroupLoad, Workload

DEFAULT_SLOTS = 2
"""One slot is updated or flushed while the other is prefetched."""
GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def cpu_only(workload: Workload) -> Plan:
    """Every subgroup on the CPU: ZeRO-Offload (Ren et al., USENIX ATC '21)."""
    return stride(workload, None)


def resident(workload: Workload) -> Plan:
    """Every subgroup on the GPU, as an optimizer without offloading has it."""
    return stride(workload, None, ratio=0.0)


def static_ratio(workload: Workload, ratio: float) -> Plan:
    """The share `ratio` of the parameters on the CPU, the rest resident on the GPU: Twin-Flow (DeepSpeed-Offload++).

    Leading subgroups are resident, as many as fit into the share 1 - ratio, to the nearest subgroup. With one
    subgroup the result is therefore all or nothing; choose smaller subgroups for a finer split.
    Raises ValueError for a ratio outside [0, 1].
    """
    return stride(workload, None, ratio=ratio)


def stride(workload: Workload, k: int | None, *, ratio: float = 1.0, slots: int = DEFAULT_SLOTS) -> Plan:
    """Every k-th subgroup streamed to the GPU, the others on the CPU: Deep Optimizer States (Maurya et al. 2024).

    k = 1 streams all, k = 2 every other one, beginning with the first so that the GPU starts at once;
    None streams none. The leading share 1 - ratio of the parameters is resident beforehand, as in Twin-Flow.
    Raises ValueError for k below 1 or a ratio outside [0, 1].
    """
    if k is not None and k < 1:
        raise ValueError(f"stride must be 1 or more (2: every second subgroup on the GPU), found {k}")
    resident = _leading_share(workload, ratio)
    n = len(workload.subgroups)

    def placement(i: int) -> Placement:
        if i < resident:
            return Placement.GPU_RESIDENT
        return Placement.GPU_STREAMED if k is not None and (i - resident) % k == 0 else Placement.CPU

    placements = tuple(placement(i) for i in range(n))
    plan = Plan(placements, tuple(range(n)), slots=min(slots, placements.count(Placement.GPU_STREAMED)))
    return with_blocks(plan, workload)


def with_blocks(plan: Plan, workload: Workload) -> Plan:
    """The plan with the weights of as many blocks on the device as have room beside its state and slots."""
    if not workload.blocks:
        return plan
    moved = max(plan.activation_bytes, workload.activation_least_bytes)
    shared = workload.shared_free(moved) - workload.staged_bytes(plan)
    resident = workload.state_bytes_of(plan.served(Placement.GPU_RESIDENT))
    counts = workload.block_counts(min(workload.peak_free(moved), shared) - resident)
    return dataclasses.replace(plan, blocks_on_device=workload.staying(counts[-1]))


def spilled(plan: Plan, workload: Workload) -> Plan:
    """The plan with as many subgroups on disk as do not fit into the host memory that is free for state.

    A fixed priority says which. It spreads them evenly over all subgroups and over those of a stride, and if one more
    has to go or can come back, the others stay where they are.
    """
    on_host = [i for i, placement in enumerate(plan.placements) if placement is not Placement.GPU_RESIDENT]
    excess = sum(workload.subgroups[i].host_bytes for i in on_host) - workload.host_free_bytes
    on_disk = set()
    # Multiples of the golden ratio, modulo 1: any number of the least of them are evenly spread.
    for i in sorted(on_host, key=lambda i: i * GOLDEN_RATIO % 1) if excess > 0 else ():
        if excess <= 0:
            break
        on_disk.add(i)
        excess -= workload.subgroups[i].host_bytes
    return plan if on_disk == plan.on_disk else dataclasses.replace(plan, on_disk=frozenset(on_disk))


def balanced_stride(load: SubgroupLoad, profile: HardwareProfile) -> int:
    """The stride at which the GPU keeps up with the CPU: a closed form from rates, after Maurya et al. 2024.

    In the steady state, while the CPU updates k - 1 subgroups, one is updated on the GPU, the next is prefetched and
    the previous one flushed. Both directions of the link run at once, so the GPU's part takes the slower of prefetch
    and flush, and the update. The CPU does not wait if

        (k - 1) cpu_update >= max(prefetch, flush) + gpu_update

    and the smallest such k, 2 at least, has most subgroups on the GPU. Links count at their duplex rates, the CPU at no
    more than its share of host DRAM. The closed form leaves out that transfers take some of that.
    """
    prefetch = load.state_bytes / profile.h2d_bandwidth_duplex + profile.copy_latency_s
    flush = load.state_bytes / profile.d2h_bandwidth_duplex + profile.copy_latency_s
    cpu_s, traffic = demand(Placement.CPU, load, profile)[Stream.CPU]
    gpu_s = demand(Placement.GPU_RESIDENT, load, profile)[Stream.GPU].seconds
    cpu_s = max(cpu_s, traffic / profile.host_bandwidth_per_rank)
    return 1 + max(1, math.ceil((max(prefetch, flush) + gpu_s) / cpu_s))


def _leading_share(workload: Workload, cpu_ratio: float) -> int:
    """The number of leading subgroups that come nearest to holding the share 1 - cpu_ratio of the parameters."""
    if not 0.0 <= cpu_ratio <= 1.0:
        raise ValueError(f"ratio is the share of the state on the CPU and must lie in [0, 1], found {cpu_ratio}")
    target = (1.0 - cpu_ratio) * workload.numel
    held = accumulate((load.numel for load in workload.subgroups), initial=0)
    return sum(before + load.numel / 2 <= target for before, load in zip(held, workload.subgroups, strict=False))
