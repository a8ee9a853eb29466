"""The step as data: tasks in issue order, which the simulator serves and the engine issues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfmodel.compute import BACKWARD, Run, backward_pieces, forward_pieces, memory_freed
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Placement, Plan, Tier
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.timeline import Op
from perfmodel.weights import WeightFetches
from perfmodel.windows import WindowUse, ordered
from perfmodel.workload import BlockLoad, SubgroupLoad, Workload

# What tasks do, and on which stream. Names of their own, because the planner makes some hundred
# thousand tasks, and looking up a member of an enum takes as long as making one.
GRADIENT, PARAMETER = (Op.GRADIENT, Stream.GRADIENT), (Op.PARAMETER, Stream.PARAMETER)
PREFETCH, FLUSH = (Op.PREFETCH, Stream.PREFETCH), (Op.FLUSH, Stream.FLUSH)
READ, WRITE = (Op.READ, Stream.READ), (Op.WRITE, Stream.WRITE)
ON_HOST, ON_DEVICE = (Op.UPDATE, Stream.CPU), (Op.UPDATE, Stream.GPU)
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
        update; of forward and backward as in `Workload.runs`.
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
        what left or arrived beside them. In a step the next task is the end of backward, where
        `step()` was called; a plan has no such task.
    kept: the windows in which state stays that belongs on disk, by subgroup.
    """

    tasks: tuple[Task, ...]
    under_way: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)


class SubgroupState(NamedTuple):
    """One subgroup as a step finds it.

    state: where it is. gradient: where that is; None: there is none, and nothing is updated.
    numel: parameters that have a gradient. parameter_bytes: of them.
    gradient_bytes: still to be copied, if the gradient is not where the update is; None: no copy is
        needed, for it has all left.
    departed: the transfers under way that bring gradients to the host, by their places among those.
    fetched: the one under way that brings the state, to a slot or to stay.
    stale_bytes: of parameters that are half of their masters, where the host has not the newest: it
        needs them to update them.
    window: in which the state is, if it belongs on disk; `state` is the host then.
    streams: whether its weights are on the host. An update there needs no copy of them, and one on the device brings
        them up and home again. Its gradients are offloaded.
    """

    state: Tier
    gradient: Tier | None
    numel: int
    gradient_bytes: int | None
    parameter_bytes: int
    departed: tuple[int, ...] = ()
    fetched: int | None = None
    stale_bytes: int = 0
    window: int | None = None
    streams: bool = False


def schedule(plan: Plan, workload: Workload, scope: Scope = UPDATE_ALONE) -> Schedule:
    """The plan if state is where the plan wants it, and all gradients and memory are there.

    Raises ValueError when the plan is of another number of subgroups, or of blocks that the workload does not have.
    """
    if len(plan) != len(workload.subgroups):
        raise ValueError(f"the plan is for {len(plan)} subgroups, the workload has {len(workload.subgroups)}")
    if not plan.blocks_on_device <= {*range(len(workload.blocks))}:
        raise ValueError(
            f"the plan keeps blocks {sorted(plan.blocks_on_device)} on the device, the workload has "
            f"{len(workload.blocks)} blocks, which count from 0"
        )
    plan = ordered(plan, workload)
    loads, overlapped = workload.subgroups, scope.backward is Phase.OVERLAPPED
    held = [i for i in plan.order if i in plan.on_disk][: workload.windows if workload.reverses else 0]
    windows = {i: window for window, i in enumerate(held)}
    streaming = workload.streaming(plan.blocks_on_device)
    found = [
        SubgroupState(
            HOST if i in windows else plan.stays(i),
            HOST if load.returned_bytes else DEVICE,
            load.numel,
            load.returned_bytes or (None if overlapped and i not in plan.on_disk else load.gradient_bytes),
            load.parameter_bytes,
            window=windows.get(i),
            streams=i in streaming,
        )
        for i, load in enumerate(loads)
    ]
    made, backward = ScheduleBuilder(plan, workload, found), tuple[int, ...]()
    weights = WeightFetches(made.add, workload, plan.blocks_on_device) if workload.blocks else None
    # Offloaded gradients come up through a slot for residents, too.
    slots = max(plan.slots, any(load.returned_bytes for load in loads) and RESIDENT in plan.placements)
    vacated: list[tuple[int, ...]] = [()] * slots
    if scope.backward is not Phase.ABSENT:
        made.piece = backward_pieces(made.add, workload, len(workload.leaving(plan.activation_bytes)), weights)
        backward = (made.piece[0],)
        vacated = [backward] * slots
    if overlapped:
        for i in range(len(loads) - 1, -1, -1):
            # What comes from disk has no memory for its gradients until its turn, where they are not offloaded.
            if not loads[i].returned_bytes and (plan.placements[i] is not CPU or i in plan.on_disk):
                continue
            made.departed[i] = (made.add(GRADIENT, i, loads[i].gradient_bytes, (made.piece[i],)),)
        filled = range(min(slots, plan.placements.count(STREAMED)))
        vacated = [memory_freed(plan, workload, made.piece, slot) for slot in filled] or vacated
    made.step(backward, vacated)
    if scope.forward is Phase.ABSENT:
        return Schedule(tuple(made.tasks), kept=made.windows.inside)
    runs, updated = made.runs(), made.updated
    if scope.forward is Phase.SERIAL:
        # What is written to disk is of no use to it.
        before = tuple(number for number, task in enumerate(made.tasks) if task.op is not Op.WRITE)
        parts = workload.runs if workload.blocks else [(0, max(workload.numel, 1))]
        runs, updated = [(part, size, before) for part, size in parts], lambda block: before
    if weights is not None:
        weights.begin(backward=False, after=updated, updated=True)
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks), kept=made.windows.inside)


def schedule_micro_batch(plan: Plan, workload: Workload) -> Schedule:
    """A micro-batch behind which nothing is updated: its backward, from which gradients leave, and the next forward."""
    made = ScheduleBuilder(plan, workload, ())
    weights = WeightFetches(made.add, workload, plan.blocks_on_device)
    pieces = backward_pieces(made.add, workload, len(workload.leaving(plan.activation_bytes)), weights)
    for i, load in reversed([*enumerate(workload.subgroups)]):
        if load.returned_bytes:
            made.add(GRADIENT, i, load.gradient_bytes, (pieces[i],))
    weights.begin(backward=False)
    runs = [(part, size, ()) for part, size in workload.runs]
    forward_pieces(made.add, workload, plan.activation_bytes, runs, weights)
    return Schedule(tuple(made.tasks))


def schedule_step(plan: Plan, workload: Workload, found: Sequence[SubgroupState], begun: Sequence[Task]) -> Schedule:
    """The step that `step()` issues: the plan applied to what is found.

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
    return Schedule(tuple(made.tasks), issued, made.windows.inside)


def arriving(plan: Plan, found: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state comes to the device to stay, in service order."""
    residents = plan.served(RESIDENT)
    return [i for i in residents if found[i].gradient and found[i].state is not DEVICE]


def leaving(plan: Plan, found: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state is on the device and leaves it for good, in service order."""
    return [i for i in plan.order if found[i].state is DEVICE and plan.placements[i] is not RESIDENT]


def staged(plan: Plan, found: Sequence[SubgroupState]) -> list[int]:
    """Subgroups that pass through slots, with state or with offloaded gradients, in service order.

    State that is on the device is updated there, whether the plan lets it stay or not.
    """

    def passes(i: int) -> bool:
        if found[i].state is DEVICE or plan.placements[i] is RESIDENT:
            return found[i].gradient is HOST
        return plan.placements[i] is not CPU and found[i].gradient is not None

    return [i for i in plan.order if passes(i)]


def windowed(plan: Plan, found: Sequence[SubgroupState]) -> list[int]:
    """Subgroups whose state passes through windows on the host, in service order."""
    through = (i for i in plan.order if found[i].gradient or found[i].state is not plan.stays(i))
    return [i for i in through if found[i].state is DISK or plan.stays(i) is DISK]


class ScheduleBuilder:
    """The tasks so far.

    piece: of backward, by the subgroup whose gradient is complete then. windows: see there.
    departed, fetched: by subgroup, tasks beside backward that bring its gradients to the host, or
        its state to a slot.
    """

    def __init__(self, plan: Plan, workload: Workload, found: Sequence[SubgroupState]) -> None:
        self.tasks: list[Task] = []
        self.piece: dict[int, int] = {}
        self._plan = plan
        self._workload = workload
        self._found = found
        self._backward: tuple[int, ...] = ()
        """The tasks that have to end before gradients are complete and parameters may be overwritten."""
        self._loads: tuple[SubgroupLoad, ...] = workload.subgroups
        self._updated: dict[int, int] = {}
        """The tasks after which a subgroup's new parameters are where forward finds them."""
        self.departed: dict[int, tuple[int, ...]] = {}
        self.fetched: dict[int, int] = {}
        self.windows = WindowUse(workload.windows, self._write)

    def add(
        self,
        what: tuple[Op, Stream],
        subgroup: int | None,
        size: int,
        after: tuple[int, ...] = (),
        slot: int | None = None,
        others: tuple[int, ...] = (),
        move: Move | None = None,
        window: int | None = None,
    ) -> int:
        self.tasks.append(Task(what[0], what[1], subgroup, size, after, slot, others, move, window))
        return len(self.tasks) - 1

    def add_early(self, transfers: Sequence[Task]) -> None:
        """Transfers beside backward: complete gradients leave, state comes.

        What comes to stay does so from the first gradient on, what comes to a slot after half of backward.
        """
        first = len(self.tasks)
        after: dict[int, int] = {}
        for i, each in enumerate(self._found):
            if each.departed:
                self.departed[i] = tuple(first + place for place in each.departed)
                after |= dict.fromkeys(each.departed, self.piece[i])
            if each.fetched is not None:
                self.fetched[i] = first + each.fetched
                to_stay = transfers[each.fetched].slot is None
                after[each.fetched] = self.piece[len(self._found) - 1 if to_stay else len(self._found) // 2]
        self.tasks += [task._replace(after=(after[place],)) for place, task in enumerate(transfers)]

    def step(self, backward: tuple[int, ...], vacated: list[tuple[int, ...]]) -> None:
        """Schedule subgroups that wait for no slot first, then all others as the plan orders them.

        Residents of one format are updated together, behind what could hold up a transfer home: state that leaves, and
        state that has come to a slot already.
        vacated: by slot, what has to end before it is filled for the first time.
        """
        self._backward, found = backward, self._found
        for turn, i in enumerate(self._plan.order):
            window = found[i].window
            if window is not None:
                fetched = self.fetched.get(i)
                # Backward may have begun to fetch it, and who takes the window must not overwrite it before.
                self.windows.hold(i, window, turn, () if fetched is None else (fetched,))
        others, arriving, residents = [], [], dict[str, list[int]]()
        for i in self._plan.order:
            gradient, resident = found[i].gradient, self._plan.placements[i] is RESIDENT
            if gradient is HOST or (found[i].state is not DEVICE and not resident):
                others.append(i)
            elif gradient is DEVICE and not resident:
                self._leave(i, (self._update(i, backward),))
            elif gradient is DEVICE and found[i].state is DEVICE:
                residents.setdefault(self._loads[i].format, []).append(i)
            elif gradient is DEVICE:
                arriving.append(i)
            elif not resident and found[i].state is DEVICE:
                self._leave(i, backward)
        ahead = [i for i in others if i in self.fetched and self._plan.placements[i] is not RESIDENT]
        self._others(ahead, 0, vacated)
        for together in residents.values():
            first, numel = together[0], sum(found[i].numel for i in together)
            update = self.add(ON_DEVICE, first, numel, backward, others=tuple(together[1:]))
            self._updated |= dict.fromkeys(together, update)
        for i in arriving:
            self._arriving(i)
        begun = set(ahead)
        self._others([i for i in others if i not in begun], len(ahead), vacated)
        for i in () if self._workload.reverses else list(self.windows.inside):
            self.windows.write(i)

    def _others(self, others: Sequence[int], rank: int, vacated: list[tuple[int, ...]]) -> None:
        """Schedule subgroups that the host updates, or that pass through slots; `rank` have done so before."""
        for i in others:
            found = self._found[i]
            if found.gradient is None:
                if found.window is None and found.state is not self._plan.stays(i):
                    self._rest(i, self._to_host(i))
                continue
            on_host = found.state is not DEVICE and self._plan.placements[i] is CPU
            if on_host or not vacated:
                self._on_host(i)
            else:
                slot = rank % len(vacated)
                vacated[slot] = (self._staged(i, slot, vacated[slot]),)
                rank += 1

    def _arriving(self, i: int) -> None:
        """State that comes to stay, and its gradient is there."""
        fetched = self.fetched.get(i)
        if fetched is None:
            fetched = self._to_device(i, self._backward)
        self.windows.leave(i, (fetched,))
        self._update(i, (fetched, *self._backward))

    def _staged(self, i: int, slot: int, vacated: tuple[int, ...]) -> int:
        """State, offloaded gradients or both come up for the update; what frees the slot again."""
        found, resident = self._found[i], self._plan.placements[i] is RESIDENT
        fetched = self.fetched.get(i)
        ready: tuple[int, ...] = () if fetched is None else (fetched,)
        weights = found.parameter_bytes if found.streams else 0
        returned = (found.gradient_bytes or 0) + weights if found.gradient is HOST else 0
        # The slot's last occupant must have left before the next one is written over it.
        after = (*vacated, *self.departed.get(i, ()))
        if found.state is not DEVICE and fetched is None:
            ready += (self._to_device(i, after, slot, returned),)
        elif found.gradient is HOST:
            ready += (self.add(PREFETCH, i, returned, after, slot),)
        update = self._update(i, ready + self._backward, slot)
        if resident:
            self.windows.leave(i, ready)
            freed = self.add(FLUSH, i, weights, (update,), slot) if weights else update
        else:
            fetched_here = found.state is not DEVICE
            flush = self._leave(i, (update,), slot if fetched_here else None, weights)
            freed = flush if fetched_here or weights else update
        if weights:
            self._updated[i] = freed
        return freed

    def _on_host(self, i: int) -> None:
        """An update on the host. What it needs may have to leave the device first; parameters go up unless streamed."""
        found, ready = self._found[i], self.departed.get(i, ())
        through = found.state is DISK or found.window is not None or self._plan.stays(i) is DISK
        here = self._to_host(i) if through else ()
        late = found.gradient_bytes if found.gradient is DEVICE else None
        stale = 0 if found.streams else found.stale_bytes
        if late is not None or stale:
            # In a window there is room for them once the state is there, and masters then follow parameters.
            after = (*self._backward, *here) if found.state is DISK or i in self.windows.inside else self._backward
            ready += (self.add(GRADIENT, i, (late or 0) + stale, after),)
        ready += here if through else self._to_host(i)
        update = self._updated[i] = self.add(ON_HOST, i, found.numel, ready + self._backward)
        if not found.streams:
            # What the caller queued before the step still reads the old parameters.
            after = (update, *self._backward)
            self._updated[i] = self.add(PARAMETER, i, found.parameter_bytes, after)
        self._rest(i, (self._updated[i],))

    def _update(self, i: int, after: tuple[int, ...], slot: int | None = None) -> int:
        update = self._updated[i] = self.add(ON_DEVICE, i, self._found[i].numel, after, slot)
        return update

    def _leave(self, i: int, after: tuple[int, ...], slot: int | None = None, beside: int = 0) -> int:
        """State leaves the device, home or to a window. beside: as for `_move`."""
        if self._plan.stays(i) is not DISK:
            return self._move(i, Move(DEVICE, self._plan.stays(i)), after, slot, beside)
        window, vacated = (self.windows.inside[i], ()) if i in self.windows.inside else self.windows.take(i)
        flush = self._move(i, Move(DEVICE, HOST), (*after, *vacated), slot, beside, window)
        self.windows.complete(i, (flush,))
        return flush

    def _from_disk(self, i: int) -> tuple[int, ...]:
        """State comes from disk, home if it is to rest there, else to a window; what brings it, if it was there."""
        found = self._found[i]
        self.windows.use(i)
        # What was in a window may have had to leave it before its turn.
        if found.state is not DISK and (found.window is None or i in self.windows.inside):
            return ()
        window, vacated = self.windows.take(i)
        read = self._move(i, Move(DISK, HOST), vacated, window=window)
        if self._plan.stays(i) is HOST:
            self.windows.leave(i, (read,))
        return (read,)

    def _to_device(self, i: int, after: tuple[int, ...], slot: int | None = None, beside: int = 0) -> int:
        """State comes to the device, from wherever it is; what brings it. beside: as for `_move`."""
        here = self._from_disk(i)
        return self._move(i, Move(HOST if here else self._found[i].state, DEVICE), (*after, *here), slot, beside)

    def _to_host(self, i: int) -> tuple[int, ...]:
        """State comes to the host, from wherever it is; what brings it."""
        state = self._found[i].state
        here = () if state is DEVICE else self._from_disk(i)
        if here or state is HOST:
            return here
        if state is DEVICE and self._plan.stays(i) is DISK:
            return (self._leave(i, self._backward),)
        return (self._move(i, Move(state, HOST), self._backward),)

    def _rest(self, i: int, after: tuple[int, ...]) -> None:
        """After these tasks the host has the state as it is to rest; what is at home and belongs on disk is written."""
        if i in self.windows.inside:
            self.windows.complete(i, after)
        elif self._plan.stays(i) is DISK:
            self.windows.leave(i, (self._write(i, *self.windows.take(i), after),))

    def _write(self, i: int, window: int, vacated: tuple[int, ...], after: tuple[int, ...] = ()) -> int:
        return self._move(i, Move(HOST, DISK), (*vacated, *after), window=window)

    def _move(
        self,
        i: int,
        move: Move,
        after: tuple[int, ...],
        slot: int | None = None,
        beside: int = 0,
        window: int | None = None,
    ) -> int:
        """State goes from tier to tier. beside: bytes that go the same way."""
        return self.add(MOVES[move], i, self._loads[i].state_bytes + beside, after, slot, move=move, window=window)

    def runs(self) -> list[Run]:
        """Of the next forward, in which each subgroup waits for its own parameters."""
        updated = {i: (task,) for i, task in self._updated.items()}
        return [
            (part, size, () if part < 0 or self._found[part].streams else updated.get(part, ()))
            for part, size in self._workload.runs
        ]

    def updated(self, block: BlockLoad) -> tuple[int, ...]:
        """The tasks after which a block's new weights are at home."""
        return tuple(self._updated[i] for i in range(block.start, block.stop) if i in self._updated)
