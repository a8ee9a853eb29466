"""The order in which forwards use blocks, by which others are fetched while one computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dos.weights.block import Block
from perfmodel.workload import WEIGHT_WINDOW


class UseOrder:
    """The order of the forward that runs, and of the last one.

    following, preceding: the block that the last forward used after each block, and before each.
    first, last: the first and the last window: the blocks that stream and are used first, and last.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.following = dict(itertools.pairwise(blocks))
        self.preceding = {after: before for before, after in self.following.items()}
        self._last_run: Block | None = None
        self._used: dict[Block, None] = dict.fromkeys(blocks)
        """The blocks in the order in which the forward that runs has used them first."""
        self.first, self.last = self._ends()

    def begin(self) -> None:
        """Begin to note the order in which blocks are used."""
        self._used, self._last_run = {}, None

    def use(self, block: Block) -> None:
        """Note that a forward uses the block now."""
        if self._last_run is not None and self._last_run is not block:
            self.following[self._last_run], self.preceding[block] = block, self._last_run
        self._last_run = block
        self._used[block] = None

    def interrupt(self) -> None:
        """Let the block that is used next follow none: a forward within another has ended."""
        self._last_run = None

    def is_used_again(self, block: Block) -> bool:
        """Return whether the forward that runs has used the block, and others since."""
        return block in self._used and block is not self._last_run

    def end(self) -> None:
        """End the order of a forward."""
        self.first, self.last = self._ends()
        self.begin()

    def _ends(self) -> tuple[frozenset[Block], frozenset[Block]]:
        used = [block for block in self._used if block.streams]
        return frozenset(used[:WEIGHT_WINDOW]), frozenset(used[-WEIGHT_WINDOW:])
