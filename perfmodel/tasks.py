"""The step as data: the tasks of a schedule, and the state and gradients that a step finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from perfmodel.lanes import Stream
from perfmodel.plan import Move, Placement, Plan, Tier
from perfmodel.timeline import Op

# Operations and their streams. Names of their own, because the planner makes some hundred
# thousand tasks, and looking up a member of an enum takes as long as making one.
GRADIENT, PARAMETER = (Op.GRADIENT, Stream.GRADIENT), (Op.PARAMETER, Stream.PARAMETER)
PREFETCH, FLUSH = (Op.PREFETCH, Stream.PREFETCH), (Op.FLUSH, Stream.FLUSH)
READ, WRITE = (Op.READ, Stream.READ), (Op.WRITE, Stream.WRITE)
ON_HOST, ON_DEVICE = (Op.UPDATE, Stream.CPU), (Op.UPDATE, Stream.GPU)
CALL = Op.UPDATE, Stream.HOST
CPU, STREAMED, RESIDENT = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
MOVES = {
    Move(HOST, DEVICE): PREFETCH,
    Move(DEVICE, HOST): FLUSH,
    Move(DISK, HOST): READ,
    Move(HOST, DISK): WRITE,
}
"""The operations that bring state from one tier to another."""


class Task(NamedTuple):
    """One operation of one stream.

    subgroup: None for forward, backward, saved tensors and weights of blocks. size: bytes of a copy; parameters of an
        update; of forward and backward as in `Workload.runs`; nanoseconds of the host within `step()`.
    after: numbers of earlier tasks that must have ended, besides the one before it in its stream.
    slot: the staging slot that it fills, uses or empties, if any.
    others: further subgroups that the same update updates.
    move: of the subgroup's state, if that goes from one tier to another.
    window: on the host, which state from disk or to it passes through.
    """

    op: Op
    stream: Stream
    subgroup: int | None
    size: int
    after: tuple[int, ...] = ()
    slot: int | None = None
    others: tuple[int, ...] = ()
    move: Move | None = None
    window: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Tasks in issue order; a task's number is its place.

    under_way: how many of them were under way when the others were scheduled: pieces of backward, and
        transfers beside them. In a step the next task is the end of backward, where
        `step()` was called; a plan has no such task.
    """

    tasks: tuple[Task, ...]
    under_way: int = 0

    @cached_property
    def on_host(self) -> dict[int, list[int]]:
        """The updates on the host, by the last task that must be issued before they are handed over.

        Of those that wait for no task of this issue the one comes first whose gradients left first.
        """
        tasks, under_way = self.tasks, self.under_way
        on_host: dict[int, list[int]] = {}
        for number in range(under_way + 1, len(tasks)):
            if tasks[number].stream is Stream.CPU:
                on_host.setdefault(max((under_way, *tasks[number].after)), []).append(number)

        at_once = on_host.get(under_way, [])
        left = {number: max([0, *[each for each in tasks[number].after if each < under_way]]) for number in at_once}
        at_once.sort(key=left.__getitem__)
        return on_host

    @cached_property
    def ways(self) -> dict[int, Move]:
        """From where to where the state of a subgroup moves, of those of which it does."""
        ways: dict[int, Move] = {}
        for task in self.tasks:
            if task.move is not None and task.subgroup is not None:
                ways[task.subgroup] = Move(ways.get(task.subgroup, task.move).source, task.move.destination)
        return ways


class SubgroupState(NamedTuple):
    """One subgroup as a step finds it.

    state: where it is. gradient: where that is; None: there is none, and nothing is updated.
    numel: parameters that have a gradient. parameter_bytes: of them.
    gradient_bytes: still to be copied, if the gradient is not where the update is; None: no copy is
        needed, for it has all left.
    stale_bytes: of parameters that are their masters, or halves of them, where the host has not the
        newest: it needs them to update them.
    streams: whether its weights are on the host. An update there needs no copy of them, and one on the device brings
        them up and home again. Its gradients are offloaded.
    """

    state: Tier
    gradient: Tier | None
    numel: int
    gradient_bytes: int | None
    parameter_bytes: int
    stale_bytes: int = 0
    streams: bool = False


def arriving(plan: Plan, before: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state comes to the device to stay, in service order."""
    residents = plan.served(RESIDENT)
    return [i for i in residents if before[i].gradient and before[i].state is not DEVICE]


def leaving(plan: Plan, before: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state is on the device and leaves it for good, in service order."""
    return [i for i in plan.order if before[i].state is DEVICE and plan.placements[i] is not RESIDENT]


def staged(plan: Plan, before: Sequence[SubgroupState]) -> list[int]:
    """Subgroups that pass through slots, with state or with offloaded gradients, in service order.

    State that is on the device is updated there, whether the plan lets it stay or not.
    """

    passing = []
    for i in plan.order:  # without a call for each: a step's first work waits
        each, placement = before[i], plan.placements[i]
        if each.state is DEVICE or placement is RESIDENT:
            passes = each.gradient is HOST
        else:
            passes = placement is not CPU and each.gradient is not None
        if passes:
            passing.append(i)
    return passing


def windowed(plan: Plan, before: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state passes through windows on the host, in service order."""
    through = (i for i in plan.order if before[i].gradient or before[i].state is not plan.stays(i))
    return [i for i in through if before[i].state is DISK or plan.stays(i) is DISK]
