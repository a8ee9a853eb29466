"""Simulation of a plan on a machine: when each transfer and update runs, for an update or a whole iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, LANES, Stream, Tasks
from perfmodel.plan import Plan
from perfmodel.schedule import Schedule, schedule
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.timeline import Lane, Op, Span, Timeline
from perfmodel.workload import SubgroupLoad, Workload

__all__ = ["UPDATE_ALONE", "Costs", "Phase", "Scope", "exposed", "makespan", "serve", "simulate"]

Cost = tuple[float, float]
"""What a task costs its lane alone: seconds, and bytes of host DRAM traffic."""


@dataclass(frozen=True)
class Costs:
    """What one subgroup costs each lane alone."""

    gradient: Cost
    cpu_update: Cost
    parameter: Cost
    prefetch: Cost
    gpu_update: Cost
    flush: Cost

    @classmethod
    def of(cls, load: SubgroupLoad, profile: HardwareProfile) -> Costs:
        """Of all its operations."""
        return cls(
            gradient=_cost(Stream.GRADIENT, load.gradient_bytes, profile),
            cpu_update=_host_update(load.numel, load, profile),
            parameter=_cost(Stream.PARAMETER, load.parameter_bytes, profile),
            prefetch=_cost(Stream.PREFETCH, load.state_bytes, profile),
            gpu_update=_device_update(load.numel, load, profile),
            flush=_cost(Stream.FLUSH, load.state_bytes, profile),
        )


def _cost(stream: Stream, size: int, profile: HardwareProfile) -> Cost:
    """Of a copy of so many bytes, or an update of so many parameters on the device."""
    lane = LANES[LANE_OF_STREAM[stream]]
    return lane.seconds(size, profile), size * lane.through_host


def _host_update(numel: int, load: SubgroupLoad, profile: HardwareProfile) -> Cost:
    """Of some parameters of a subgroup, or all."""
    traffic = load.cpu_traffic * profile.cpu_traffic_factor
    if numel != load.numel:
        traffic *= numel / load.numel
    return LANES[Lane.CPU].seconds(numel / profile.speed(Lane.CPU, load.format), profile), traffic


def _device_update(numel: int, load: SubgroupLoad, profile: HardwareProfile) -> Cost:
    """The same on the device."""
    return LANES[Lane.GPU].seconds(numel / profile.speed(Lane.GPU, load.format), profile), 0.0


def simulate(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> Timeline:
    """The timeline of one plan; the same for the same arguments, always.

    Origin: the start of `step()`, or of backward if the scope has it.
    Raises ValueError when the plan is of another number of subgroups.
    """
    return serve(schedule(plan, workload, scope), workload, profile)


def serve(schedule: Schedule, workload: Workload, profile: HardwareProfile) -> Timeline:
    """The timeline of one schedule, served in the order of `lanes.Tasks.serve`."""
    return Timeline.of(_spans(schedule, _served(schedule, workload, profile)))


def makespan(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds that `simulate` would take from first start to last end, without its timeline."""
    return max(_served(schedule(plan, workload, scope), workload, profile).end)


def exposed(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds by which the optimizer makes the compute in the scope longer; of the update alone, all of it."""
    return makespan(plan, workload, profile, scope) - scope.compute_s(workload)


def _served(schedule: Schedule, workload: Workload, profile: HardwareProfile) -> Tasks:
    """The tasks with what they cost, served."""
    served, numel, loads, cpu = Tasks(), max(workload.numel, 1), workload.subgroups, Stream.CPU
    costs: list[dict[int, Cost]] = [{} for _ in Stream]
    for op, stream, subgroup, size, after, _, _ in schedule.tasks:
        if subgroup is None:
            cost = (workload.backward_s if op is Op.BACKWARD else workload.forward_s) * (size / numel), 0.0
        elif stream is cpu:
            cost = _host_update(size, loads[subgroup], profile)
        elif stream is Stream.GPU:
            cost = _device_update(size, loads[subgroup], profile)
        else:
            known = costs[stream].get(size)
            cost = known or costs[stream].setdefault(size, _cost(stream, size, profile))
        served.add(stream, *cost, after)
    served.serve(profile)
    return served


def _spans(schedule: Schedule, served: Tasks) -> Iterator[Span]:
    """The served tasks as spans; contiguous pieces of forward or backward become one span."""
    compute: Span | None = None
    for task, start, end in zip(schedule.tasks, served.start, served.end, strict=True):
        span = Span(LANE_OF_STREAM[task.stream], task.op, task.subgroup, start, end)
        if task.subgroup is not None:
            yield span
        elif compute is not None and compute.op is task.op and compute.end == span.start:
            compute = Span(span.lane, task.op, None, compute.start, span.end)
        else:
            if compute is not None:
                yield compute
            compute = span
    if compute is not None:
        yield compute
