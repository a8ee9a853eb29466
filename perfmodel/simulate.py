"""Simulation of a plan on a machine: when each transfer and update runs, for an update or a whole iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfmodel.demand import demands, operation_demand, speed_beside_updates
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, Speeds, Stream, run_tasks
from perfmodel.plan import Placement, Plan
from perfmodel.schedule import schedule, schedule_micro_batch
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.tasks import Schedule
from perfmodel.timeline import Lane, Op, Span, Timeline
from perfmodel.workload import SubgroupLoad, Workload

__all__ = ["UPDATE_ALONE", "Phase", "Scope", "Simulator", "exposed", "makespan", "serve", "simulate"]


def simulate(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> Timeline:
    """The timeline of one plan; the same for the same arguments, always.

    Origin: the start of `step()`, or of backward if the scope has it.
    Raises ValueError when the plan is of another number of subgroups.
    """
    simulator = Simulator(workload, profile.with_threads(plan.threads), scope)
    made = simulator.schedule(plan)
    return Timeline.of(_spans(made, *simulator.serve(made)))


def serve(schedule: Schedule, workload: Workload, profile: HardwareProfile) -> Timeline:
    """The timeline of one schedule, served in the order of `lanes.run_tasks`."""
    return Timeline.of(_spans(schedule, *Simulator(workload, profile).serve(schedule)))


def makespan(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds that `simulate` would take from first start to last end, without its timeline.

    Of a whole iteration of several micro-batches also the time for which the compute of the others waits.
    """
    return Simulator(workload, profile.with_threads(plan.threads), scope).makespan(plan)


def exposed(plan: Plan, workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> float:
    """Seconds by which the optimizer makes the compute in the scope longer; of the update alone, all of it."""
    return makespan(plan, workload, profile, scope) - scope.compute_s(workload)


class Simulator:
    """Simulates many plans of one workload; `tasks` is how many it has served so far."""

    def __init__(
        self,
        workload: Workload,
        profile: HardwareProfile,
        scope: Scope = UPDATE_ALONE,
        like: Simulator | None = None,
    ) -> None:
        """like: of the same profile, and of a workload that differs in memory alone: what it finds, both know."""
        self.tasks = 0
        self._workload = workload
        self._profile = profile
        self._scope = scope
        self._kinds: list[int] = like._kinds if like else _numbered(workload.subgroups)
        self._costs: dict[tuple[int, int, int], tuple[float, float]] = like._costs if like else {}
        """Seconds of an operation alone, and bytes/s of host DRAM, by stream, size and kind of subgroup."""
        self._speeds: Speeds = like._speeds if like else {}
        self._turn_s: dict[Placement, list[float]] = like._turn_s if like else {}
        """As for `schedule`."""
        self._waits: dict[tuple[frozenset[int], int], float] = like._waits if like else {}

    def makespan(self, plan: Plan) -> float:
        """Seconds of a plan, as the function of that name returns them."""
        _, end = self.serve(self.schedule(plan))
        self.tasks += len(end)
        whole = Phase.ABSENT not in (self._scope.backward, self._scope.forward)
        others = (self._workload.micro_batches - 1) * whole
        return max(end) + (others * self._wait_s(plan) if others else 0.0)

    def schedule(self, plan: Plan) -> Schedule:
        """Make the schedule of a plan."""
        if self._scope.backward is not Phase.UPDATED:
            return schedule(plan, self._workload, self._scope)
        if not self._turn_s:
            each = [demands(load, self._profile) for load in self._workload.subgroups]
            links = Stream.PREFETCH, Stream.FLUSH
            self._turn_s[Placement.CPU] = [found[Stream.CPU].seconds for found in each]
            self._turn_s[Placement.GPU_STREAMED] = [max(found[s].seconds for s in links) for found in each]
        return schedule(plan, self._workload, self._scope, self._turn_s)

    def _wait_s(self, plan: Plan) -> float:
        """Seconds for which a micro-batch waits that no update follows."""
        key = plan.blocks_on_device, plan.activation_bytes
        if key not in self._waits:
            _, end = self.serve(schedule_micro_batch(plan, self._workload))
            self.tasks += len(end)
            self._waits[key] = max(end) - self._workload.forward_s - self._workload.backward_s
        return self._waits[key]

    def serve(self, schedule: Schedule) -> tuple[list[float], list[float]]:
        """Start and end of each task of a schedule, in seconds."""
        loads, kinds, known = self._workload.subgroups, self._kinds, self._costs
        each_s, compute, host = self._workload.seconds_by_size, Stream.COMPUTE, Stream.HOST
        kept = speed_beside_updates(self._workload, self._profile)
        tasks = []
        for op, stream, subgroup, size, after, *_ in schedule.tasks:
            if stream is compute:
                forward = op is Op.FORWARD
                # The host has issued backward when updates begin behind it.
                seconds, rate = each_s[forward] * size, kept if forward or self._workload.in_backward else 0.0
            elif stream is host:
                seconds, rate = size * 1e-9, 0.0
            else:
                key = stream, size, kinds[subgroup or 0]
                if key not in known:
                    cost = operation_demand(stream, size, loads[subgroup or 0], self._profile)
                    known[key] = cost.seconds, cost.rate
                seconds, rate = known[key]
            tasks.append((stream, seconds, rate, after))
        return run_tasks(tasks, self._profile, self._speeds)


def _numbered(loads: Sequence[SubgroupLoad]) -> list[int]:
    """A number for each, the same for equal ones."""
    numbers: dict[SubgroupLoad, int] = {}
    return [numbers.setdefault(load, len(numbers)) for load in loads]


def _spans(schedule: Schedule, starts: list[float], ends: list[float]) -> Iterator[Span]:
    """The served tasks as spans; contiguous pieces of forward or backward become one span."""
    compute: list[Span] = []
    for task, start, end in zip(schedule.tasks, starts, ends, strict=True):
        if task.stream is Stream.HOST:
            continue
        lane = LANE_OF_STREAM[task.stream]
        span = Span(lane, task.op, task.subgroup, start, end, 0 if lane in (Lane.GPU, Lane.CPU) else task.size)
        if task.stream is not Stream.COMPUTE:
            yield span
        elif compute and compute[-1].op is task.op and compute[-1].end == span.start:
            compute[-1] = Span(lane, task.op, None, compute[-1].start, span.end)
        else:
            compute.append(span)
    yield from compute
