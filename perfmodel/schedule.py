"""Schedules: of a plan as it is simulated, of a step as it is issued, of a micro-batch without an update."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.builder import ScheduleBuilder
from perfmodel.compute import BACKWARD, backward_pieces, forward_pieces, memory_freed
from perfmodel.plan import Plan
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.tasks import CPU, DEVICE, GRADIENT, HOST, RESIDENT, STREAMED, Schedule, SubgroupState, Task
from perfmodel.timeline import Op
from perfmodel.weights import WeightFetches
from perfmodel.workload import Workload


def schedule(plan: Plan, workload: Workload, scope: Scope = UPDATE_ALONE) -> Schedule:
    """Make the schedule of a plan that finds all state, gradients and memory where it wants them.

    Raises ValueError when the plan is of another number of subgroups, or of blocks that the workload does not have.
    """
    if len(plan) != len(workload.subgroups):
        raise ValueError(f"the plan is for {len(plan)} subgroups, the workload has {len(workload.subgroups)}")
    if not plan.blocks_on_device <= {*range(len(workload.blocks))}:
        raise ValueError(
            f"the plan keeps blocks {sorted(plan.blocks_on_device)} on the device, the workload has "
            f"{len(workload.blocks)} blocks, which count from 0"
        )
    loads, overlapped = workload.subgroups, scope.backward is Phase.OVERLAPPED
    streaming = workload.streaming(plan.blocks_on_device)
    found = [
        SubgroupState(
            plan.stays(i),
            HOST if load.returned_bytes else DEVICE,
            load.numel,
            load.returned_bytes or (None if overlapped and i not in plan.on_disk else load.gradient_bytes),
            load.parameter_bytes,
            streams=i in streaming,
        )
        for i, load in enumerate(loads)
    ]
    made, backward = ScheduleBuilder(plan, workload, found), tuple[int, ...]()
    weights = WeightFetches(made.add, workload, plan.blocks_on_device) if workload.blocks else None
    # Offloaded gradients come up through a slot for residents, too.
    slots = max(plan.slots, workload.returns and RESIDENT in plan.placements)
    vacated: list[tuple[int, ...]] = [()] * slots
    if scope.backward is not Phase.ABSENT:
        made.piece = backward_pieces(made.add, workload, len(workload.moved(plan.activation_bytes)), weights)
        backward = (made.piece[0],)
        vacated = [backward] * slots
    if overlapped:
        for i in range(len(loads) - 1, -1, -1):
            # State from disk has no memory for its gradients until its turn, where they are not offloaded.
            if not loads[i].returned_bytes and (plan.placements[i] is not CPU or i in plan.on_disk):
                continue
            made.departed[i] = (made.add(GRADIENT, i, loads[i].gradient_bytes, (made.piece[i],)),)
        # Offloaded gradients pass through slots, which backward does not fill then.
        filled = 0 if workload.returns else min(slots, plan.placements.count(STREAMED))
        ends = [*made.piece.values()]
        vacated[:filled] = [(ends[n - 1],) if n else () for n in memory_freed(plan, workload, filled)]
    made.step(backward, vacated)
    if scope.forward is Phase.ABSENT:
        return Schedule(tuple(made.tasks))
    runs, updated = made.runs(), made.updated
    if scope.forward is Phase.SERIAL:
        # Forward does not wait for writes to disk.
        before = tuple(number for number, task in enumerate(made.tasks) if task.op is not Op.WRITE)
        parts = workload.runs if workload.blocks else [(0, max(workload.numel, 1))]
        runs, updated = [(part, size, before) for part, size in parts], lambda block: before
    if weights is not None:
        weights.begin(backward=False, after=updated, updated=True)
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks))


def schedule_micro_batch(plan: Plan, workload: Workload) -> Schedule:
    """Make the schedule of a micro-batch without an update: backward, from which gradients leave, and forward."""
    made = ScheduleBuilder(plan, workload, ())
    weights = WeightFetches(made.add, workload, plan.blocks_on_device)
    pieces = backward_pieces(made.add, workload, len(workload.moved(plan.activation_bytes)), weights)
    for i, load in reversed([*enumerate(workload.subgroups)]):
        if load.returned_bytes:
            made.add(GRADIENT, i, load.gradient_bytes, (pieces[i],))
    weights.begin(backward=False)
    runs = [(part, size, ()) for part, size in workload.runs]
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks))


def schedule_step(plan: Plan, workload: Workload, found: Sequence[SubgroupState], begun: Sequence[Task]) -> Schedule:
    """Make the schedule that `step()` issues: the plan applied to the places where state and gradients are found.

    plan: for which there is memory: its slots are there, and so is room for each resident subgroup.
    begun: transfers under way that it uses, in the order of their issue.
    """
    made = ScheduleBuilder(plan, workload, found)
    if begun:
        made.piece = backward_pieces(made.add, workload)
    made.add_early(begun)
    issued = len(made.tasks)
    backward = (made.add(BACKWARD, None, 0),)
    made.step(backward, [backward] * plan.slots)
    return Schedule(tuple(made.tasks), issued)
