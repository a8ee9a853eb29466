"""Room on disk in one or several folders, cut into the extents of subgroups."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dos.disk.files import LOST, RESUME, DiskError, DiskFile, map_memory
from dos.kernels.extension import load_extension

_adam = load_extension()

PAGE = mmap.PAGESIZE
_REQUEST_BYTES = 8 << 20
_THREADS = 4
_PROBE_BYTES = 16 << 20
"""With which a folder's rate is measured."""


class _Contents(Enum):
    ZEROS = auto()  # never written, and there may be anything on the drive
    WRITTEN = auto()  # the checksums tell what
    SHOWN = auto()  # user code may have written since
    TORN = auto()  # a write has begun and not ended


class _Piece(NamedTuple):
    """Bytes of an extent, from `start` on, and where they are."""

    file: DiskFile
    offset: int
    nbytes: int
    start: int


class Extent:
    """Room on disk of one subgroup's state.

    nbytes: a multiple of PAGE.
    """

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.pieces = pieces
        # All pieces advance at the same rate, so that all folders are busy until the end.
        requests = [
            (first / nbytes, _Piece(file, offset + first, min(_REQUEST_BYTES, nbytes - first), start + first))
            for file, offset, nbytes, start in pieces
            for first in range(0, nbytes, _REQUEST_BYTES)
        ]
        self.requests = [request for _, request in sorted(requests, key=lambda each: each[0])]
        self.contents = _Contents.ZEROS
        self.checksums: list[int] = []


class DiskSpace:
    """Files in some folders, over which each extent is striped in proportion to the folders' rates.

    Folders are made where they are missing, and what crashes have left in them is removed. Others, of this process
    or another, may be in the same folders. One thread may read while another writes another extent; all else is for
    one thread at a time. The files go with this object, or when the interpreter ends; a forked child cannot use them.

    nbytes: allocated, in extents.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises OSError if a folder cannot be used."""
        self.nbytes = 0
        self._owner = os.getpid()
        self._files: list[DiskFile] = []
        self._finalizer = weakref.finalize(self, _close, self._files, self._owner)
        try:
            for folder in folders:
                self._files.append(DiskFile(Path(folder)))
            rates = [1.0] if len(folders) == 1 else [self._rate(file) for file in self._files]
        except BaseException:
            self.close()
            raise
        for file, rate in zip(self._files, rates, strict=True):
            file.share = rate / sum(rates)

    @property
    def direct(self) -> bool:
        """Whether all files are read and written past the page cache (O_DIRECT)."""
        return all(file.direct for file in self._files)

    def free_bytes(self) -> int:
        """Bytes that can still be allocated, until the first of the file systems is full."""
        free: dict[int, int] = {}
        share: dict[int, float] = {}
        for file in self._files:
            drive = file.folder.stat().st_dev  # several folders may be on one
            free[drive] = file.free_bytes() + free.get(drive, shutil.disk_usage(file.folder).free)
            share[drive] = file.share + share.get(drive, 0.0)
        return min(int(free[drive] / share[drive]) for drive in free) // PAGE * PAGE

    def allocate(self, sizes: Sequence[int]) -> list[Extent]:
        """Allocate extents of these sizes (bytes, multiples of PAGE) on the drives, all or none.

        Raises OSError if there is no room for them.
        """
        self._check_process()
        cuts = [self._stripe(size) for size in sizes]
        sizes_before = [file.size for file in self._files]
        try:
            for i, file in enumerate(self._files):
                file.reserve(sum(cut[i] for cut in cuts))
        except OSError:
            for file, size in zip(self._files, sizes_before, strict=True):
                file.shrink(size)
            raise
        self.nbytes += sum(sizes)
        extents = []
        for cut in cuts:
            taken = [(file, *run) for file, part in zip(self._files, cut, strict=True) for run in file.take(part)]
            starts = accumulate((nbytes for *_, nbytes in taken), initial=0)
            extents.append(Extent([_Piece(*each, start) for each, start in zip(taken, starts, strict=False)]))
        return extents

    def free(self, extent: Extent) -> None:
        """Give its room to others. The extent must not be used any more."""
        self._check_process()
        self.nbytes -= extent.nbytes
        for file, offset, nbytes, _ in extent.pieces:
            file.give_back(offset, nbytes)
        extent.pieces, extent.requests, extent.nbytes = [], [], 0

    def write(self, extent: Extent, buffer: Tensor) -> None:
        """Write an extent.

        buffer: 1-D uint8 CPU tensor of `extent.nbytes`, that begins on a page. Raises DiskError.
        """
        address = self._address(extent, buffer)
        extent.contents = _Contents.TORN
        extent.checksums = self._transfer(extent, address, write=True)
        extent.contents = _Contents.WRITTEN

    def read(self, extent: Extent, buffer: Tensor) -> None:
        """Read an extent: what was written last, else zeros.

        buffer: 1-D uint8 CPU tensor of `extent.nbytes`, that begins on a page. Raises DiskError, also if the file has
        something else than what was written.
        """
        address = self._address(extent, buffer)
        if extent.contents is _Contents.ZEROS:
            buffer.zero_()
            return
        _check_whole(extent)
        found = self._transfer(extent, address, write=False)
        if extent.contents is _Contents.WRITTEN and found != extent.checksums:
            differ = next(i for i, each in enumerate(extent.checksums) if found[i] != each)
            file, offset, nbytes, _ = extent.requests[differ]
            raise DiskError(
                errno.EIO,
                f"{file.path}: expected what was last written there, found something else in the {nbytes} bytes at "
                f"byte {offset} (checksums differ); {LOST}",
            )

    def copy(self, source: Extent, destination: Extent, start: int) -> None:
        """Write what one extent has to a larger one, with zeros from `start` on, as many as it is larger.

        Raises DiskError.
        """
        self.sync_mappings(source)
        old, new = (torch.frombuffer(mmap.mmap(-1, each.nbytes), dtype=torch.uint8) for each in (source, destination))
        self.read(source, old)
        new[:start] = old[:start]
        new[len(new) - len(old) + start :] = old[start:]
        self.write(destination, new)

    def show(self, extent: Extent, start: int, nbytes: int, address: int) -> None:
        """Map bytes of an extent, from `start` on, over the memory at this address, where users may read and write.

        start, address: multiples of PAGE; nbytes is rounded up to one. Call `sync_mappings()` before the next read, and
        `hide()` before the next write or `show()` after it: from a write on checksums count. Raises DiskError, and
        OSError if the system maps no more.
        """
        self._check_process()
        _check_whole(extent)
        if extent.contents is _Contents.ZEROS and any(offset < file.used_to for file, offset, *_ in extent.pieces):
            with mmap.mmap(-1, extent.nbytes) as zeros:
                self.write(extent, torch.frombuffer(zeros, dtype=torch.uint8))
        extent.contents = _Contents.SHOWN
        stop = start - -nbytes // PAGE * PAGE
        for file, offset, length, first in extent.pieces:
            begin, end = max(start, first), min(stop, first + length)
            if begin < end:
                file.show(offset + begin - first, end - begin, address + begin - start)

    def sync_mappings(self, extent: Extent) -> None:
        """Let the next read have what users wrote where the extent is shown. Raises DiskError."""
        if extent.contents is _Contents.SHOWN:
            for file in {piece.file for piece in extent.pieces}:
                file.sync_mappings()

    def hide(self, address: int, nbytes: int) -> None:
        """Map zeros over the memory at this address, as before anything was shown there. Raises OSError."""
        map_memory(address, nbytes)

    def close(self) -> None:
        """Remove the files. What is still shown stays there, until it is hidden."""
        self._finalizer()

    def _stripe(self, nbytes: int) -> list[int]:
        """How many bytes of an extent are in each file."""
        if nbytes % PAGE:
            raise ValueError(f"state on disk comes in pages of {PAGE} bytes, found {nbytes} bytes; round up")
        shares = accumulate((file.share for file in self._files[:-1]), initial=0.0)
        borders = [round(nbytes // PAGE * share) * PAGE for share in shares]
        return [last - first for first, last in pairwise([*borders, nbytes])]

    def _rate(self, file: DiskFile) -> float:
        """Measure a folder's bytes per second, written and read."""
        for each in self._files:
            each.share = float(each is file)
        (extent,) = self.allocate([_PROBE_BYTES])
        with mmap.mmap(-1, _PROBE_BYTES) as pages:
            buffer = torch.frombuffer(pages, dtype=torch.uint8)
            buffer.view(torch.int64).copy_(torch.arange(len(buffer) // 8))  # drives may store zeros quicker
            start = time.perf_counter()
            self.write(extent, buffer)
            os.fdatasync(file.buffered)
            os.posix_fadvise(file.buffered, 0, 0, os.POSIX_FADV_DONTNEED)
            self.read(extent, buffer)
            elapsed = time.perf_counter() - start
            del buffer  # a mapping with users cannot be closed
        self.free(extent)
        file.shrink(0)
        return _PROBE_BYTES / elapsed

    def _transfer(self, extent: Extent, address: int, *, write: bool) -> list[int]:
        """Read or write all of an extent; the checksums of its requests."""
        while True:
            requests = [(file.fd, offset, address + start, n) for file, offset, n, start in extent.requests]
            checksums, failed, done, error = _adam.transfer(write, requests, _THREADS)
            if failed < 0:
                return checksums
            file, offset, nbytes, _ = extent.requests[failed]
            if not file.refused(requests[failed][0], error):
                why = os.strerror(error) if error else "the file ends there, was it truncated?"
                what = f"{'wrote' if write else 'read'} {done} of {nbytes} bytes at byte {offset}"
                remedy = f"if it fails again, {RESUME}" if write else LOST  # what is written is in memory yet
                raise DiskError(error or errno.EIO, f"{file.path}: {what}: {why}; {remedy}")

    def _address(self, extent: Extent, buffer: Tensor) -> int:
        """Where a buffer begins that has the extent's size; others would be written past their ends."""
        self._check_process()
        good = buffer.dtype == torch.uint8 and buffer.device.type == "cpu" and buffer.is_contiguous()
        if not good or buffer.shape != (extent.nbytes,) or buffer.data_ptr() % PAGE:
            raise ValueError(
                f"expected a contiguous uint8 CPU tensor of shape ({extent.nbytes},) that begins on a page, found "
                f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device} at {buffer.data_ptr():#x}"
            )
        return buffer.data_ptr()

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "state on disk belongs to the process that built the optimizer, found a forked child of it; build an "
                "optimizer in each process"
            )


def _close(files: list[DiskFile], owner: int) -> None:
    while files:
        files.pop().close(remove=os.getpid() == owner)


def _check_whole(extent: Extent) -> None:
    if extent.contents is _Contents.TORN:
        path = extent.pieces[0].file.path
        raise DiskError(errno.EIO, f"{path}: a write of {extent.nbytes} bytes of state did not end; {LOST}")
