"""Windows on the host, through which state passes that rests on disk, as a schedule uses them."""

from __future__ import annotations

from collections.abc import Callable

from perfmodel.buffers import Buffer, Room
from perfmodel.plan import Tier

WINDOWS = 4
"""One is read into, one updated, one written, and one in between."""


class WindowUse:
    """The windows and the state in them, which is written when another subgroup needs the window, not before.

    inside: the windows by subgroup.
    """

    def __init__(self, count: int) -> None:
        self.inside: dict[int, Buffer] = {}
        self._windows: list[Buffer] = [Room(Tier.HOST, window=window) for window in range(count)]
        """The one first that was taken longest ago."""

    def take(self, subgroup: int, write: Callable[[int], None]) -> Buffer:
        """Take a window for a subgroup's state, unless it has one. Return it. Raises ValueError if there is none.

        write: adds the task that writes a subgroup's state, which leaves its window. Not an attribute: it belongs to
        what has this, and each schedule would wait for the garbage collector.
        """
        if subgroup not in self.inside:
            if not self._windows:
                raise ValueError("a plan with state on disk needs at least 1 window on the host, found 0")
            occupants = {window: occupant for occupant, window in self.inside.items()}
            window = next((window for window in self._windows if window not in occupants), self._windows[0])
            if window in occupants:
                write(occupants[window])
            self._windows.remove(window)
            self._windows.append(window)
            self.inside[subgroup] = window
        return self.inside[subgroup]

    def wait(self, after: tuple[int, ...]) -> None:
        """Let no window be filled before these tasks have ended."""
        for window in self._windows:
            window.keep(after)

    def leave(self, subgroup: int) -> None:
        """Free the window of a subgroup, if any."""
        self.inside.pop(subgroup, None)
