"""A machine with round rates for tests of the performance model."""

import dataclasses
import math

from perfmodel.hardware import HardwareProfile
from perfmodel.workload import Workload

ROUND = HardwareProfile(
    name="round",
    host_bandwidth=math.inf,
    cpu_update_rate=1.0,
    h2d_bandwidth=12.0,
    d2h_bandwidth=12.0,
    h2d_bandwidth_duplex=12.0,
    d2h_bandwidth_duplex=12.0,
    gpu_update_rate=4.0,
    copy_latency_s=0.0,
    launch_latency_s=0.0,
)
"""Per parameter: CPU update 1 s, prefetch and flush 1 s, GPU update 1/4 s, gradient and parameters 1/6 s."""


def machine(**rates: float) -> HardwareProfile:
    """The round machine but for these rates."""
    return dataclasses.replace(ROUND, **rates)


def work(n: int = 4, size: int = 12, **fields: float) -> Workload:
    """n equal subgroups in mixed precision."""
    return Workload.of_sizes([size] * n, **fields)


def with_disk(load: Workload, host_free_bytes: float, windows: int = 2) -> Workload:
    """The workload with host memory for state, of which each subgroup takes the bytes of its state."""
    loads = tuple(dataclasses.replace(each, host_bytes=each.state_bytes) for each in load.subgroups)
    fields = {"host_free_bytes": host_free_bytes, "windows": windows}
    return dataclasses.replace(load, subgroups=loads, **fields)
