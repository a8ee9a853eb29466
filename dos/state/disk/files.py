"""One file of state in one folder: made, locked, grown, and removed at the end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dos.kernels.extension import load_extension

logger = logging.getLogger(__name__)

RESUME = "load the last checkpoint, with disk= in a folder that works or with more memory"
LOST = f"this optimizer's state is lost: {RESUME}"
RETRY = f"what was to be written is in memory yet: try again, or, where a step has failed part way, {RESUME}"
"""The remedy for a failed write, which outside of a step has changed nothing."""
_PREFIX = "state-"
_FIXED, _DONTFORK, _NOHUGEPAGE = 0x10, 10, 15
"""Linux's MAP_FIXED, MADV_DONTFORK and MADV_NOHUGEPAGE."""

_adam = load_extension()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class DiskError(OSError):
    """State on disk could not be read or written, or differs from the state that was written.

    found: the message without the remedy for an optimizer.
    """

    def __init__(self, code: int | None, found: str, remedy: str = LOST) -> None:
        super().__init__(code, f"{found}; {remedy}")
        self.found = found


class DiskFile:
    """A file of this process, in a directory of its user in the folder.

    buffered: the descriptor that locks it and passes through the page cache. fd: the descriptor to read and write with,
    which bypasses the cache where the file system can. share: the share of each extent that is in this file. size: in
    bytes. free: runs of bytes that are not in use: (offset, bytes). used_to: the end of all bytes that were ever used;
    only zeros follow.
    """

    def __init__(self, folder: Path) -> None:
        """Create the file, and remove files that crashes have left in the folder. Raises OSError."""
        self.folder = folder
        try:
            directory = _own_directory(folder)
            _remove_leftovers(directory)
            self.path, self.buffered = _create(directory)
        except OSError as error:
            raise _unusable(folder, error) from error
        self.share = 1.0
        self.size = self.used_to = 0
        self.free: list[tuple[int, int]] = []
        self.fd = self._direct = self.buffered
        try:
            self.fd = self._direct = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            alignment = _adam.direct_alignment(self.fd)
            if not alignment or mmap.PAGESIZE % alignment:
                self._use_cache(f"it aligns to {alignment} bytes" if alignment else "it is in memory")
        except OSError as error:
            self._use_cache(str(error.strerror))
        with contextlib.suppress(OSError):  # a file system without permissions
            os.fchmod(self.buffered, 0o400)  # other programs of this user cannot truncate it, nor write to it

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache (O_DIRECT)."""
        return self.fd != self.buffered

    def refused(self, fd: int, error: int) -> bool:
        """Return whether a transfer should be tried again, because it failed where O_DIRECT is refused."""
        if error != errno.EINVAL or fd == self.buffered:
            return False
        self._use_cache(os.strerror(error))
        return True

    def free_bytes(self) -> int:
        """Return the bytes of the file that are not in use."""
        return sum(nbytes for _, nbytes in self.free)

    def available(self) -> int:
        """Return the bytes by which files may grow in its file system, even if its folder was removed."""
        return shutil.disk_usage(self.buffered).free

    def drive(self) -> int:
        """Return a number that files on one file system share."""
        return os.fstat(self.buffered).st_dev

    def reserve(self, nbytes: int) -> None:
        """Grow until `nbytes` are free. Raises OSError; the file may have grown then, and `shrink()` undoes it."""
        more = nbytes - self.free_bytes()
        if more <= 0:
            return
        available = self.available()
        try:
            if available < more:  # the attempt would take all that is left from other programs
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Blocks are allocated now: a sparse file could find the drive full in the middle of a step.
            os.posix_fallocate(self.buffered, self.size, more)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.folder}: state needs {more} more bytes on disk, found {available} free ({error.strerror}); "
                "name another or a further folder in disk=, or keep more state in memory with host_memory=",
            ) from error
        self.free.append((self.size, more))
        self.size += more

    def shrink(self, size: int) -> None:
        """Cut off the end of the file, which must not be in use. It stays, free, where the file system refuses."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.buffered, size)
            self.size, self.used_to = size, min(size, self.used_to)
            self.free = [run for run in self.free if sum(run) <= size]

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Take reserved bytes into use; return their runs: (offset, bytes)."""
        taken = []
        while nbytes:
            offset, found = self.free.pop(0)
            taken.append((offset, min(found, nbytes)))
            nbytes -= taken[-1][1]
            if found > taken[-1][1]:
                self.free.insert(0, (sum(taken[-1]), found - taken[-1][1]))
        return taken

    def release(self, offset: int, nbytes: int) -> None:
        """Make bytes free again: join them to free neighbours, and cut them off where the file ends."""
        self.used_to = max(self.used_to, offset + nbytes)
        runs, self.free = sorted([*self.free, (offset, nbytes)]), []
        for start, length in runs:
            if self.free and sum(self.free[-1]) == start:
                start, length = self.free[-1][0], self.free.pop()[1] + length
            self.free.append((start, length))
        if self.free and sum(self.free[-1]) == self.size:
            self.shrink(self.free[-1][0])

    def check_size(self) -> None:
        """Raise DiskError if the file was truncated: touching a mapping of missing bytes would be SIGBUS."""
        found = os.fstat(self.buffered).st_size
        if found < self.size:
            raise DiskError(errno.EIO, f"{self.path}: expected {self.size} bytes, found {found}, was it truncated?")

    def expose(self, offset: int, nbytes: int, address: int) -> None:
        """Map bytes over the memory at this address. Raises OSError."""
        # The page cache may have older bytes from an earlier mapping than direct writes have put on the drive.
        os.posix_fadvise(self.buffered, offset, nbytes, os.POSIX_FADV_DONTNEED)
        map_memory(address, nbytes, self.buffered, offset)

    def sync_mappings(self) -> None:
        """Make writes through mappings visible to direct reads; reads through the cache see them. Raises DiskError."""
        try:
            if self.direct:
                os.fdatasync(self.buffered)
        except OSError as error:
            raise DiskError(error.errno, f"{self.path}: writing state failed: {error.strerror}") from error

    def close(self, *, remove: bool) -> None:
        """Close the file. remove: whether to remove it, too; mappings keep its bytes."""
        if remove:
            with contextlib.suppress(OSError):  # the file or its file system was removed
                self.path.unlink()
        for fd in {self.buffered, self._direct}:
            with contextlib.suppress(OSError):  # user code has closed it; further files must be closed all the same
                os.close(fd)
        self.fd = self.buffered = self._direct = -1  # the system may give these numbers to other files

    def _use_cache(self, why: str) -> None:
        self.fd = self.buffered  # the direct descriptor stays open: another thread may be using it
        _warn_buffered(self.folder, why)


def map_memory(address: int, nbytes: int, fd: int = -1, offset: int = 0) -> None:
    """Map a run of a file, shared, over the memory at this address, or zeros without a file. Raises OSError."""
    kind, advice = (mmap.MAP_SHARED, _DONTFORK) if fd >= 0 else (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _NOHUGEPAGE)
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _FIXED, fd, offset) != address:
        error = ctypes.get_errno()
        why = f"mapping {nbytes} bytes of state failed: {os.strerror(error)}; raise vm.max_map_count or ulimit -v"
        raise OSError(error, why)
    # A forked child that writes to a file's mapping would change its parent's state. Zeros are as in `lazy_zeros`.
    _libc.madvise(address, nbytes, advice)


def _own_directory(folder: Path) -> Path:
    directory = folder / f"dos-{os.geteuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not directory.is_symlink():
        with contextlib.suppress(OSError):  # another user's, or a file system without permissions
            directory.chmod(0o700)
    mode = directory.lstat().st_mode
    if not stat.S_ISDIR(mode) or stat.S_IMODE(mode) & 0o077:
        found = (
            f"{directory.name} in it must be a directory that this user alone may read, and is {stat.filemode(mode)}"
        )
        raise OSError(errno.EACCES, found)
    return directory


def _remove_leftovers(directory: Path) -> None:
    """Remove files that are not locked: the processes that created them have ended."""
    for path in directory.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # in use, or gone meanwhile, or the file system has no locks
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, the only lock of NFS for files open to read
                path.unlink()
            finally:
                os.close(fd)


def _create(directory: Path) -> tuple[Path, int]:
    """Create a file; return it, and the descriptor that locks it until the last process that has it ends."""
    while True:
        fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        os.fchmod(fd, 0o600)  # whatever the umask
        with contextlib.suppress(OSError):  # without locks leftovers cannot be told from other files, and stay
            fcntl.flock(fd, fcntl.LOCK_EX)
        if Path(name).exists():
            return Path(name), fd
        os.close(fd)  # another process found it before it was locked, and removed it


@functools.cache
def _warn_buffered(folder: Path, why: str) -> None:
    logger.warning(
        "%s: its file system refuses direct I/O (%s): state on disk passes through the page cache, which takes time "
        "and host memory; choose a folder on a local drive (ext4, xfs) in disk=",
        folder,
        why,
    )


def check_disk(nbytes: int, folders: Sequence[Path]) -> None:
    """Raise OSError if the drives of these folders, which need not exist yet, have less than `nbytes` free."""
    drives = {}
    for folder in folders:
        try:
            drive, there = next(filter(None, map(_drive, (folder, *folder.absolute().parents))))
            drives[drive] = shutil.disk_usage(there).free
        except OSError as error:
            raise _unusable(folder, error) from error
    if nbytes > sum(drives.values()):
        raise OSError(
            errno.ENOSPC,
            f"optimizer state needs at least {nbytes} bytes on disk and {sum(drives.values())} are free in "
            f"{', '.join(map(str, folders))}; choose another or a further folder in disk=, or more host_memory",
        )


def _drive(path: Path) -> tuple[int, Path] | None:
    """Return the number of the path's file system, and the path; None if it does not exist. Raises OSError."""
    try:
        return path.stat().st_dev, path
    except (FileNotFoundError, NotADirectoryError):
        return None


def _unusable(folder: Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"disk: expected a folder in which this user may create files, found {str(folder)!r}: {error.strerror}; "
        "choose another folder, or let this user write there",
    )
