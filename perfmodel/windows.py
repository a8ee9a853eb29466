"""Windows on the host, through which state passes that rests on disk, as a schedule uses them."""

from __future__ import annotations

from collections.abc import Callable

WINDOWS = 4
"""One is read into, one updated, one written, and one in between."""

Write = Callable[[int, int, tuple[int, ...]], int]
"""Adds the task that writes a subgroup's state, from a window, after some tasks; its number."""


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
        """Turn by window, at which it was last taken."""

    def take(self, subgroup: int) -> tuple[int, tuple[int, ...]]:
        """Take a window for a subgroup's state. Return it and the tasks that have to end before it is filled.

        Raises ValueError if there is none.
        """
        if not self._turns:
            raise ValueError("a plan with state on disk needs at least 1 window on the host, found 0")
        occupants = {window: occupant for occupant, window in self.inside.items()}

        window = min(range(len(self._turns)), key=lambda window: (window in occupants, self._turns[window]))
        if window in occupants:
            self.write(occupants[window])
        self.inside[subgroup] = window
        self._turns[window] = max(self._turns) + 1
        return window, self._after[window]

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
        self.leave(subgroup, (self._write(subgroup, window, self._after[window]),))
