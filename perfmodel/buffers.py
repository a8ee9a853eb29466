"""Buffers: memory that tasks read and write, from which it follows which tasks wait for which."""

from __future__ import annotations

from perfmodel.plan import Tier


class Buffer:
    """Memory that tasks use: of gradients, or of state, which is in a slot, in a window, or in room of its own.

    tier: where it is. slot, window: its number, if it is one.
    writers: the tasks that wrote it last. readers: those that have read it since, and so have waited for the writers.
    """

    # Defaults of the class: a planner makes some hundred thousand, and `__init__` would take longer than all else.
    tier = Tier.HOST
    slot: int | None = None
    window: int | None = None
    writers: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()

    def keep(self, tasks: tuple[int, ...]) -> None:
        """Let nothing overwrite this before these tasks have ended, too."""
        self.readers = (*(self.readers or self.writers), *tasks)


class Room(Buffer):
    """A buffer for state elsewhere than in a home on the host."""

    def __init__(self, tier: Tier, slot: int | None = None, window: int | None = None) -> None:
        self.tier, self.slot, self.window = tier, slot, window
