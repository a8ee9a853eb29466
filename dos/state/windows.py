"""Windows: host memory through which state passes that rests on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Device
from dos.devices.pinned import lazy_zeros
from dos.state.arena import State, aligned
from dos.state.disk.extent import PAGE
from dos.state.subgroup import Subgroup


class Window(NamedTuple):
    """The contents of a window while a subgroup has it.

    pages: the state as it is on disk, 1-D uint8; state: the same by fields.
    gradient, parameter: room for gradients and new parameters on their way, as `Subgroup` has it at home.
    """

    pages: Tensor
    state: State
    gradient: Tensor
    parameter: Tensor | None


def disk_bytes(subgroup: Subgroup) -> int:
    """Bytes of the subgroup's state on disk, where each field begins on a page, as it does in a window."""
    return sum(aligned(t.nbytes, PAGE) for t in subgroup.state.tensors())


def window_bytes(subgroups: Iterable[Subgroup]) -> int:
    """Bytes of a window that takes any one of these."""
    # Asked in every step, so of the largest of each arena alone.
    largest = {s.arena: s for s in sorted(subgroups, key=lambda s: s.numel)}.values()
    tensors = ((*s.state.tensors(), s.gradient, None if s.arena.streams else s.parameter) for s in largest)
    return max((sum(aligned(t.nbytes, PAGE) for t in each if t is not None) for each in tensors), default=0)


class Windows:
    """Windows of equal size, pinned.

    kept: what stays there between steps, by subgroup: state that is newer than that on disk.
    """

    def __init__(self) -> None:
        self.kept: dict[Subgroup, int] = {}
        self._buffers: list[Tensor] = []
        self._entered: dict[Subgroup, Window] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of all."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def fit(self, count: int, nbytes: int) -> bool:
        """Whether there are so many windows of so many bytes."""
        return len(self._buffers) >= count and all(buffer.nbytes >= nbytes for buffer in self._buffers)

    def make(self, count: int, nbytes: int, device: Device) -> None:
        """Make so many windows in place of those there are, in which nothing is kept."""
        assert not self.kept, "it would be lost"
        # The old ones go first: the host may not have room for both.
        self._buffers, self._entered = [], {}
        for _ in range(count):
            buffer = lazy_zeros(aligned(nbytes, PAGE), torch.uint8)
            device.pin(buffer)
            self._buffers.append(buffer)

    def enter(self, subgroup: Subgroup, number: int) -> Window:
        """Let the subgroup have a window."""
        buffer, pages = self._buffers[number], disk_bytes(subgroup)
        gradient, parameter = subgroup.gradient, subgroup.parameter
        room = buffer[pages : pages + gradient.nbytes].view(gradient.dtype)
        # Weights that stream have their home on the host whatever the state does.
        beside = parameter if subgroup.arena.streams else None
        if parameter is not None and beside is None:
            beside = buffer[pages + aligned(gradient.nbytes, PAGE) :][: parameter.nbytes].view(parameter.dtype)
        window = Window(buffer[:pages], subgroup.state.carve(buffer, PAGE), room, beside)
        self._entered[subgroup] = window
        return window

    def of(self, subgroup: Subgroup) -> Window | None:
        """The one in which the subgroup's state is in this step, or was before it."""
        return self._entered.get(subgroup)

    def begin(self) -> None:
        """A step begins: only what is kept has windows yet."""
        self._entered = {subgroup: self._entered[subgroup] for subgroup in self.kept}

    def leave(self, subgroup: Subgroup) -> None:
        """The subgroup's state is elsewhere, or of no use any more."""
        self.kept.pop(subgroup, None)
        self._entered.pop(subgroup, None)
