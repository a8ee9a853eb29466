"""Room on disk in one or several folders, cut into the extents of subgroups."""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from dos.kernels.extension import load_extension
from dos.state.disk.extent import PAGE, Contents, Extent, Piece
from dos.state.disk.files import LOST, RETRY, DiskError, DiskFile, map_memory

_adam = load_extension()

_REQUEST_BYTES = 8 << 20
_THREADS = 4
_PROBE_BYTES = 16 << 20
"""The bytes that are written and read to measure a folder's rate."""


class DiskSpace:
    """Files in some folders, over which each extent is striped in proportion to the folders' rates.

    Missing folders are created, and files that crashes have left in them are removed. Several instances, of this
    process or others, may use the same folders. One thread may read while another writes another extent; no other calls
    may run at once. The files are removed with this object, or when the interpreter ends; a forked child cannot use
    them.

    nbytes: allocated in extents.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Create the files. Raises OSError if a folder cannot be used."""
        self.nbytes = 0
        self._owner = os.getpid()
        self._files: list[DiskFile] = []
        # Before the first file: an error in between would leave a file in the user's folder.
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
        """Whether reads and writes of all files bypass the page cache (O_DIRECT)."""
        return all(file.direct for file in self._files)

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated until the first of the file systems is full."""
        free: dict[int, int] = {}
        share: dict[int, float] = {}
        for file in self._files:
            drive = file.drive()  # several folders may be on one
            free[drive] = file.free_bytes() + free.get(drive, file.available())
            share[drive] = file.share + share.get(drive, 0.0)
        return min(int(free[drive] / share[drive]) for drive in free) // PAGE * PAGE

    def allocate(self, sizes: Sequence[int]) -> list[Extent]:
        """Allocate extents of these sizes (bytes, multiples of PAGE) on the drives, all or none.

        Raises OSError if a drive has too little room.
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
            pieces = [Piece(*each, start) for each, start in zip(taken, starts, strict=False)]
            extents.append(Extent(pieces, _REQUEST_BYTES))
        return extents

    def release(self, extent: Extent) -> None:
        """Release an extent for use by others, and hide it. It must not be used any more."""
        self._check_process()
        self.hide(extent)
        self.nbytes -= extent.nbytes
        for file, offset, nbytes, _ in extent.pieces:
            file.release(offset, nbytes)
        extent.pieces, extent.requests, extent.nbytes = [], [], 0

    def write(self, extent: Extent, buffer: Tensor) -> None:
        """Write an extent.

        buffer: 1-D uint8 CPU tensor of `extent.nbytes`, that begins on a page. Raises DiskError.
        """
        address = self._address(extent, buffer)
        # Until the write has ended: user code may catch its error, and half a write must not pass for state.
        extent.contents = Contents.TORN
        extent.checksums = self._transfer(extent.requests, address, write=True)
        extent.contents = Contents.WRITTEN

    def read(self, extent: Extent, buffer: Tensor) -> None:
        """Read an extent: the bytes that were written last, else zeros.

        buffer: 1-D uint8 CPU tensor of `extent.nbytes`, that begins on a page. Raises DiskError, also if the file has
        other bytes than were written.
        """
        address = self._address(extent, buffer)
        if extent.contents is Contents.ZEROS:
            buffer.zero_()
            return
        extent.check_whole()
        extent.compare(0, self._transfer(extent.requests, address, write=False))

    def expose(self, extent: Extent, start: int, nbytes: int, address: int, *, writable: bool = False) -> None:
        """Map bytes of an extent, from `start` on, over the memory at this address.

        start, address: multiples of PAGE; nbytes is rounded up to one. writable: whether it may be written there. Call
        `sync_mappings()` before the next read, and `hide()` before the next write or `expose()` after it. Raises
        DiskError, also if the file has other bytes than were written, and OSError if the system refuses the mapping.
        """
        self._check_process()
        extent.check_whole()
        for piece in extent.pieces:
            piece.file.check_size()
        # Zeros that are shown need checksums. Another extent may have left bytes there; beyond `used_to` are zeros.
        used = any(offset < file.used_to for file, offset, *_ in extent.pieces)
        if extent.contents is Contents.ZEROS and (used or not writable):
            self.write(extent, _memory(extent.nbytes))
        if extent.contents is Contents.WRITTEN:
            self._look_through(extent)
        if writable:
            extent.contents = Contents.OPEN
        elif extent.contents is not Contents.OPEN:
            extent.contents = Contents.SHOWN
        stop = start - -nbytes // PAGE * PAGE
        extent.mapped[address] = nbytes
        for file, offset, length, first in extent.pieces:
            begin, end = max(start, first), min(stop, first + length)
            if begin < end:
                file.expose(offset + begin - first, end - begin, address + begin - start)

    def sync_mappings(self, extent: Extent) -> None:
        """Make writes through mappings of an extent visible to the next read. Raises DiskError."""
        if extent.contents in (Contents.SHOWN, Contents.OPEN):
            for file in {piece.file for piece in extent.pieces}:
                file.sync_mappings()

    def hide(self, extent: Extent) -> None:
        """Map zeros over the memory where an extent is mapped, as before `expose`. Raises OSError."""
        for address, nbytes in extent.mapped.items():
            map_memory(address, nbytes)
        extent.mapped.clear()

    def close(self) -> None:
        """Remove the files. Exposed state stays in memory until `hide`."""
        self._finalizer()

    def _stripe(self, nbytes: int) -> list[int]:
        """Return the number of bytes of an extent in each file."""
        if nbytes % PAGE:
            raise ValueError(f"state on disk comes in pages of {PAGE} bytes, found {nbytes} bytes; round up")
        shares = accumulate((file.share for file in self._files[:-1]), initial=0.0)
        borders = [round(nbytes // PAGE * share) * PAGE for share in shares]
        return [last - first for first, last in pairwise([*borders, nbytes])]

    def _rate(self, file: DiskFile) -> float:
        """Measure a folder's bytes per second, written and read. Raises OSError."""
        try:
            return self._probe(file)
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(
                code,
                f"{file.folder}: measuring how fast it is, to divide state over the folders, failed: "
                f"{os.strerror(code)} as {_PROBE_BYTES} bytes were written and read, found {file.available()} free; "
                "name another folder in disk=, or leave this one out",
            ) from error

    def _probe(self, file: DiskFile) -> float:
        for each in self._files:
            each.share = float(each is file)
        (extent,) = self.allocate([_PROBE_BYTES])
        buffer = _memory(_PROBE_BYTES)
        buffer.view(torch.int64).copy_(torch.arange(len(buffer) // 8))  # drives may store zeros quicker
        start = time.perf_counter()
        self.write(extent, buffer)
        os.fdatasync(file.buffered)
        os.posix_fadvise(file.buffered, 0, 0, os.POSIX_FADV_DONTNEED)
        self.read(extent, buffer)
        elapsed = time.perf_counter() - start
        self.release(extent)
        file.shrink(0)
        return _PROBE_BYTES / elapsed

    def _look_through(self, extent: Extent) -> None:
        """Read all of an extent, a few requests at once, and compare. Raises DiskError."""
        self.sync_mappings(extent)
        buffer = _memory(min(_THREADS * _REQUEST_BYTES, extent.nbytes))
        for first in range(0, len(extent.requests), _THREADS):
            batch = extent.requests[first : first + _THREADS]
            starts = accumulate((request.nbytes for request in batch), initial=0)
            batch = [request._replace(start=start) for request, start in zip(batch, starts, strict=False)]
            extent.compare(first, self._transfer(batch, buffer.data_ptr(), write=False))

    def _transfer(self, requests: Sequence[Piece], address: int, *, write: bool) -> list[int]:
        """Read or write these requests, each at this address plus its start; return their checksums."""
        while True:
            each = [(file.fd, offset, address + start, n) for file, offset, n, start in requests]
            checksums, failed, done, error = _adam.transfer(write, each, _THREADS)
            if failed < 0:
                return checksums
            file, offset, nbytes, _ = requests[failed]
            # The descriptor of the failed call: the other thread may have changed the file's descriptor since.
            if not file.refused(each[failed][0], error):
                why = os.strerror(error) if error else "the file ends there, was it truncated?"
                what = f"{'wrote' if write else 'read'} {done} of {nbytes} bytes at byte {offset}"
                raise DiskError(error or errno.EIO, f"{file.path}: {what}: {why}", RETRY if write else LOST)

    def _address(self, extent: Extent, buffer: Tensor) -> int:
        """Return the address of a buffer; refuse one of another size than the extent's, which would overflow."""
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


def _memory(nbytes: int) -> Tensor:
    """Return zeros that begin on a page, 1-D uint8."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _close(files: list[DiskFile], owner: int) -> None:
    while files:
        files.pop().close(remove=os.getpid() == owner)
