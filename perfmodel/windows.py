"""Windows on the host, through which state passes that rests on disk, as a schedule uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from perfmodel.plan import Plan
from perfmodel.workload import Workload

WINDOWS = 4
"""One is read into, one updated, one written, and one in between."""

Write = Callable[[int, int, tuple[int, ...]], int]
"""Adds the task that writes a subgroup's state, from a window, after some tasks; its number."""


def ordered(plan: Plan, workload: Workload, *, reverse: bool = False) -> Plan:
    """The plan in the order in which one step serves it, and the next one its reverse, where nothing else decides it.

    A step so begins with the state that windows have from the last one. It goes first, because windows are free for
    others only when it has been updated and written.
    """
    if not (plan.on_disk and workload.reverses):
        return plan
    on_disk = [i for i in plan.order if i in plan.on_disk]
    count = min(workload.windows, len(on_disk) // 2)
    first, last = on_disk[:count], on_disk[len(on_disk) - count :]
    order = (*first, *(i for i in plan.order if i not in {*first, *last}), *last)
    return dataclasses.replace(plan, order=order[::-1] if reverse else order)


class WindowUse:
    """The windows and the state in them, which is written when another subgroup needs the window, not before.

    inside: the windows by subgroup.
    """

    def __init__(self, count: int, write: Write) -> None:
        self.inside: dict[int, int] = {}
        self._write = write
        self._after: list[tuple[int, ...]] = [()] * count
        """Tasks by window, after which it is free, or the state in it as it will be written."""
        self._turns = [0] * count
        """Turn by window, at which it was last taken; below 0: its state is from before, and its turn is to come."""
        self._written: dict[int, tuple[int, ...]] = {}

    def hold(self, subgroup: int, window: int, turn: int, after: tuple[int, ...] = ()) -> None:
        """Hold state that is in a window from before. turn: its place among the updates. after: tasks that read it."""
        while window >= len(self._turns):  # there were more windows then
            self._after.append(())
            self._turns.append(0)
        self.inside[subgroup] = window
        self._turns[window] = -1 - turn
        self._after[window] = after

    def take(self, subgroup: int) -> tuple[int, tuple[int, ...]]:
        """Take a window for a subgroup's state. Return it and the tasks that have to end before it is filled.

        Raises ValueError if there is none.
        """
        if not self._turns:
            raise ValueError("a plan with state on disk needs at least 1 window on the host, found 0")
        occupants = {window: occupant for occupant, window in self.inside.items()}

        def cost(window: int) -> tuple[bool, bool, int]:
            return window in occupants, self._turns[window] < 0, self._turns[window]

        window = min(range(len(self._turns)), key=cost)
        if window in occupants:
            self.write(occupants[window])
        self.inside[subgroup] = window
        self.use(subgroup)
        return window, self._after[window] + self._written.get(subgroup, ())

    def use(self, subgroup: int) -> None:
        """Note that it is the turn of a subgroup."""
        if subgroup in self.inside:
            self._turns[self.inside[subgroup]] = max(0, *self._turns) + 1

    def complete(self, subgroup: int, after: tuple[int, ...]) -> None:
        """Note the tasks after which the state in the window is as it will be written."""
        self._after[self.inside[subgroup]] = after

    def leave(self, subgroup: int, after: tuple[int, ...]) -> None:
        """Free the window of a subgroup, if any, after the tasks that bring its state elsewhere."""
        if subgroup in self.inside:
            self._after[self.inside.pop(subgroup)] = after

    def write(self, subgroup: int) -> None:
        """Write the state, which leaves its window."""
        window = self.inside[subgroup]
        self._written[subgroup] = (self._write(subgroup, window, self._after[window]),)
        self.leave(subgroup, self._written[subgroup])
