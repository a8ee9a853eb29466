"""Fetches blocks from their homes, ahead of their use where there is room, and releases them."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dos.devices import Device, Job, Mark
from dos.weights.block import Block, OnDevice, take_replaced
from perfmodel.workload import WEIGHT_WINDOW

_MOST_JOBS = 1000
"""The most transfers and waits that are remembered if no step reads them."""


class Fetching:
    """The transfers of one model's blocks, which begin once the homes have their newest values.

    blocks: in the order of the model.
    late: the block that ran when a block after it still had to be updated on the host.
    """

    def __init__(self, device: Device, blocks: Sequence[Block], there: OnDevice, watcher: Any) -> None:
        """watcher: see WeightStream."""
        self.blocks = blocks
        self._device, self._there = device, there
        # Weak: the model's hooks refer to this, and must not keep its optimizer alive.
        self._watcher = weakref.ref(watcher)
        self._moves: deque[Job] = deque(maxlen=_MOST_JOBS)
        self._stalls: deque[tuple[Mark, Mark]] = deque(maxlen=_MOST_JOBS)
        self.late: Block | None = None

    @property
    def watcher(self) -> Any:
        """The watcher; None if its optimizer was deleted."""
        return self._watcher()

    def stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Return where the caller's waits for weights began and ended since the last call of this."""
        given, self._stalls = self._stalls, deque(maxlen=_MOST_JOBS)
        return given

    def moves(self) -> deque[Job]:
        """Return the transfers since the last call of this, in the order of their issue."""
        given, self._moves = self._moves, deque(maxlen=_MOST_JOBS)
        return given

    def use(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Order the caller's queue behind the fetch of the block, and fetch the blocks that follow in this order."""
        before = self._device.mark() if block.streams and not block.joined else None
        if not block.filled:
            self._fetch(block)
        self.fetch_ahead(block, order)
        # Last: the join holds the queue back, and later fetches are ordered behind the queue by their fence.
        block.join()
        if before is not None:
            self._stalls.append((before, self._device.mark()))

    def _fetch(self, block: Block) -> None:
        """Start to fetch a block that is needed now. Raises torch.OutOfMemoryError."""
        after = self._ready(block, wait=True)
        assert after is not None, "it has waited"
        try:
            self._moves.append(block.fetch(after))
        except torch.OutOfMemoryError:
            # First blocks that were fetched ahead, which can be fetched again; then state.
            for other in self.blocks:
                self.release_unused(other)
            watcher = self.watcher
            if watcher is not None:
                watcher.assembly.on_device.give_way(block.nbytes)
            self._moves.append(block.fetch(after))

    def fetch_ahead(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Start to fetch the blocks after this one, if their updates have ended and the window has room."""
        room = WEIGHT_WINDOW - self._there.streaming
        following: Block | None = block
        for _ in self.blocks:  # bounded, because a forward may use a block again
            following = None if following is None else order.get(following)
            if following is None or room <= 0:
                return
            if following.streams and not following.filled:
                after = self._ready(following, wait=False)
                if after is None:
                    self.late = block
                    return
                with contextlib.suppress(torch.OutOfMemoryError):  # there may be memory when the block runs
                    self._moves.append(following.fetch(after))
                    room -= 1

    def _ready(self, block: Block, *, wait: bool) -> Sequence[Job] | None:
        watcher = self.watcher
        if watcher is None:
            return ()
        found: Sequence[Job] | None = watcher.waiting.weights_ready([m.parameter for m in block.members], wait=wait)
        return found

    def finish_updates(self, block: Block) -> None:
        """Finish the updates of all parameters of a block that is about to run, or a part of it."""
        watcher = self.watcher
        if watcher is not None:
            # Some are read without a module that runs, as where attention reads its projection. Their versions rise
            # now: autograd would take a later rise for a write to tensors that a forward, also in backward, has saved.
            watcher.waiting.finish_within([m.parameter for m in block.members])

    def release(self, block: Block) -> None:
        """Release a block if it streams."""
        if block.streams:
            block.release()

    def release_unused(self, block: Block) -> None:
        """Release a block if it streams, and neither a forward nor a backward uses it."""
        if not (block.running or block.touched):
            self.release(block)

    def take_replaced(self, block: Block) -> None:
        """Take over the values of parameters of the block whose memory user code has replaced.

        Raises RuntimeError if an update was lost with the former memory, and as the `take_replaced` of blocks.
        """
        if not block.replaced():
            return
        # Of all blocks at once: the memory of one may be the place of another's, as where user code exchanges weights.
        found = {each: parameters for each in self.blocks if (parameters := each.replaced())}
        # As `WeightStream.before_reading`, within a call of the optimizer.
        for each in found:
            self.release_unused(each)
            each.finish_reading()
        watcher = self.watcher
        if watcher is not None:
            watcher.waiting.finish_homes_within([p for parameters in found.values() for p in parameters])
        take_replaced(found)
        if watcher is not None:
            watcher.registry.relocated(
                {id(p): each.places[id(p)] for each, parameters in found.items() for p in parameters}
            )
