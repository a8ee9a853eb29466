"""State on disk: read into windows on the host, and written from there."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dos.devices import Copy, Device, Job, ThreadJob
from dos.guard import submit
from dos.state.arena import State, aligned, state_copies
from dos.state.disk import PAGE, DiskSpace, Extent
from dos.state.disk.extent import Contents
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from dos.state.windows import disk_bytes
from perfmodel import Lane, Op, Span


class DiskJob(ThreadJob):
    """A read or write in flight."""


class DiskStore:
    """State in files, read and written through the windows of the host's store."""

    def __init__(self, device: Device, host: HostStore, folders: Sequence[Path]) -> None:
        """Open the folders. Raises OSError if one cannot be used."""
        self.space = DiskSpace(folders)
        self._device = device
        self._host = host
        self._extents: weakref.WeakKeyDictionary[Subgroup, Extent] = weakref.WeakKeyDictionary()
        self.renew()

    def renew(self) -> None:
        """Start threads for reading and writing; a forked child does not inherit the parent's."""
        self.reading, self.writing = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dos-disk-{what}") for what in ("read", "write")
        )

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.space.nbytes

    def has(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup's state is here; it may be newer elsewhere."""
        return subgroup in self._extents and self._extents[subgroup].contents is not Contents.ZEROS

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Allocate room for the state of these, zeros. Raises OSError if a drive is full."""
        without = [subgroup for subgroup in subgroups if subgroup not in self._extents]
        extents = self.space.allocate([disk_bytes(subgroup) for subgroup in without])
        self._extents.update(zip(without, extents, strict=True))
        return []

    def drop(self, subgroup: Subgroup) -> None:
        self.space.release(self._extents.pop(subgroup))

    def drop_empty(self) -> None:
        for subgroup in [subgroup for subgroup in self._extents if not self.has(subgroup)]:
            self.drop(subgroup)

    def fetch(self, subgroup: Subgroup) -> State:
        """Return the subgroup's state on the host after it was read."""
        return self._host.fetch(subgroup)

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        """Write the subgroup's state from its window; copy it there first if it is at home."""
        assert not further, "gradients do not go to disk"
        window, extent = self._host.windows.of(subgroup), self._extents[subgroup]
        assert window is not None, "the schedule says which one"

        def write() -> None:
            if source is not window.state:
                for destination, origin in state_copies(window.state, source):
                    destination.copy_(origin)
            self.space.write(extent, window.pages)

        return self._queue(self.writing, Lane.WRITE, Op.WRITE, number, extent.nbytes, write, after)

    def load(self, number: int, subgroup: Subgroup, home: State | None, after: Sequence[Job]) -> Job:
        """Read the subgroup's state into its window, and copy it from there to `home`, if that is given."""
        window, extent = self._host.windows.of(subgroup), self._extents[subgroup]
        assert window is not None, "the schedule says which one"

        def read() -> None:
            self.space.sync_mappings(extent)  # loading may have written through a mapping
            self.space.read(extent, window.pages)
            for destination, origin in () if home is None else state_copies(home, window.state):
                destination.copy_(origin)

        return self._queue(self.reading, Lane.READ, Op.READ, number, extent.nbytes, read, after)

    def expose(self, subgroup: Subgroup, *, writable: bool = False) -> None:
        """Map the state over the addresses of its home. Nothing may be in flight. writable: see `DiskSpace.expose`."""
        extent, start = self._extents[subgroup], 0
        for tensor in subgroup.state.tensors():
            self.space.expose(extent, start, tensor.nbytes, tensor.data_ptr(), writable=writable)
            start += aligned(tensor.nbytes, PAGE)

    def shows(self, subgroup: Subgroup) -> bool:
        """Return whether user code has views of the state, and may not write to them."""
        return subgroup in self._extents and self._extents[subgroup].contents is Contents.SHOWN

    def hide(self, subgroup: Subgroup) -> None:
        """Map zeros over the addresses of its home again, if the state is mapped there."""
        if subgroup in self._extents:
            self.space.hide(self._extents[subgroup])

    def _queue(
        self,
        thread: ThreadPoolExecutor,
        lane: Lane,
        op: Op,
        number: int,
        nbytes: int,
        work: Callable[[], None],
        after: Sequence[Job],
    ) -> Job:
        def run() -> Span:
            # A window is filled or written only when no earlier job uses it: these jobs read or write its memory.
            for job in after:
                job.wait()
            with torch.no_grad(), self._device.disk_io(lane, nbytes) as start:
                work()
            return Span(lane, op, number, start, time.perf_counter(), nbytes)

        return DiskJob(submit(thread, run))
