"""A pinned region of host memory, from which `ActivationOffload` takes a block for each saved tensor that it moves."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

import torch
from torch import Tensor

from dos.devices import Device
from dos.devices.pinned import lazy_zeros, pinned_bytes
from dos.state.arena import aligned

Gap = tuple[int, int]
"""Where memory of the region that is not in use starts and ends, in bytes."""


class Block:
    """Memory of a pool, free once this is collected. tensor: of the size asked for, 1-D uint8."""

    __slots__ = ("_freed", "_gap", "tensor")

    def __init__(self, tensor: Tensor, gap: Gap, freed: deque[Gap]) -> None:
        """gap: where the memory lies. freed: receives the gap once this is collected."""
        self.tensor, self._gap, self._freed = tensor, gap, freed

    def __del__(self) -> None:
        # Any thread may collect a saved tensor and its block, in the middle of a call of the pool: appending to a deque
        # needs no lock.
        self._freed.append(self._gap)


class HostPool:
    """One pinned region of `nbytes`. pinned_bytes: bytes of it that a CUDA runtime has pinned."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.resize(0)

    def resize(self, nbytes: int) -> None:
        """Replace the region by one of this size; the memory of the old one is released with its last block."""
        self.nbytes = self.pinned_bytes = self._used = 0
        self._gaps: list[Gap] = []  # by address; no two touch
        self._freed: deque[Gap] = deque()  # another than that of the old region's blocks
        # The old region is released before another is allocated, so that the host never holds both.
        self._region = torch.empty(0, dtype=torch.uint8, device="cpu")
        nbytes = aligned(nbytes)
        if nbytes:
            region = lazy_zeros(nbytes, torch.uint8)
            self._device.pin(region)
            self._region, self.nbytes, self.pinned_bytes = region, nbytes, pinned_bytes(region)
            self._gaps = [(0, nbytes)]

    @property
    def used(self) -> int:
        """Bytes of blocks that are in use."""
        self._collect()
        return self._used

    def take(self, nbytes: int) -> Block | None:
        """Return a block of this size in the first gap that is large enough; None if no gap is."""
        self._collect()
        needed = aligned(nbytes)
        for place, (start, end) in enumerate(self._gaps):
            if end - start >= needed:
                self._gaps[place : place + 1] = [(start + needed, end)] if end - start > needed else []
                self._used += needed
                return Block(self._region[start : start + nbytes], (start, start + needed), self._freed)
        return None

    def _collect(self) -> None:
        """Make gaps of the blocks that were collected, each one with the gaps that it touches."""
        while self._freed:
            start, end = self._freed.popleft()
            self._used -= end - start
            first = last = bisect_left(self._gaps, (start, end))
            if first and self._gaps[first - 1][1] == start:
                first -= 1
                start = self._gaps[first][0]
            if last < len(self._gaps) and self._gaps[last][0] == end:
                end = self._gaps[last][1]
                last += 1
            self._gaps[first:last] = [(start, end)]
