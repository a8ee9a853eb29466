"""Windows: host memory through which state on disk passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Device, pinned_whole
from dos.devices.pinned import lazy_zeros, pinned_bytes
from dos.state.arena import State, aligned
from dos.state.disk.extent import PAGE
from dos.state.subgroup import Subgroup


class Window(NamedTuple):
    """The contents of a window while a subgroup has it.

    pages: the state as it is on disk, 1-D uint8; state: the same memory by fields.
    gradient, parameter: staging for gradients and new parameters, in place of the subgroup's own.
    """

    pages: Tensor
    state: State
    gradient: Tensor
    parameter: Tensor | None


def disk_bytes(subgroup: Subgroup) -> int:
    """Return the bytes of the subgroup's state on disk, where each field begins on a page, as in a window."""
    return sum(aligned(t.nbytes, PAGE) for t in subgroup.state.tensors())


def window_bytes(subgroups: Iterable[Subgroup], *, streams: bool = False) -> int:
    """Return the bytes of a window that is large enough for each of these. streams: whether all their weights will."""
    # Only the largest subgroup of each arena, because every step calls this.
    largest = {s.arena: s for s in sorted(subgroups, key=lambda s: s.numel)}.values()
    tensors = ((*s.state.tensors(), s.gradient, None if streams or s.arena.streams else s.parameter) for s in largest)
    return max((sum(aligned(t.nbytes, PAGE) for t in each if t is not None) for each in tensors), default=0)


class Windows:
    """Windows of equal size, pinned.

    nbytes: bytes of all windows. pinned_bytes: of these, those that a CUDA runtime has pinned.
    """

    def __init__(self) -> None:
        self.nbytes = self.pinned_bytes = 0
        self._buffers: list[Tensor] = []
        self._entered: dict[Subgroup, Window] = {}

    def fit(self, count: int, nbytes: int) -> bool:
        """Return whether there are `count` windows of `nbytes` each, or more."""
        return len(self._buffers) >= count and all(buffer.nbytes >= nbytes for buffer in self._buffers)

    def make(self, count: int, nbytes: int, device: Device) -> None:
        """Allocate windows in place of the present ones."""
        # The old windows are released first, because the host may not have memory for both.
        self._buffers, self._entered, self.nbytes = [], {}, 0
        for _ in range(count):
            self._buffers.append(pinned_whole(device, lazy_zeros(aligned(nbytes, PAGE), torch.uint8)))
            self.nbytes += self._buffers[-1].nbytes
        self.pinned_bytes = sum(map(pinned_bytes, self._buffers))

    def enter(self, subgroup: Subgroup, number: int) -> Window:
        """Give a window to the subgroup."""
        buffer, pages = self._buffers[number], disk_bytes(subgroup)
        gradient, parameter = subgroup.gradient, subgroup.parameter
        room = buffer[pages : pages + gradient.nbytes].view(gradient.dtype)
        # Weights that stream have their home on the host, wherever the state is.
        staged = parameter if subgroup.arena.streams else None
        if parameter is not None and staged is None:
            staged = buffer[pages + aligned(gradient.nbytes, PAGE) :][: parameter.nbytes].view(parameter.dtype)
        window = Window(buffer[:pages], subgroup.state.carve(buffer, PAGE), room, staged)
        self._entered[subgroup] = window
        return window

    def of(self, subgroup: Subgroup) -> Window | None:
        """Return the window of the subgroup's state in this step; None if it has none."""
        return self._entered.get(subgroup)

    def begin(self) -> None:
        """Begin a step, in which other state passes through the windows."""
        self._entered = {}

    def leave(self, subgroup: Subgroup) -> None:
        """Take the window away from a subgroup whose state is elsewhere or of no use."""
        self._entered.pop(subgroup, None)
