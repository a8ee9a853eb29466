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
    EXPOSED = auto()  # the bytes have the checksums, except where user code has written since
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
        were written.
    writers: the number of writes by other programs to its files when it was last compared.
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
        self.writers = 0

    def count_writers(self) -> int:
        """Return how often other programs have written to its files so far."""
        return sum(file.writers() for file in {piece.file for piece in self.pieces})

    def check_whole(self) -> None:
        """Raise DiskError if a write of the extent has not ended."""
        if self.contents is Contents.TORN:
            path = self.pieces[0].file.path
            raise DiskError(errno.EIO, f"{path}: a write of {self.nbytes} bytes of state did not end")

    def compare(self, first: int, found: list[int]) -> None:
        """Raise DiskError if another program has changed the extent.

        first: the number of a request. found: checksums of that request and of the ones after it.
        No system counts the writes of user code through mappings. So where state was exposed, a difference counts as
        user code's, unless another program has written to the file, too.
        """
        last = first + len(found)
        expected = self.checksums[first:last]  # zeros that were exposed have none
        differ = next((i for i, each in enumerate(found) if expected[i : i + 1] != [each]), None)
        if differ is None:
            return
        also = ""
        if self.contents is Contents.EXPOSED:
            if self.writers == self.count_writers():
                self.checksums[first:last] = found
                return
            also = (
                ", and another program has written to the file since user code read state, so that what was saved "
                "since may be wrong, too"
            )
        file, offset, nbytes, _ = self.requests[first + differ]
        raise DiskError(
            errno.EIO,
            f"{file.path}: expected what was last written there, found something else in the {nbytes} bytes at byte "
            f"{offset} (checksums differ){also}",
        )
