"""The room on disk of one subgroup's state, and checksums of its contents."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from dos.state.disk.files import DiskError, DiskFile

PAGE = mmap.PAGESIZE


class Contents(Enum):
    ZEROS = auto()  # never written: read as zeros, whatever bytes are on the drive
    WRITTEN = auto()  # the bytes have the checksums
    SHOWN = auto()  # the same, and user code has views, which it may not write to
    OPEN = auto()  # written through a mapping, by loading or by user code that has had views since state was at home
    TORN = auto()  # a write has begun and not ended


class Piece(NamedTuple):
    """Bytes of an extent, from `start` on, and their place in a file."""

    file: DiskFile
    offset: int
    nbytes: int
    start: int


class Extent:
    """Room on disk of one subgroup's state.

    nbytes: a multiple of PAGE. requests: the pieces in which it is read and written. checksums: of the requests that
        were written. mapped: bytes of it that are mapped, by address.
    """

    def __init__(self, pieces: Sequence[Piece], request_bytes: int) -> None:
        """request_bytes: the most bytes of a request."""
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.pieces = pieces
        # All pieces advance at the same rate, so that all folders are busy until the end.
        requests = [
            (first / nbytes, Piece(file, offset + first, min(request_bytes, nbytes - first), start + first))
            for file, offset, nbytes, start in pieces
            for first in range(0, nbytes, request_bytes)
        ]
        self.requests = [request for _, request in sorted(requests, key=lambda each: each[0])]
        self.contents = Contents.ZEROS
        self.checksums: list[int] = []
        self.mapped: dict[int, int] = {}

    def check_whole(self) -> None:
        """Raise DiskError if a write of the extent has not ended."""
        if self.contents is Contents.TORN:
            path = self.pieces[0].file.path
            raise DiskError(errno.EIO, f"{path}: a write of {self.nbytes} bytes of state did not end")

    def compare(self, first: int, found: list[int]) -> None:
        """Raise DiskError if the extent has changed since it was written.

        first: the number of a request. found: checksums of that request and of the ones after it.
        """
        last = first + len(found)
        if self.contents is Contents.OPEN:
            self.checksums[first:last] = found
            return
        expected = self.checksums[first:last]
        differ = next((i for i, each in enumerate(found) if expected[i : i + 1] != [each]), None)
        if differ is None:
            return
        file, offset, nbytes, _ = self.requests[first + differ]
        raise DiskError(
            errno.EIO,
            f"{file.path}: expected what was last written there, found something else in the {nbytes} bytes at byte "
            f"{offset} (checksums differ)",
        )
