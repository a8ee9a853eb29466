"""Simulation of a plan on a machine: when each transfer and update runs, for an update or a whole iteration."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, LANES, Stream, Tasks
from perfmodel.plan import Placement, Plan
from perfmodel.timeline import Op, Span, Timeline
from perfmodel.workload import SubgroupLoad, Workload


class Phase(enum.Enum):
    """How the compute beside the update takes part in a simulation."""

    ABSENT = "absent"
    """It does not: the timeline has the update alone."""
    SERIAL = "serial"
    """It is in the timeline; no transfer of the optimizer runs beside it."""
    OVERLAPPED = "overlapped"
    """Transfers run beside it."""


@dataclass(frozen=True)
class Scope:
    """How much of an iteration is simulated; by default the update alone, all gradients still on the device.

    backward: overlapped, each gradient leaves when backward has made it (the last subgroup's first), and prefetches
        start as backward frees memory. Updates start after backward.
    forward: of the next iteration; overlapped, each subgroup's share of it waits for its own parameters only.
    """

    backward: Phase = Phase.ABSENT
    forward: Phase = Phase.ABSENT

    @classmethod
    def beside(cls, workload: Workload) -> Scope:
        """With all compute that the workload knows of, overlapped."""
        return cls(
            Phase.OVERLAPPED if workload.backward_s else Phase.ABSENT,
            Phase.OVERLAPPED if workload.forward_s else Phase.ABSENT,
        )

    def compute_s(self, workload: Workload) -> float:
        """Seconds of compute in the scope."""
        backward = 0.0 if self.backward is Phase.ABSENT else workload.backward_s
        return backward + (0.0 if self.forward is Phase.ABSENT else workload.forward_s)


UPDATE_ALONE = Scope()


@dataclass(frozen=True)
class Costs:
    """What one subgroup costs each lane alone, as (seconds, bytes of host DRAM traffic)."""

    gradient: tuple[float, float]
    cpu_update: tuple[float, float]
    parameter: tuple[float, float]
    prefetch: tuple[float, float]
    gpu_update: tuple[float, float]
    flush: tuple[float, float]

    @classmethod
    def of(cls, load: SubgroupLoad, profile: HardwareProfile) -> Costs:
        """Fixed cost plus size over rate. A copy moves its bytes through host DRAM once."""
        copy, launch = profile.copy_latency_s, profile.launch_latency_s
        cpu_s = launch + load.numel / profile.cpu_update_rate
        return cls(
            gradient=(copy + load.gradient_bytes / profile.d2h_bandwidth, load.gradient_bytes),
            cpu_update=(cpu_s, load.cpu_traffic * profile.cpu_traffic_factor),
            parameter=(copy + load.parameter_bytes / profile.h2d_bandwidth, load.parameter_bytes),
            prefetch=(copy + load.state_bytes / profile.h2d_bandwidth, load.state_bytes),
            gpu_update=(launch + load.numel / profile.gpu_update_rate, 0.0),
            flush=(copy + load.state_bytes / profile.d2h_bandwidth, load.state_bytes),
        )


def simulate(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> Timeline:
    """The timeline of one plan; the same for the same arguments, always.

    Origin: the start of `step()`, or of backward if the scope has it. The order of service is that of
    `lanes.Tasks.serve`, every subgroup's operations issued in plan order, resident ones first.
    Raises ValueError when the plan is of another number of subgroups.
    """
    tasks, labels = _issue(plan, workload, profile, scope)
    tasks.serve(profile)
    return Timeline.of(_spans(tasks, labels))


def makespan(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds that `simulate` would take from first start to last end, without its timeline."""
    tasks, _ = _issue(plan, workload, profile, scope)
    tasks.serve(profile)
    return max(tasks.end)


def exposed(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds by which the optimizer makes the compute in the scope longer; of the update alone, all of it."""
    return makespan(plan, workload, profile, scope) - scope.compute_s(workload)


Label = tuple[Op, int | None]


def _issue(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope) -> tuple[Tasks, list[Label]]:
    """The plan as tasks with their dependencies, and what each of them is."""
    if len(plan) != len(workload.subgroups):
        raise ValueError(f"the plan is for {len(plan)} subgroups, the workload has {len(workload.subgroups)}")
    issue = _Issue(plan, workload, profile)
    after_backward = issue.backward(scope.backward)
    for i in plan.served(Placement.GPU_RESIDENT):
        issue.update_on_gpu(i, after_backward)
    overlapped = scope.backward is Phase.OVERLAPPED
    if overlapped:
        for i in sorted(plan.served(Placement.CPU), reverse=True):
            issue.gradient(i, [issue.backward_piece[i]])
    for i in plan.order:
        placement = plan.placements[i]
        if placement is Placement.CPU:
            if not overlapped:
                issue.gradient(i, after_backward)
            issue.update_on_cpu(i, after_backward)
        elif placement is Placement.GPU_STREAMED:
            issue.update_streamed(i, after_backward, overlapped)
    issue.forward(scope.forward)
    return issue.tasks, issue.labels


class _Issue:
    """Issues one iteration, remembering what later operations wait for."""

    def __init__(self, plan: Plan, workload: Workload, profile: HardwareProfile) -> None:
        self.tasks = Tasks()
        self.labels: list[Label] = []
        self.backward_piece: dict[int, int] = {}
        self._plan = plan
        self._workload = workload
        self._profile = profile
        self._numel = max(workload.numel, 1)
        self._costs: dict[SubgroupLoad, Costs] = {}
        self._gradients: dict[int, int] = {}
        self._flushes: list[int] = []
        self._arrivals: dict[int, int] = {}

    def add(self, stream: Stream, op: Op, subgroup: int | None, cost: tuple[float, float], after: list[int]) -> int:
        self.labels.append((op, subgroup))
        return self.tasks.add(stream, *cost, after)

    def costs(self, subgroup: int) -> Costs:
        load = self._workload.subgroups[subgroup]
        found = self._costs.get(load)
        if found is None:
            found = self._costs[load] = Costs.of(load, self._profile)
        return found

    def backward(self, phase: Phase) -> list[int]:
        """Issue backward, last subgroup first; returns what must end before an update may start."""
        if phase is Phase.ABSENT:
            return []
        for i in reversed(range(len(self._plan))):
            self.backward_piece[i] = self._compute(Op.BACKWARD, i, self._workload.backward_s, [])
        return [self.backward_piece[0]]

    def gradient(self, i: int, after: list[int]) -> None:
        self._gradients[i] = self.add(Stream.GRADIENT, Op.GRADIENT, i, self.costs(i).gradient, after)

    def update_on_cpu(self, i: int, after: list[int]) -> None:
        costs = self.costs(i)
        update = self.add(Stream.CPU, Op.UPDATE, i, costs.cpu_update, [self._gradients[i], *after])
        self._arrivals[i] = self.add(Stream.PARAMETER, Op.PARAMETER, i, costs.parameter, [update])

    def update_on_gpu(self, i: int, after: list[int]) -> int:
        self._arrivals[i] = self.add(Stream.GPU, Op.UPDATE, i, self.costs(i).gpu_update, after)
        return self._arrivals[i]

    def update_streamed(self, i: int, after: list[int], during_backward: bool) -> None:
        costs, rank = self.costs(i), len(self._flushes)
        if rank >= self._plan.slots:
            slot_free = [self._flushes[rank - self._plan.slots]]
        else:
            slot_free = self._memory_for_slot(rank) if during_backward else after
        prefetch = self.add(Stream.PREFETCH, Op.PREFETCH, i, costs.prefetch, slot_free)
        update = self.update_on_gpu(i, [prefetch, *after])
        self._flushes.append(self.add(Stream.FLUSH, Op.FLUSH, i, costs.flush, [update]))

    def forward(self, phase: Phase) -> None:
        """Issue the next forward, first subgroup first."""
        if phase is Phase.SERIAL:
            self.add(Stream.COMPUTE, Op.FORWARD, None, (self._workload.forward_s, 0.0), list(range(len(self.labels))))
        elif phase is Phase.OVERLAPPED:
            for i in range(len(self._plan)):
                arrival = [self._arrivals[i]] if i in self._arrivals else []
                self._compute(Op.FORWARD, i, self._workload.forward_s, arrival)

    def _compute(self, op: Op, i: int, seconds: float, after: list[int]) -> int:
        """A subgroup's share of forward or backward, in proportion to its parameters."""
        share = self._workload.subgroups[i].numel / self._numel
        return self.add(Stream.COMPUTE, op, None, (seconds * share, 0.0), after)

    def _memory_for_slot(self, slot: int) -> list[int]:
        """The piece of backward whose end frees memory for this slot.

        Free memory grows evenly during backward from what resident state leaves at the peak to update_free_bytes.
        """
        held = sum(self._workload.subgroups[i].state_bytes for i in self._plan.served(Placement.GPU_RESIDENT))
        spare = self._workload.peak_free_bytes - held
        needed = (slot + 1) * self._workload.slot_bytes
        if needed <= spare:
            return []
        gained = self._workload.update_free_bytes - spare
        pieces = len(self._plan)
        freed = min(1.0, (needed - spare) / gained) if gained > 0 else 1.0
        return [self.backward_piece[pieces - max(1, min(pieces, -int(-freed * pieces // 1)))]]


def _spans(tasks: Tasks, labels: list[Label]) -> Iterator[Span]:
    """The served tasks as spans; contiguous pieces of forward or backward become one span."""
    compute: Span | None = None
    for task, (op, subgroup) in enumerate(labels):
        span = Span(LANES[LANE_OF_STREAM[tasks.stream[task]]], op, subgroup, tasks.start[task], tasks.end[task])
        if subgroup is not None:
            yield span
        elif compute is not None and compute.op is op and compute.end == span.start:
            compute = Span(span.lane, op, None, compute.start, span.end)
        else:
            if compute is not None:
                yield compute
            compute = span
    if compute is not None:
        yield compute
