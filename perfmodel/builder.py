"""Tasks in issue order, from a plan and the places where a step finds state and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.buffers import Buffer, Room
from perfmodel.compute import Run
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Plan
from perfmodel.tasks import (
    CALL,
    CPU,
    DEVICE,
    DISK,
    FLUSH,
    GRADIENT,
    HOST,
    MOVES,
    ON_DEVICE,
    ON_HOST,
    PARAMETER,
    PREFETCH,
    RESIDENT,
    SubgroupState,
    Task,
)
from perfmodel.timeline import Op
from perfmodel.windows import WindowUse
from perfmodel.workload import BlockLoad, HostTimes, Workload

_NEW = tuple.__new__


class ScheduleBuilder:
    """The tasks of a schedule so far.

    piece: of backward, by the subgroup whose gradient is complete then. windows: on the host, for state on disk.
    issued: the task of backward at whose end the host issues the step, if not behind it.
    slots: on the device. filled: how many of these backward still fills. host: what issuing takes it; None: nothing.
    returned: the task at whose end `step()` returns.
    """

    def __init__(
        self, plan: Plan, workload: Workload, before: Sequence[SubgroupState] | Mapping[int, SubgroupState], slots: int
    ) -> None:
        self.tasks: list[Task] = []
        self.piece: dict[int, int] = {}
        self.slots = [Room(DEVICE, slot) for slot in range(slots)]
        self.issued: tuple[int, ...] | None = None
        self.host: HostTimes | None = None
        self.returned: tuple[int, ...] = ()
        self.filled = 0
        self.windows = WindowUse(workload.windows)
        self._plan = plan
        self._workload = workload
        self._before = before
        self._backward: tuple[int, ...] = ()
        """As for `step`."""
        self._arrived: dict[int, tuple[Buffer, ...]] = {}
        """Gradients on the host, by subgroup, in the parts in which they have been sent."""
        self._state: dict[int, Buffer] = {}
        """Where state is now, by subgroup: with gradients and parameters if on the host."""
        self._updated: dict[int, int] = {}
        """The tasks after which a subgroup's new parameters are where forward finds them."""

    def add(
        self,
        what: tuple[Op, Stream],
        subgroup: int | None,
        size: int,
        after: tuple[int, ...] = (),
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        slot: int | None = None,
        others: tuple[int, ...] = (),
        move: Move | None = None,
        window: int | None = None,
    ) -> int:
        """Add a task. Return its number.

        It waits for the writers of all that it reads, and for the readers of all that it writes, or the writers if
        there are none. after: further tasks that it waits for. writes: with what it reads and changes.
        """
        tasks = self.tasks
        number = len(tasks)
        if reads or writes:
            here = (number,)
            for buffer in reads:
                if buffer.writers != after[:1]:
                    after = buffer.writers + after
                buffer.readers += here
            for buffer in writes:
                after = (buffer.readers or buffer.writers) + after
                buffer.writers, buffer.readers = here, ()
        # As `Task` would make it, in two thirds of the time.
        tasks.append(_NEW(Task, (*what, subgroup, size, after, slot, others, move, window)))
        return number

    def send(self, i: int, size: int, piece: int) -> None:
        """Send gradients to the host as this piece of backward has completed them."""
        part = Buffer()
        self._arrived[i] = (*self._arrived.get(i, ()), part)
        self.add(GRADIENT, i, size, (piece,), (), (part,))

    def add_early(self, transfers: Sequence[Task]) -> None:
        """Add transfers beside backward: of complete gradients to the host, and behind half of it of state to slots."""
        half = (self.piece[len(self._before) // 2],)
        for op, stream, i, size, _, slot, _, move, _ in transfers:
            assert i is not None, "what is transferred is of a subgroup"
            if slot is None:
                self.send(i, size, self.piece[i])
            else:
                self._state[i] = self.slots[slot]
                self.add((op, stream), i, size, half, (), (self.slots[slot],), slot, move=move)

    def step(self, backward: tuple[int, ...], order: Sequence[int] | None = None) -> None:
        """Schedule subgroups that wait for no slot first, then all others as the plan orders them.

        Residents of one format are updated together, behind updates that could hold up a transfer home: of state that
        leaves, and of state that has come to a slot already.
        backward: the tasks that have to end before these gradients are complete and memory of the device may be
        overwritten that no task of the step has used. order: the subgroups that are scheduled; None: all.
        """
        self._backward, before, order = backward, self._before, self._plan.order if order is None else order
        others, arriving, residents, early = [], [], dict[str, list[int]](), set(self._state)
        for i in order:
            if i not in early:
                self._state[i] = Buffer() if before[i].state is HOST else Room(before[i].state)
            gradient, resident = before[i].gradient, self._plan.placements[i] is RESIDENT
            if gradient is HOST or (before[i].state is not DEVICE and not resident):
                others.append(i)
            elif gradient is DEVICE and not resident:
                self._update(i)
                self._to_host(i)
            elif gradient is DEVICE and before[i].state is DEVICE:
                residents.setdefault(self._workload.subgroups[i].format, []).append(i)
            elif gradient is DEVICE:
                arriving.append(i)
            elif not resident and before[i].state is DEVICE:
                self._to_host(i, backward)
        issued = backward if self.issued is None else self.issued
        self._call(sum(self._plan.placements[i] is CPU for i in others) * self.host.turn if self.host else 0.0, issued)
        ahead = [i for i in others if i in early]
        self._others(ahead, 0)
        for together in residents.values():
            numel = sum(before[i].numel for i in together)
            after = backward + self._queue(1)
            update = self.add(ON_DEVICE, together[0], numel, after, others=tuple(together[1:]))
            self._updated |= dict.fromkeys(together, update)
        for i in arriving:
            self._to_device(i, Room(DEVICE), backward)
            self.windows.leave(i)
            self._update(i)
        self._others([i for i in others if i not in early], len(ahead))
        for i in list(self.windows.inside):
            self._write(i)
        if self.host is not None:
            self.returned = self._call(self.host.rest)

    def _call(self, seconds: float, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Let the host take so long, behind what it did before. Return the task."""
        return () if self.host is None else (self.add(CALL, None, round(seconds * 1e9), after),)

    def _queue(self, jobs: int) -> tuple[int, ...]:
        """Let the host queue jobs on the device. Return the task behind which they can begin."""
        return () if self.host is None else self._call(jobs * self.host.job)

    def _others(self, others: Sequence[int], rank: int) -> None:
        """Schedule subgroups that the host updates, or that pass through slots; `rank` have done so before."""
        for i in others:
            before = self._before[i]
            if before.gradient is None:
                if self._state[i].tier is not self._plan.stays(i):
                    self._to_host(i, self._backward)
            elif not self.slots or (before.state is not DEVICE and self._plan.placements[i] is CPU):
                self._on_host(i)
            else:
                self._staged(i, self.slots[rank % len(self.slots)])
                rank += 1
            if i in self._plan.on_disk and self._state[i].tier is HOST and i not in self.windows.inside:
                self.windows.take(i, self._write)
                self._write(i)

    def _staged(self, i: int, slot: Buffer) -> None:
        """Bring state, offloaded gradients or both up for the update, and home again what does not stay."""
        before = self._before[i]
        weights = before.parameter_bytes if before.streams else 0
        returned = (before.gradient_bytes or 0) + weights if before.gradient is HOST else 0
        resident = self._plan.placements[i] is RESIDENT
        if self.filled:  # by backward
            self.filled -= 1
            self._queue(2 - resident)
            queued: tuple[int, ...] = ()
        else:
            queued = self._queue(3 - resident)
        if self._state[i].tier is not DEVICE:
            self._to_device(i, slot, queued, returned)
        elif before.gradient is HOST:
            self.add(PREFETCH, i, returned, queued, self._arrived.get(i, ()), (slot,), slot.slot)
        self._update(i, slot)
        flush = None
        if not resident:
            reads = (slot,) if weights and self._state[i] is not slot else ()
            flush = self._to_host(i, (), reads, weights)
        else:
            self.windows.leave(i)
            if weights:
                flush = self.add(FLUSH, i, weights, (), (slot,), (), slot.slot)
        if weights and flush is not None:
            self._updated[i] = flush

    def _on_host(self, i: int) -> None:
        """Update on the host. State may have to leave the device first; parameters go up unless weights stream."""
        before, through = self._before[i], self._before[i].state is DISK or i in self._plan.on_disk
        if through:  # in a window there is room for the gradients once the state is there
            self._to_host(i, self._backward)
        late = before.gradient_bytes if before.gradient is DEVICE else None
        stale = 0 if before.streams else before.stale_bytes
        arrived, state = self._arrived.get(i, ()), self._state[i]
        if late is not None or stale:
            # Masters follow parameters where they are.
            sent = state if state.tier is HOST else Buffer()
            self.add(GRADIENT, i, (late or 0) + stale, self._backward + self._queue(1), (), (sent,))
            arrived = arrived if sent is state else (*arrived, sent)
        if not through:
            self._to_host(i, self._backward)
        # The host does not wait for the end of backward: gradients that have arrived would wait for it, too.
        issued, state = self._backward if self.issued is None else self.issued, self._state[i]
        self._updated[i] = self.add(ON_HOST, i, before.numel, issued, arrived, (state,))
        if not before.streams:
            # Work that the caller queued before the step still reads the old parameters. State is written to disk
            # behind the copy, for the lane ends when it has queued that.
            self._updated[i] = self.add(PARAMETER, i, before.parameter_bytes, self._backward, (), (state,))

    def _update(self, i: int, slot: Buffer | None = None) -> None:
        state = self._state[i]
        rooms = (state,) if slot is None or slot is state else (slot, state)
        number = None if slot is None else slot.slot
        self._updated[i] = self.add(ON_DEVICE, i, self._before[i].numel, self._backward, (), rooms, number)

    def _to_host(
        self, i: int, after: tuple[int, ...] = (), reads: tuple[Buffer, ...] = (), beside: int = 0
    ) -> int | None:
        """Move state home, or to a window if it does not rest there. Return the task; None: it is on the host.

        after: of a move from the device. reads, beside: as for `_move`.
        """
        tier = self._state[i].tier
        if tier is HOST:
            return None
        from_disk, to_disk = tier is DISK, i in self._plan.on_disk
        window = self.windows.take(i, self._write) if from_disk or to_disk else None
        after = () if from_disk else after
        if window is not None and self._plan.stays(i) is not HOST:
            return self._move(i, window, after, reads, beside)
        task = self._move(i, Buffer(), after, reads, beside, window)
        self.windows.leave(i)
        return task

    def _to_device(self, i: int, room: Buffer, after: tuple[int, ...] = (), beside: int = 0) -> None:
        """Move state to the device, from wherever it is. beside: bytes of gradients and weights that go with it."""
        self._to_host(i)
        self._move(i, room, after, self._arrived.get(i, ()), beside)

    def _write(self, i: int) -> None:
        """Write state to disk, from or through its window."""
        window = self.windows.inside.pop(i)
        self._move(i, Room(DISK), through=None if self._state[i] is window else window)

    def _move(
        self,
        i: int,
        room: Buffer,
        after: tuple[int, ...] = (),
        reads: tuple[Buffer, ...] = (),
        beside: int = 0,
        through: Buffer | None = None,
    ) -> int:
        """Move state. Return the task. reads: beside the state, of `beside` bytes. through: a window that it uses."""
        held, self._state[i] = self._state[i], room
        move, size = Move(held.tier, room.tier), self._workload.subgroups[i].state_bytes + beside
        slot = room.slot if held.slot is None else held.slot
        if slot is None and reads:  # weights that stream come home from a slot, with state that was not in it
            slot = reads[0].slot
        window = (through or (held if room.tier is DISK else room)).window
        writes = (room,) if through is None else (room, through)
        return self.add(MOVES[move], i, size, after, (held, *reads), writes, slot, (), move, window)

    def runs(self) -> list[Run]:
        """The runs of the next forward, in which each subgroup waits for its own parameters."""
        updated = {i: (task,) for i, task in self._updated.items()}
        return [
            (part, size, () if part < 0 or self._before[part].streams else updated.get(part, ()))
            for part, size in self._workload.runs
        ]

    def updated(self, block: BlockLoad) -> tuple[int, ...]:
        """The tasks after which a block's new weights are at home."""
        return tuple(self._updated[i] for i in range(block.start, block.stop) if i in self._updated)
