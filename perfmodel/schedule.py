"""Schedules: of a plan as it is simulated, of a step as it is issued, of a micro-batch without an update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from perfmodel.builder import ScheduleBuilder
from perfmodel.compute import BACKWARD, backward_pieces, forward_pieces, issued_after, memory_freed
from perfmodel.plan import Placement, Plan
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.tasks import CPU, DEVICE, DISK, HOST, RESIDENT, STREAMED, Schedule, SubgroupState, Task
from perfmodel.timeline import Op
from perfmodel.weights import WeightFetches
from perfmodel.workload import Workload

NO_TURNS: Mapping[Placement, Sequence[float]] = {}
"""Updates take no time."""


def schedule(
    plan: Plan, workload: Workload, scope: Scope = UPDATE_ALONE, turn_s: Mapping[Placement, Sequence[float]] = NO_TURNS
) -> Schedule:
    """Make the schedule of a plan that finds all state, gradients and memory where it wants them.

    turn_s: seconds of a turn of the CPU, and of the slots, by subgroup; for updates in backward, see `turns`.
    Raises ValueError when the plan is of another number of subgroups, or of blocks that the workload does not have.
    """
    if len(plan) != len(workload.subgroups):
        raise ValueError(f"the plan is for {len(plan)} subgroups, the workload has {len(workload.subgroups)}")
    if not plan.blocks_on_device <= {*range(len(workload.blocks))}:
        raise ValueError(
            f"the plan keeps blocks {sorted(plan.blocks_on_device)} on the device, the workload has "
            f"{len(workload.blocks)} blocks, which count from 0"
        )
    loads, overlapped = workload.subgroups, scope.backward in (Phase.OVERLAPPED, Phase.UPDATED)
    streaming, on_disk = workload.streaming(plan.blocks_on_device), plan.on_disk
    states = [
        SubgroupState(
            DISK if i in on_disk else placement.stays,
            HOST if load.returned_bytes else DEVICE,
            load.numel,
            load.returned_bytes or (None if overlapped and i not in on_disk else load.gradient_bytes),
            load.parameter_bytes,
            streams=i in streaming,
        )
        for i, (load, placement) in enumerate(zip(loads, plan.placements, strict=True))
    ]
    # Offloaded gradients come up through a slot for residents, too.
    slots = max(plan.slots, workload.returns and RESIDENT in plan.placements)
    made, backward = ScheduleBuilder(plan, workload, states, slots), tuple[int, ...]()
    if any(workload.host) and scope.backward is not Phase.UPDATED:
        made.host = workload.host
    weights = WeightFetches(made.add, workload, plan.blocks_on_device) if workload.blocks else None
    if scope.backward is not Phase.ABSENT:
        _beside_backward(made, plan, workload, scope, weights)
        backward = (made.piece[0],)
    if scope.backward is not Phase.UPDATED:
        made.step(backward)
    else:
        for i in turns(plan, workload, turn_s):
            if i in on_disk:
                continue
            for slot in made.slots[:1]:
                slot.keep((made.piece[i],))
            made.step((made.piece[i],), (i,))
            if plan.placements[i] is STREAMED:
                made.slots.append(made.slots.pop(0))
        if on_disk:  # `step()` updates what passes through windows
            for slot in made.slots:
                slot.keep(backward)
            made.windows.wait(backward)
            made.step(backward, [i for i in plan.order if i in on_disk])
    if scope.forward is Phase.ABSENT:
        return Schedule(tuple(made.tasks))
    (part, size, after), *rest = made.runs()
    runs, updated = [(part, size, after + made.returned), *rest], made.updated
    if scope.forward is Phase.SERIAL:
        # Forward does not wait for writes to disk.
        before = tuple(number for number, task in enumerate(made.tasks) if task.op is not Op.WRITE)
        whole = workload.runs if workload.blocks else [(0, max(workload.numel, 1))]
        runs, updated = [(part, size, before) for part, size in whole], lambda block: before
    if weights is not None:
        weights.begin(backward=False, after=updated, updated=True)
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks))


def _beside_backward(
    made: ScheduleBuilder, plan: Plan, workload: Workload, scope: Scope, weights: WeightFetches | None
) -> None:
    """Add backward, which uses the memory of slots until it frees it, and the gradients that leave meanwhile.

    Pieces of backward behind which nothing begins are one.
    """
    # State from disk has no memory for its gradients until its turn, where they are not offloaded.
    leaving = [
        i
        for i, load in reversed([*enumerate(workload.subgroups)])
        if load.returned_bytes or (plan.placements[i] is CPU and i not in plan.on_disk)
    ]
    overlapped = scope.backward is not Phase.SERIAL
    # Offloaded gradients pass through slots, which backward does not fill then.
    filled = 0 if workload.returns or not overlapped else min(len(made.slots), plan.placements.count(STREAMED))
    made.filled = filled
    freed = [workload.backward_runs[n - 1][0] if n else None for n in memory_freed(plan, workload, filled)]
    issued = issued_after(workload)
    parts = None if scope.backward is Phase.UPDATED else {*leaving, *freed, issued}
    moved = len(workload.moved(plan.activation_bytes))
    pieces = made.piece = backward_pieces(made.add, workload, moved, weights, parts)
    if scope.backward is Phase.OVERLAPPED:
        made.issued = () if issued is None else (pieces[issued],)
    if overlapped:
        for i in leaving:
            made.send(i, workload.subgroups[i].gradient_bytes, pieces[i])
    if scope.backward is not Phase.UPDATED:
        until = [*freed, *[0] * (len(made.slots) - filled)]
        for slot, part in zip(made.slots, until, strict=True):
            slot.readers = () if part is None else (pieces[part],)


def turns(plan: Plan, workload: Workload, turn_s: Mapping[Placement, Sequence[float]]) -> list[int]:
    """Return the subgroups in the order in which their updates begin where these begin in backward.

    Of the gradients that have come, the CPU takes those first that forward needs first, and so do the slots: they come
    last. turn_s: seconds of a turn, by placement and subgroup; of others an update begins as its gradient comes.
    """
    each_s, arrived_s, passed_s = workload.seconds_by_size[0], dict[int, float](), 0.0
    for part, size in workload.backward_runs:
        passed_s += size * each_s
        arrived_s[part] = passed_s
    begins = list[tuple[float, int]]()
    for placement in Placement:
        arrivals = sorted((arrived_s[i], i) for i in plan.served(placement))
        begins += _begins(arrivals, turn_s.get(placement))
    return [i for _, i in sorted(begins)]


def _begins(arrivals: Sequence[tuple[float, int]], turn_s: Sequence[float] | None) -> Iterator[tuple[float, int]]:
    """Yield when each turn begins, with its subgroup. arrivals: of gradients, in order. turn_s: None: take none."""
    waiting, now = list[int](), 0.0
    for arrived, i in (*arrivals, (math.inf, -1)):
        while waiting and now < arrived:
            first = heappop(waiting)
            yield now, first
            now += turn_s[first] if turn_s else 0.0
        now = now if waiting else max(now, arrived)
        heappush(waiting, i)


def schedule_micro_batch(plan: Plan, workload: Workload) -> Schedule:
    """Make the schedule of a micro-batch without an update: backward, from which gradients leave, and forward."""
    made = ScheduleBuilder(plan, workload, (), 0)
    weights = WeightFetches(made.add, workload, plan.blocks_on_device)
    pieces = backward_pieces(made.add, workload, len(workload.moved(plan.activation_bytes)), weights)
    for i, load in reversed([*enumerate(workload.subgroups)]):
        if load.returned_bytes:
            made.send(i, load.gradient_bytes, pieces[i])
    weights.begin(backward=False)
    runs = [(part, size, ()) for part, size in workload.runs]
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks))


def schedule_step(plan: Plan, workload: Workload, before: Sequence[SubgroupState], begun: Sequence[Task]) -> Schedule:
    """Make the schedule that `step()` issues: the plan applied to the places where state and gradients are found.

    plan: for which there is memory: its slots are there, and so is room for each resident subgroup.
    begun: transfers under way that it uses, in the order of their issue.
    """
    made = ScheduleBuilder(plan, workload, before, plan.slots)
    if begun:
        made.piece = backward_pieces(made.add, workload)
        issued = issued_after(workload)
        made.issued = () if issued is None else (made.piece[issued],)
        made.add_early(begun)
    issued = len(made.tasks)
    _step_behind_backward(made)
    return Schedule(tuple(made.tasks), issued)


def schedule_part(
    plan: Plan, workload: Workload, before: Mapping[int, SubgroupState], order: Sequence[int]
) -> Schedule:
    """Make the schedule of a part of a step, which is issued while backward runs: of these subgroups alone, in `order`.

    plan, before: as for `schedule_step`, and no transfer is under way.
    """
    made = ScheduleBuilder(plan, workload, before, plan.slots)
    _step_behind_backward(made, order)
    return Schedule(tuple(made.tasks))


def _step_behind_backward(made: ScheduleBuilder, order: Sequence[int] | None = None) -> None:
    """Add the end of backward, which has used the memory of slots that no transfer has filled, and the step."""
    backward = (made.add(BACKWARD, None, 0),)
    for slot in made.slots:
        slot.writers = slot.writers or backward
    made.step(backward, order)
