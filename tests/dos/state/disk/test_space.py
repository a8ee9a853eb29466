"""Extents: what is written is read, from any number of folders; room is allocated all or none."""

from __future__ import annotations

import errno
import os
import random
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dos.state.disk import PAGE, DiskError, DiskSpace, Extent
from dos.state.disk import space as space_module
from dos.state.disk.files import DiskFile
from tests.support.disk import files, give_rates, pages, reads

MEMORY = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture(params=["drive", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a drive, and one on a file system in memory, which is never read directly."""
    if request.param == "drive":
        yield tmp_path
        return
    if not MEMORY.is_dir():
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def test_a_folder_in_memory_is_not_read_directly(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Although such file systems take O_DIRECT since Linux 6.6."""
    space = DiskSpace([folder])
    if folder.is_relative_to(MEMORY):
        assert not space.direct
        assert any(f"{folder}: its file system refuses direct I/O" in each.getMessage() for each in caplog.records)
    assert space.direct == (not caplog.records)


SPACES = st.lists(st.floats(0.01, 1), min_size=1, max_size=3)
ACTIONS = st.lists(st.tuples(st.sampled_from(["allocate", "free", "write"]), st.integers(0, 40)), max_size=30)


@settings(max_examples=40)
@given(rates=SPACES, actions=ACTIONS, request=st.integers(1, 5))
def test_any_order_of_allocating_writing_and_freeing(
    rates: list[float], actions: list[tuple[str, int]], request: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        give_rates(patch, rates)
        patch.setattr(space_module, "_REQUEST_BYTES", request * PAGE)
        space = DiskSpace([Path(name) / str(i) for i in range(len(rates))])
        alive: list[tuple[Extent, Tensor]] = []
        for seed, (action, number) in enumerate(actions):
            if action == "allocate":
                sizes = [number * PAGE, number // 2 * PAGE]
                alive += zip(space.allocate(sizes), map(pages, sizes), strict=True)
            elif alive:
                extent, contents = alive[number % len(alive)]
                if action == "free":
                    space.release(extent)
                    alive.pop(number % len(alive))
                else:
                    contents.copy_(pages(len(contents), seed))
                    space.write(extent, contents)
        assert space.nbytes == sum(len(contents) for _, contents in alive)
        for extent, contents in alive:
            assert reads(space, extent, contents)
        peak = sum(number + number // 2 for action, number in actions if action == "allocate") * PAGE
        assert sum(path.stat().st_size for path in files(Path(name))) <= peak
        space.close()


def test_freed_room_is_used_again(tmp_path: Path) -> None:
    space = DiskSpace([tmp_path])
    *extents, last = space.allocate([PAGE] * 11)
    for extent in random.Random(0).sample(extents, 10):
        space.release(extent)
    free = space.free_bytes()
    (whole,) = space.allocate([10 * PAGE])
    assert len(whole.pieces) == 1
    assert files(tmp_path)[0].stat().st_size == 11 * PAGE
    assert free >= 10 * PAGE
    space.release(last)
    assert files(tmp_path)[0].stat().st_size == 10 * PAGE, "what is at the end is the file system's again"


def test_folders_are_used_in_proportion_to_their_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_rates(monkeypatch, [3.0, 1.0])
    folders = [tmp_path / "fast", tmp_path / "slow"]
    space = DiskSpace(folders)
    (extent,) = space.allocate([32 * MIB])
    assert [files(each)[0].stat().st_size for each in folders] == [24 * MIB, 8 * MIB]
    owners = [piece.file.folder.name for piece in extent.requests]
    assert owners == ["fast", "slow", "fast", "fast"], "all end at once"
    space.write(extent, contents := pages(32 * MIB, 1))
    assert reads(space, extent, contents)


def test_rates_are_measured_where_there_are_several_folders(tmp_path: Path) -> None:
    space = DiskSpace([tmp_path / "a", tmp_path / "b"])
    assert [file.stat().st_size for file in files(tmp_path)] == [0, 0]
    assert space.nbytes == 0
    (extent,) = space.allocate([32 * MIB])
    assert {piece.file.folder.name for piece in extent.pieces} == {"a", "b"}


@pytest.mark.parametrize("fault", ["read", "fdatasync", "room"])
def test_a_folder_whose_rate_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """It is that folder which is at fault, not state, of which there is none yet."""
    good, bad = tmp_path / "good", tmp_path / "bad"

    def fail(space: DiskSpace, extent: Extent, *rest: object) -> None:
        if extent.pieces[0].file.folder == bad:
            raise DiskError(errno.EIO, "the cable came off")

    def fail_to_sync(fd: int) -> None:
        if bad in Path(f"/proc/self/fd/{fd}").readlink().parents:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    if fault == "room":
        monkeypatch.setattr(DiskFile, "available", lambda file: 10 * MIB if file.folder == bad else 1 << 40)
    elif fault == "read":
        monkeypatch.setattr(DiskSpace, "read", fail)
    else:
        monkeypatch.setattr(os, "fdatasync", fail_to_sync)
    why = "No space left on device" if fault == "room" else "Input/output error"
    said = rf"{bad}: measuring how fast it is.* failed: {why} as {16 * MIB} bytes .*; name another folder in disk="
    with pytest.raises(OSError, match=said) as caught:
        DiskSpace([good, bad])
    assert "state is lost" not in str(caught.value)
    assert "state needs" not in str(caught.value)
    assert not files(tmp_path)


def test_room_that_the_file_system_does_not_take_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    space = DiskSpace([tmp_path])
    (extent,) = space.allocate([4 * PAGE])
    space.write(extent, pages(4 * PAGE, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        space.release(extent)
    (extent,) = space.allocate([4 * PAGE])
    assert files(tmp_path)[0].stat().st_size == 4 * PAGE
    assert reads(space, extent, pages(4 * PAGE)), "and is zeros"


def test_reading_and_writing_at_once(folder: Path) -> None:
    space = DiskSpace([folder])
    contents = [pages(9 * MIB, seed) for seed in range(6)]
    extents = space.allocate([9 * MIB] * 6)
    for extent, buffer in zip(extents, contents, strict=True):
        space.write(extent, buffer)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            writing = pool.submit(lambda: [space.write(extents[i], contents[i]) for i in (0, 1, 2)])
            reading = pool.submit(lambda: [reads(space, extents[i], contents[i]) for i in (3, 4, 5)])
            writing.result()
            assert all(reading.result())
    assert all(reads(space, *each) for each in zip(extents, contents, strict=True))


def test_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first file system is full; folders on the same one share what it has."""
    give_rates(monkeypatch, [3.0, 1.0])
    space = DiskSpace([tmp_path / "fast", tmp_path / "slow"])
    monkeypatch.setattr(DiskFile, "available", lambda file: 1000 * PAGE)
    assert space.free_bytes() == 1000 * PAGE
    monkeypatch.setattr(DiskFile, "drive", lambda file: file.folder.name)
    assert space.free_bytes() == 1333 * PAGE  # three quarters of them in the fast one


def test_a_drive_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is noticed before anything is allocated, in any folder."""
    give_rates(monkeypatch, [1.0, 1.0])
    space = DiskSpace([tmp_path / "roomy", tmp_path / "full"])
    (kept,) = space.allocate([4 * PAGE])
    space.write(kept, contents := pages(4 * PAGE, 5))

    monkeypatch.setattr(DiskFile, "available", lambda file: 3 * PAGE if file.folder.name == "full" else 1 << 40)
    with pytest.raises(OSError, match=rf"full: state needs {8 * PAGE} more bytes on disk, found {3 * PAGE} free") as e:
        space.allocate([10 * PAGE, 6 * PAGE])
    assert e.value.errno == errno.ENOSPC
    assert "disk=" in str(e.value)
    assert "host_memory=" in str(e.value)
    assert [file.stat().st_size for file in files(tmp_path)] == [2 * PAGE] * 2
    assert space.nbytes == 4 * PAGE
    assert reads(space, kept, contents)
    space.allocate([6 * PAGE])  # what there is room for


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The system refuses while it allocates: here by the limit of file sizes, as by a quota."""
    space = DiskSpace([tmp_path])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, before[1]))
    try:
        with pytest.raises(OSError, match=f"state needs {9 * PAGE} more bytes") as caught:
            space.allocate([9 * PAGE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert files(tmp_path)[0].stat().st_size == 0
    space.allocate([9 * PAGE])


def test_buffers_of_another_size_or_alignment_are_refused(tmp_path: Path) -> None:
    space = DiskSpace([tmp_path])
    (extent,) = space.allocate([2 * PAGE])
    for buffer in (
        pages(PAGE),
        pages(2 * PAGE).view(2, PAGE),
        pages(8 * PAGE).view(torch.float32)[: 2 * PAGE],
        pages(3 * PAGE)[8 : 2 * PAGE + 8],
        pages(4 * PAGE)[::2],
    ):
        for use in (space.write, space.read):
            with pytest.raises(ValueError, match=rf"shape \({2 * PAGE},\) that begins on a page, found torch"):
                use(extent, buffer)
    with pytest.raises(ValueError, match=f"pages of {PAGE} bytes, found 100 bytes"):
        space.allocate([100])
    space.release(extent)
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        space.read(extent, pages(2 * PAGE))
