"""Notices that another program has written to a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CLOSE_WRITE = 0x8
"""Linux's IN_CLOSE_WRITE: an open file that could be written to was closed."""

_libc = ctypes.CDLL(None)


class Watch:
    """Counts how often a file is closed after it was opened for writing, which its owner does not do meanwhile.

    The count stays 0 where the system cannot tell: without inotify, when this user has all watches that are allowed, or
    for writes of other machines to a shared file system.
    """

    def __init__(self, path: Path) -> None:
        self._seen = 0
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            _libc.inotify_add_watch(self._fd, os.fsencode(path), _CLOSE_WRITE)

    def count(self) -> int:
        """Return the count so far; several times since the last call may count as one."""
        with contextlib.suppress(OSError):  # no more events to read
            while self._fd >= 0 and os.read(self._fd, 4096):
                self._seen += 1
        return self._seen

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # user code has closed it
                os.close(self._fd)
        self._fd = -1
