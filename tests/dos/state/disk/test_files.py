"""Files on disk: whose they are, who may read them, and when they go."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from dos.state.disk import PAGE, DiskSpace
from dos.state.disk import files as files_module
from dos.state.disk.files import check_disk
from tests.support import ROOT
from tests.support.disk import files, pages, reads
from tests.support.processes import python

WRITES = """
import mmap, pathlib, sys
import torch
from dos.state.disk import DiskSpace
space = DiskSpace([pathlib.Path(sys.argv[1])])
(extent,) = space.allocate([8 << 20])
buffer = torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.uint8)
while True:
    space.write(extent, buffer.add_(1))
    print("written", flush=True)
"""


@contextmanager
def child_that_writes(folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", WRITES, str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout.readline() == "written\n"
            yield child
        finally:
            child.kill()


def test_files_of_killed_processes_alone_are_removed(tmp_path: Path) -> None:
    with child_that_writes(tmp_path) as child:
        (its,) = files(tmp_path)
        space = DiskSpace([tmp_path])
        assert its in files(tmp_path)
        assert len(files(tmp_path)) == 2
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert its in files(tmp_path)
    _another = DiskSpace([tmp_path])
    (extent,) = space.allocate([PAGE])
    space.write(extent, contents := pages(PAGE, 1))
    assert len(files(tmp_path)) == 2
    assert its not in files(tmp_path)
    assert reads(space, extent, contents)


def test_only_files_of_ours_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / f"dos-{os.geteuid()}"
    directory.mkdir(mode=0o700)
    others = [directory / "notes", tmp_path / "state-notes"]
    target = tmp_path / "target"
    for path in (*others, target):
        path.write_text("mine")
    leftover, link = directory / "state-1", directory / "state-2"
    leftover.write_text("a crash's")
    link.symlink_to(target)
    DiskSpace([tmp_path]).close()
    assert not leftover.exists()
    assert link.is_symlink()
    assert all(path.read_text() == "mine" for path in (*others, target))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, None])
def test_other_users_can_neither_list_nor_read(tmp_path: Path, mask: int | None) -> None:
    """Whatever the umask; None: of a directory that others may read."""
    if mask is None:
        (tmp_path / f"dos-{os.geteuid()}").mkdir()
        (tmp_path / f"dos-{os.geteuid()}").chmod(0o777)
    before = os.umask(mask or 0)
    try:
        space = DiskSpace([tmp_path])
    finally:
        os.umask(before)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (extent,) = space.allocate([PAGE])
    space.write(extent, contents := pages(PAGE, 1))
    assert reads(space, extent, contents)


def test_a_directory_that_cannot_be_made_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or on a file system without permissions."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    (tmp_path / f"dos-{os.geteuid()}").mkdir()
    with pytest.raises(OSError, match=r"a directory that this user alone may read, and is drwxr-xr-x.*another folder"):
        DiskSpace([tmp_path])


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / f"dos-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(OSError, match="a directory that this user alone may read, and is lrwxrwxrwx"):
        DiskSpace([tmp_path])
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert not list(elsewhere.iterdir())


@contextmanager
def user_with_rights() -> Iterator[None]:
    """As whom the system asks for rights: not root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "Not a directory|File exists"),
        ("file/below", "Not a directory"),
        ("read-only", "Permission denied"),
        ("x" * 300, "File name too long"),
        ("loop/below", "Too many levels of symbolic links"),
        ("closed/below", "Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, name: str, why: str) -> None:
    """Is named, also where room on disk is first asked for; what was made before goes."""
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(mode=0o555)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "closed").mkdir(mode=0o600)
    lacks_rights = why == "Permission denied"
    before = [] if lacks_rights else [tmp_path / "good"]
    uses = [lambda: DiskSpace([*before, tmp_path / name])]
    if not name.startswith(("file", "read-only")):  # of which there is the room that is there
        uses.append(lambda: check_disk(1, [tmp_path / name]))
    for use in uses:
        rights = user_with_rights() if lacks_rights else nullcontext()
        with rights, pytest.raises(OSError, match=rf"found '{tmp_path / name}': ({why}); choose another folder"):
            use()
        assert not files(tmp_path / "good")


def test_other_programs_of_the_user_cannot_change_a_file() -> None:
    with user_with_rights(), tempfile.TemporaryDirectory() as folder:
        space = DiskSpace([Path(folder)])
        (file,) = files(Path(folder))
        for use in (lambda: os.truncate(file, 0), lambda: file.open("r+b")):
            with pytest.raises(PermissionError):
                use()
        space.close()


def test_a_folder_that_is_removed_while_its_file_is_used(tmp_path: Path) -> None:
    space = DiskSpace([tmp_path / "folder"])
    shutil.rmtree(tmp_path / "folder")
    assert space.free_bytes() > PAGE
    (extent,) = space.allocate([PAGE])
    space.write(extent, contents := pages(PAGE, 1))
    assert reads(space, extent, contents)


def test_a_file_goes_with_its_space(tmp_path: Path) -> None:
    gc.collect()  # files of other tests go first
    space = DiskSpace([tmp_path])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert files(tmp_path)
    del space
    gc.collect()
    assert not files(tmp_path)
    space = DiskSpace([tmp_path])
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    space.close()
    space.close()
    assert not files(tmp_path)


def test_files_go_though_others_have_closed_one(tmp_path: Path) -> None:
    """As a library does that closes descriptors which it did not open."""
    space = DiskSpace([tmp_path / "a", tmp_path / "b"])
    os.close(max(opened(tmp_path)))
    space.close()
    assert not files(tmp_path)
    assert not opened(tmp_path)


def opened(folder: Path) -> list[int]:
    """The descriptors of this process that are of files in this folder."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was that of the listing
            found += [int(link.name)] if link.readlink().is_relative_to(folder) else []
    return found


FORKS = """
import os, pathlib, sys
import torch
from dos.state.disk import DiskSpace
from tests.support.disk import pages, reads
space = DiskSpace([pathlib.Path(sys.argv[1])])
(extent,) = space.allocate([1 << 20])
contents = pages(1 << 20, 1)
space.write(extent, contents)
for closes in (True, False):
    child = os.fork()
    if not child:
        for use in (lambda: space.write(extent, pages(1 << 20)), lambda: space.read(extent, pages(1 << 20)),
                    lambda: space.release(extent), lambda: space.allocate([1 << 20]),
                    lambda: space.expose(extent, 0, 4096, contents.data_ptr())):
            try:
                use()
            except RuntimeError as error:
                print(error)
        if closes:
            space.close()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert reads(space, extent, contents)
    assert len(list(pathlib.Path(sys.argv[1]).rglob("state-*"))) == 1
DiskSpace([pathlib.Path(sys.argv[1])])
assert len(list(pathlib.Path(sys.argv[1]).rglob("state-*"))) == 1, "still locked"
"""


def test_a_forked_child_neither_changes_nor_removes_its_parents_files(tmp_path: Path) -> None:
    printed = python("-c", FORKS, tmp_path)
    assert printed.count("state on disk belongs to the process that built the optimizer") == 2 * 5
    assert not files(tmp_path)


def test_a_file_that_another_process_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like what a crash has left, so another is made."""
    lock, seen = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and len(seen) < 3:
            (file,) = files(tmp_path)
            seen.append(file)
            files_module._remove_leftovers(file.parent)
            assert not file.exists()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    space = DiskSpace([tmp_path])
    assert len(seen) == 3
    assert len(files(tmp_path)) == 1
    (extent,) = space.allocate([PAGE])
    space.write(extent, contents := pages(PAGE, 1))
    assert reads(space, extent, contents)


def test_without_locks_nothing_is_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = DiskSpace([tmp_path])
    second = DiskSpace([tmp_path])
    assert len(files(tmp_path)) == 2
    first.close()
    second.close()
    assert not files(tmp_path)
