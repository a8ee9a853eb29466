"""Weights of blocks that stream, in a schedule: they come to the device for forward, and again for backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from perfmodel.lanes import Stream
from perfmodel.timeline import Op
from perfmodel.workload import WEIGHT_WINDOW, BlockLoad, Workload

WEIGHTS = (Op.WEIGHTS, Stream.WEIGHTS)

Add = Callable[[tuple[Op, Stream], int | None, int, tuple[int, ...]], int]
"""Adds a task (operation and stream, subgroup, size, tasks that it waits for) and returns its number."""
After = Callable[[BlockLoad], tuple[int, ...]]


class WeightFetches:
    """The fetches of one schedule, each as soon as the window has room: the block that used it first has ended.

    The blocks of the window are there yet when forward has ended and backward begins, and when backward has ended and
    another forward begins, unless an update has come between.

    A part of compute is known by its place in `Workload.runs`: a subgroup, or ~block.
    """

    def __init__(self, add: Add, workload: Workload, on_device: Collection[int]) -> None:
        self._add = add
        self._streamed = [(b, block) for b, block in enumerate(workload.blocks) if b not in on_device]
        self._ended: list[int] = []
        """The last piece of each use of a block so far."""
        self._begun = 0
        self._coming = deque[tuple[int, int, int, tuple[int, ...]]]()
        """Blocks that this pass has yet to fetch: first part, last part, bytes, and tasks that the fetch waits for."""
        self._fetched: dict[int, int] = {}
        self._last = set[int]()

    def begin(self, *, backward: bool, after: After = lambda block: (), updated: bool = False) -> None:
        """Begin forward or backward. after: returns further tasks that the fetch of a block waits for.

        updated: whether all weights are others than in the pass before.
        """
        self._fetched.clear()
        self._last.clear()
        # Backward has not come to blocks that are frozen before all that is trained.
        trained = backward or all(block.stop for _, block in self._streamed)
        there = WEIGHT_WINDOW if trained and not updated else 0
        for b, block in reversed(self._streamed) if backward else self._streamed:
            parts = range(block.start, block.stop) or (~b,)
            first, last = (parts[-1], parts[0]) if backward else (parts[0], parts[-1])
            if backward and not block.stop:
                break  # backward ends where nothing is trained any more
            if there:
                there -= 1
                self._begun += 1
                self._last.add(last)
            else:
                self._coming.append((first, last, block.nbytes, after(block)))
        while self._coming and self._begun < WEIGHT_WINDOW + len(self._ended):
            self._fetch()

    def wanted(self, part: int) -> tuple[int, ...]:
        """The fetch that this part of compute waits for, if any."""
        return (self._fetched[part],) if part in self._fetched else ()

    def passed(self, part: int, piece: int) -> None:
        """This part of compute ends with this piece."""
        if part in self._last:
            self._ended.append(piece)
            if self._coming:
                self._fetch()

    def _fetch(self) -> None:
        first, last, nbytes, after = self._coming.popleft()
        vacated = (self._ended[self._begun - WEIGHT_WINDOW],) if self._begun >= WEIGHT_WINDOW else ()
        self._fetched[first] = self._add(WEIGHTS, None, nbytes, (*vacated, *after))
        self._last.add(last)
        self._begun += 1
