"""Tensors on the host whose memory is allocated part by part."""

from __future__ import annotations

import mmap

import torch

from dos.devices import Device
from dos.devices.pinned import lazy_zeros, pinned_bytes, use_huge_pages


class HostTensor:
    """1-D zeros on the host whose memory is allocated and pinned part by part.

    nbytes: the bytes that are allocated. pinned_bytes: of them, those that a CUDA runtime has pinned.
    whole: whether all of it is allocated.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: Device, part: int, block: int = 1) -> None:
        """Map the addresses of `numel` parameters, without memory.

        part: parameters of each part but the last one. Parts that share pages are allocated all together.
        block: parameters to one element.
        """
        self.tensor = lazy_zeros(numel // block, dtype, in_parts=True)
        self.nbytes = self.pinned_bytes = 0
        self.whole = not self.tensor.nbytes
        self._device = device
        self._block = block
        self._parted = part // block * dtype.itemsize % mmap.PAGESIZE == 0
        self._allocated = False
        self._made: set[tuple[int, int]] = set()
        self._pinned: list[tuple[int, int]] = []

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and last element that are allocated together with the elements of these parameters."""
        return (start // self._block, stop // self._block) if self._parted else (0, len(self.tensor))

    def has(self, start: int, stop: int) -> bool:
        """Return whether the memory of these parameters is allocated."""
        # All of it, as in most steps; parts do not overlap.
        if start == stop or self.whole:
            return True
        if self._parted:  # `part`, without a call: each step asks for each subgroup
            return (start // self._block, stop // self._block) in self._made
        return self.part(start, stop) in self._made

    def allow_huge_pages(self, first: int, last: int) -> None:
        """Let a part that will be allocated share huge pages with neighbours that may have them."""
        use_huge_pages(self.tensor[first:last])

    def make(self, first: int, last: int, *, whole: bool = False) -> None:
        """Allocate and pin the memory of a part.

        whole: whether all may be allocated at once, in other memory, where the device does not pin this, because no
            views of it are kept.
        """
        if self._allocated:
            return
        made = self.tensor[first:last]
        is_pinned = self._device.pin(made)
        if whole and not (is_pinned or self._made) and self._allocate():
            return
        self._made.add((first, last))
        self.pinned_bytes += pinned_bytes(made)
        self._pinned.append((first, last))
        self.nbytes += made.nbytes
        self.whole = self.nbytes == self.tensor.nbytes

    def _allocate(self) -> bool:
        """Take memory that the device has allocated; return whether it has. Nothing is in this memory so far."""
        found = self._device.allocate_pinned(self.tensor.nbytes)
        if found is None:
            return False
        self.tensor = found.view(self.tensor.dtype)
        self._allocated, self._parted = True, False
        self.nbytes = self.pinned_bytes = self.tensor.nbytes
        self.whole = True
        self._made.add((0, len(self.tensor)))
        return True

    def release(self, start: int, stop: int) -> None:
        """Release the memory of these parameters, if it is a part of its own. No transfer in flight may use it."""
        part = self.part(start, stop)
        if not self._parted or part not in self._made:
            return
        first, last = part
        # CUDA unregisters only whole regions as they were registered: neighbours are unpinned, and pinned again.
        whole = next(region for region in self._pinned if region[0] <= first and last <= region[1])
        self._pinned.remove(whole)
        self._device.unpin(self.tensor[slice(*whole)], self.tensor[first:last])
        for region in ((whole[0], first), (last, whole[1])):
            if region[0] < region[1]:
                self._device.pin(self.tensor[slice(*region)])
                self._pinned.append(region)
        # Else a huge page of its neighbours would take the memory again.
        use_huge_pages(self.tensor[first:last], use=False)
        self._made.remove(part)
        self.nbytes -= self.tensor[first:last].nbytes
        self.whole = not self.tensor.nbytes
        self.pinned_bytes = pinned_bytes(self.tensor)

    def unpin(self, first: int, last: int) -> None:
        """Undo the pinning of a part that `make` has just made, and keep its memory."""
        self._device.unpin(self.tensor[first:last], self.tensor[first:first])
        self.pinned_bytes = pinned_bytes(self.tensor)

    def join(self) -> None:
        """Pin neighbours anew as one: user code copies views that span them. No transfer in flight may use them."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(self._pinned):
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], last
            else:
                joined.append((first, last))
        for first, last in set(joined) - set(self._pinned):
            self._device.pin(self.tensor[first:last])
        self._pinned = joined
        self.pinned_bytes = pinned_bytes(self.tensor)
