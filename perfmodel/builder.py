"""Tasks in issue order, from a plan and the places where a step finds state and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.compute import Run
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Plan
from perfmodel.tasks import (
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
from perfmodel.workload import BlockLoad, Workload


class ScheduleBuilder:
    """The tasks of a schedule so far.

    piece: of backward, by the subgroup whose gradient is complete then. windows: on the host, for state on disk.
    departed, fetched: by subgroup, tasks beside backward that bring its gradients to the host, or
        its state to a slot.
    """

    def __init__(
        self, plan: Plan, workload: Workload, found: Sequence[SubgroupState] | Mapping[int, SubgroupState]
    ) -> None:
        self.tasks: list[Task] = []
        self.piece: dict[int, int] = {}
        self._plan = plan
        self._workload = workload
        self._found = found
        self._backward: tuple[int, ...] = ()
        """As for `step`."""
        self.issued: tuple[int, ...] | None = None
        """The task of backward at whose end the host issues the step, if not behind it."""
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
        # As `Task` would make it, in two thirds of the time.
        self.tasks.append(tuple.__new__(Task, (*what, subgroup, size, after, slot, others, move, window)))
        return len(self.tasks) - 1

    def add_early(self, transfers: Sequence[Task], found: Sequence[SubgroupState]) -> None:
        """Add transfers beside backward, of complete gradients to the host and of state to the device.

        State that is to stay comes from the first gradient on, state that comes to a slot after half of backward.
        """
        first = len(self.tasks)
        after: dict[int, int] = {}
        for i, each in enumerate(found):
            if each.departed:
                self.departed[i] = tuple(first + place for place in each.departed)
                after |= dict.fromkeys(each.departed, self.piece[i])
            if each.fetched is not None:
                self.fetched[i] = first + each.fetched
                to_stay = transfers[each.fetched].slot is None
                after[each.fetched] = self.piece[len(found) - 1 if to_stay else len(found) // 2]
        self.tasks += [task._replace(after=(after[place],)) for place, task in enumerate(transfers)]

    def step(
        self, backward: tuple[int, ...], vacated: list[tuple[int, ...]], order: Sequence[int] | None = None
    ) -> None:
        """Schedule subgroups that wait for no slot first, then all others as the plan orders them.

        Residents of one format are updated together, behind updates that could hold up a transfer home: of state that
        leaves, and of state that has come to a slot already.
        backward: the tasks that have to end before these gradients are complete and parameters may be overwritten.
        vacated: by slot, the tasks that have to end before it is filled for the first time. order: the subgroups that
        are scheduled; None: all.
        """
        self._backward, found, order = backward, self._found, self._plan.order if order is None else order
        others, arriving, residents = [], [], dict[str, list[int]]()
        for i in order:
            gradient, resident = found[i].gradient, self._plan.placements[i] is RESIDENT
            if gradient is HOST or (found[i].state is not DEVICE and not resident):
                others.append(i)
            elif gradient is DEVICE and not resident:
                self._leave(i, (self._update(i, backward),))
            elif gradient is DEVICE and found[i].state is DEVICE:
                residents.setdefault(self._workload.subgroups[i].format, []).append(i)
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
        for i in list(self.windows.inside):
            self.windows.write(i)

    def _others(self, others: Sequence[int], rank: int, vacated: list[tuple[int, ...]]) -> None:
        """Schedule subgroups that the host updates, or that pass through slots; `rank` have done so before."""
        for i in others:
            found = self._found[i]
            if found.gradient is None:
                if found.state is not self._plan.stays(i):
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
        """Bring state that is to stay, and update it."""
        fetched = self.fetched.get(i)
        if fetched is None:
            fetched = self._to_device(i, self._backward)
        self.windows.leave(i, (fetched,))
        self._update(i, (fetched, *self._backward))

    def _staged(self, i: int, slot: int, vacated: tuple[int, ...]) -> int:
        """Bring state, offloaded gradients or both up for the update. Return the task that frees the slot again."""
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
        """Update on the host. State may have to leave the device first; parameters go up unless weights stream."""
        found, ready = self._found[i], self.departed.get(i, ())
        through = found.state is DISK or self._plan.stays(i) is DISK
        here = self._to_host(i) if through else ()
        late = found.gradient_bytes if found.gradient is DEVICE else None
        stale = 0 if found.streams else found.stale_bytes
        if late is not None or stale:
            # In a window there is room for them once the state is there, and masters then follow parameters.
            after = (*self._backward, *here) if found.state is DISK or i in self.windows.inside else self._backward
            ready += (self.add(GRADIENT, i, (late or 0) + stale, after),)
        ready += here if through else self._to_host(i)
        # The host does not wait for the end of backward: gradients that have arrived would wait for it, too.
        issued = self._backward if self.issued is None or late is not None or stale else self.issued
        update = self._updated[i] = self.add(ON_HOST, i, found.numel, ready + issued)
        if not found.streams:
            # Work that the caller queued before the step still reads the old parameters.
            after = (update, *self._backward)
            self._updated[i] = self.add(PARAMETER, i, found.parameter_bytes, after)
        self._rest(i, (self._updated[i],))

    def _update(self, i: int, after: tuple[int, ...], slot: int | None = None) -> int:
        update = self._updated[i] = self.add(ON_DEVICE, i, self._found[i].numel, after, slot)
        return update

    def _leave(self, i: int, after: tuple[int, ...], slot: int | None = None, beside: int = 0) -> int:
        """Move state from the device, home or to a window. beside: as for `_move`."""
        if self._plan.stays(i) is not DISK:
            return self._move(i, Move(DEVICE, self._plan.stays(i)), after, slot, beside)
        window, vacated = (self.windows.inside[i], ()) if i in self.windows.inside else self.windows.take(i)
        flush = self._move(i, Move(DEVICE, HOST), (*after, *vacated), slot, beside, window)
        self.windows.complete(i, (flush,))
        return flush

    def _from_disk(self, i: int) -> tuple[int, ...]:
        """Move state from disk, home if it is to rest there, else to a window. Return the task that does, if any."""
        if self._found[i].state is not DISK:
            return ()
        window, vacated = self.windows.take(i)
        read = self._move(i, Move(DISK, HOST), vacated, window=window)
        if self._plan.stays(i) is HOST:
            self.windows.leave(i, (read,))
        return (read,)

    def _to_device(self, i: int, after: tuple[int, ...], slot: int | None = None, beside: int = 0) -> int:
        """Move state to the device, from wherever it is. Return the task that does. beside: as for `_move`."""
        here = self._from_disk(i)
        return self._move(i, Move(HOST if here else self._found[i].state, DEVICE), (*after, *here), slot, beside)

    def _to_host(self, i: int) -> tuple[int, ...]:
        """Move state to the host, from wherever it is. Return the task that does, if any."""
        state = self._found[i].state
        here = () if state is DEVICE else self._from_disk(i)
        if here or state is HOST:
            return here
        if state is DEVICE and self._plan.stays(i) is DISK:
            return (self._leave(i, self._backward),)
        return (self._move(i, Move(state, HOST), self._backward),)

    def _rest(self, i: int, after: tuple[int, ...]) -> None:
        """Let state rest that the host has after these tasks: state that is at home and belongs on disk is written."""
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
        """Move state from tier to tier. beside: bytes that go the same way."""
        size = self._workload.subgroups[i].state_bytes + beside
        return self.add(MOVES[move], i, size, after, slot, move=move, window=window)

    def runs(self) -> list[Run]:
        """The runs of the next forward, in which each subgroup waits for its own parameters."""
        updated = {i: (task,) for i, task in self._updated.items()}
        return [
            (part, size, () if part < 0 or self._found[part].streams else updated.get(part, ()))
            for part, size in self._workload.runs
        ]

    def updated(self, block: BlockLoad) -> tuple[int, ...]:
        """The tasks after which a block's new weights are at home."""
        return tuple(self._updated[i] for i in range(block.start, block.stop) if i in self._updated)
