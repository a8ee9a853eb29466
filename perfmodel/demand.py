"""The demand of each operation on its lane, and so the cost of a placement, for every part of the model."""

from __future__ import annotations

from typing import NamedTuple

from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, LANES, Stream
from perfmodel.plan import Placement
from perfmodel.workload import SubgroupLoad, Workload

OPERATIONS = {
    Placement.CPU: (
        (Stream.GRADIENT, "gradient_bytes"),
        (Stream.CPU, "numel"),
        (Stream.PARAMETER, "parameter_bytes"),
    ),
    Placement.GPU_STREAMED: (
        (Stream.PREFETCH, "state_bytes"),
        (Stream.GPU, "numel"),
        (Stream.FLUSH, "state_bytes"),
    ),
    Placement.GPU_RESIDENT: ((Stream.GPU, "numel"),),
}
"""The operations of each placement in their order, with the fields that say how large they are."""
THROUGH_DISK = (Stream.READ, "state_bytes"), (Stream.WRITE, "state_bytes")
"""The streams before and after them where state rests on disk."""


class Demand(NamedTuple):
    """The cost of an operation alone: seconds of its lane, and bytes of host DRAM traffic meanwhile."""

    seconds: float
    traffic: float

    @property
    def rate(self) -> float:
        """Bytes/s of host DRAM traffic alone."""
        return self.traffic / self.seconds if self.seconds > 0 else 0.0


def operation_demand(stream: Stream, size: int, load: SubgroupLoad, profile: HardwareProfile) -> Demand:
    """The demand of one operation on a subgroup or a part of it. size: bytes of a copy; parameters of an update."""
    lane = LANE_OF_STREAM[stream]
    service = LANES[lane]
    if service.through_host:
        return Demand(service.seconds(size, profile), size)
    seconds = service.seconds(size / profile.speed(lane, load.format), profile)
    if stream is not Stream.CPU:
        return Demand(seconds, 0.0)
    traffic = load.cpu_traffic * profile.cpu_traffic_factor
    return Demand(seconds, traffic if size == load.numel else traffic * (size / load.numel))


def demand(placement: Placement, load: SubgroupLoad, profile: HardwareProfile) -> dict[Stream, Demand]:
    """The demand of a subgroup with this placement on each stream's lane, where its state rests on host or device."""
    return {s: operation_demand(s, getattr(load, size), load, profile) for s, size in OPERATIONS[placement]}


def demands(load: SubgroupLoad, profile: HardwareProfile) -> dict[Stream, Demand]:
    """The demand of a subgroup on each stream's lane, whatever its placement, and on those of the disk."""
    operations = (*OPERATIONS[Placement.CPU], *OPERATIONS[Placement.GPU_STREAMED], *THROUGH_DISK)
    return {s: operation_demand(s, getattr(load, size), load, profile) for s, size in operations}


def speed_beside_updates(workload: Workload, profile: HardwareProfile) -> float:
    """The speed that compute keeps beside an update on the CPU, which makes the host late; 0: all of it."""
    late = workload.host_share * profile.slowdown
    return 1 / late if late > 1 else 0.0
