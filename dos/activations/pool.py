"""A pinned region of host memory, from which `ActivationOffload` takes a block for each saved tensor that it moves."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dos.devices import Device
from dos.devices.pinned import lazy_zeros, pinned_bytes
from dos.state.arena import aligned


class Block:
    """Memory of a pool from `start` to `end`, free once this is collected. tensor: of the size asked for, 1-D uint8."""

    __slots__ = ("__weakref__", "end", "start", "tensor")

    def __init__(self, tensor: Tensor, start: int, end: int) -> None:
        self.tensor, self.start, self.end = tensor, start, end


class HostPool:
    """One pinned region of `nbytes`. pinned_bytes: bytes of it that a CUDA runtime has pinned."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.resize(0)

    def resize(self, nbytes: int) -> None:
        """Replace the region by one of this size; the memory of the old one is released with its last block."""
        self.nbytes = self.pinned_bytes = 0
        self._blocks: list[weakref.ref[Block]] = []  # by address
        # The old region is released before another is allocated, so that the host never holds both.
        self._region = torch.empty(0, dtype=torch.uint8, device="cpu")
        nbytes = aligned(nbytes)
        if nbytes:
            region = lazy_zeros(nbytes, torch.uint8)
            self._device.pin(region)
            self._region, self.nbytes, self.pinned_bytes = region, nbytes, pinned_bytes(region)

    @property
    def used(self) -> int:
        """Bytes of blocks that are in use."""
        return sum(block.end - block.start for block in self._in_use())

    def take(self, nbytes: int) -> Block | None:
        """Return a block of this size in the first gap that is large enough; None if no gap is."""
        needed, blocks, end = aligned(nbytes), self._in_use(), 0
        for place, start in enumerate([*(block.start for block in blocks), self.nbytes]):
            if start - end >= needed:
                # The list refers to blocks weakly: a block is free once no saved tensor refers to it.
                found = Block(self._region[end : end + nbytes], end, end + needed)
                self._blocks = [weakref.ref(block) for block in (*blocks[:place], found, *blocks[place:])]
                return found
            end = blocks[place].end if place < len(blocks) else end
        return None

    def _in_use(self) -> list[Block]:
        # Strong references while the caller looks for a gap: any thread may collect a saved tensor and its block.
        return [block for block in (reference() for reference in self._blocks) if block is not None]
