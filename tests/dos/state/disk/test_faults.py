"""A drive that fails: no state that is torn, stale or another's is ever read."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dos.state.disk import PAGE, DiskError, DiskSpace
from dos.state.disk import files as files_module
from dos.state.disk import space as space_module
from tests.support.disk import change, files, pages, reads, truncate

SIZE = 16 * PAGE
SECTOR = 512
REMEDY = "load the last checkpoint"
Requests = Sequence[tuple[int, int, int, int]]
Result = tuple[list[int], int, int, int]


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskSpace:
    """With requests of four pages."""
    monkeypatch.setattr(space_module, "_REQUEST_BYTES", 4 * PAGE)
    return DiskSpace([tmp_path])


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Requests]]:
    """Lets the first transfers end in these ways, the others be. The list of all."""
    real = space_module._adam.transfer

    def install(*results: tuple[int, int, int]) -> list[Requests]:
        left, seen = list(results), []

        def transfer(write: bool, requests: Requests, threads: int) -> Result:
            seen.append(requests)
            return ([0] * len(requests), *left.pop(0)) if left else real(write, requests, threads)

        monkeypatch.setattr(space_module, "_adam", SimpleNamespace(transfer=transfer))
        return seen

    return install


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails(space: DiskSpace, transfers: Callable[..., object], code: int) -> None:
    """Leaves nothing that can be read, until the extent is written anew."""
    extent, other = space.allocate([SIZE, SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    space.write(other, contents)
    transfers((2, PAGE, code))
    with pytest.raises(DiskError, match=REMEDY) as caught:
        space.write(extent, pages(SIZE, 2))
    path = extent.pieces[0].file.path
    assert str(caught.value).startswith(
        f"[Errno {code}] {path}: wrote {PAGE} of {4 * PAGE} bytes at byte {8 * PAGE}: {os.strerror(code)}"
    )
    for use in (lambda: reads(space, extent, contents), lambda: space.show(extent, 0, PAGE, 0)):
        with pytest.raises(DiskError, match=f"a write of {SIZE} bytes of state did not end; .*{REMEDY}"):
            use()
    assert reads(space, other, contents)
    space.write(extent, contents)
    assert reads(space, extent, contents)


def test_a_read_that_fails(space: DiskSpace, transfers: Callable[..., object]) -> None:
    (extent,) = space.allocate([SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    transfers((1, 0, errno.EIO))
    with pytest.raises(
        DiskError, match=f"read 0 of {4 * PAGE} bytes at byte {4 * PAGE}: Input/output error; .*{REMEDY}"
    ):
        reads(space, extent, contents)
    assert reads(space, extent, contents), "a second attempt may succeed"


@pytest.mark.parametrize("rest", [0, 100, 512, PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_a_drive_that_is_full_in_the_middle_of_a_write(space: DiskSpace, rest: int, direct: bool) -> None:
    """The system writes what there is room for, and refuses the rest. Here by the limit of file sizes."""
    (extent,) = space.allocate([SIZE])
    if not direct:
        space._files[0].refused(space._files[0].fd, errno.EINVAL)
    with files_no_larger_than(5 * PAGE + rest), pytest.raises(DiskError, match="File too large") as caught:
        space.write(extent, pages(SIZE, 1))
    assert caught.value.errno == errno.EFBIG
    whole = "wrote 0 of" in str(caught.value), f"at byte {4 * PAGE}:" in str(caught.value)
    assert whole in ((False, True), (True, False)), "in the request where room ends, or after it"
    with pytest.raises(DiskError, match="did not end"):
        reads(space, extent, pages(SIZE))
    space.write(extent, contents := pages(SIZE, 2))
    assert reads(space, extent, contents)


@pytest.mark.parametrize("size", [0, PAGE, 5 * PAGE + 100, 5 * PAGE + 512, SIZE - 1])
@pytest.mark.parametrize("direct", [True, False])
def test_a_truncated_file(space: DiskSpace, tmp_path: Path, size: int, direct: bool) -> None:
    (extent,) = space.allocate([SIZE])
    if not direct:
        space._files[0].refused(space._files[0].fd, errno.EINVAL)
    space.write(extent, contents := pages(SIZE, 1))
    (file,) = files(tmp_path)
    truncate(file, size)
    with pytest.raises(DiskError, match=f"{file}: read .* of {4 * PAGE} bytes at byte .* truncated.*{REMEDY}"):
        reads(space, extent, contents)
    memory = pages(SIZE)
    with pytest.raises(DiskError, match=f"{file}: expected {SIZE} bytes, found {size}, was it truncated.*{REMEDY}"):
        space.show(extent, 0, SIZE, memory.data_ptr())
    assert not memory.any()


@pytest.mark.parametrize("place", [0, 1, 7, PAGE - 1, 5 * PAGE + 17, SIZE - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_that_is_not_what_was_written(space: DiskSpace, tmp_path: Path, place: int, bit: int) -> None:
    first, second = space.allocate([SIZE, SIZE])
    contents = pages(SIZE, 1)
    space.write(first, contents)
    space.write(second, contents)
    (file,) = files(tmp_path)
    changed = bytes(contents[place : place + 1].bitwise_xor(1 << bit).tolist())
    change(file, SIZE + place, changed)
    assert reads(space, first, contents)
    where = f"{4 * PAGE} bytes at byte {SIZE + place // (4 * PAGE) * 4 * PAGE}"
    with pytest.raises(DiskError, match=f"{file}: expected what was last written there, .*{where}.*{REMEDY}"):
        reads(space, second, contents)


@pytest.mark.parametrize("size", [SECTOR, PAGE, 4 * PAGE])
@pytest.mark.parametrize("fault", ["zeroed", "stale", "swapped", "shifted", "another's"])
def test_contents_that_are_not_what_was_written(space: DiskSpace, tmp_path: Path, fault: str, size: int) -> None:
    """Sectors, pages and whole requests: lost writes, misdirected writes, foreign contents."""
    extent, other = space.allocate([SIZE, SIZE])
    space.write(extent, pages(SIZE, 1))
    (file,) = files(tmp_path)
    stale = file.read_bytes()[:SIZE]
    space.write(extent, contents := pages(SIZE, 2))
    space.write(other, pages(SIZE, 3))
    written = file.read_bytes()
    assert written[:SIZE] == bytes(contents.tolist())
    if fault == "zeroed":
        change(file, size, bytes(size))
    elif fault == "stale":
        change(file, size, stale[size : 2 * size])
    elif fault == "swapped":
        change(file, 0, written[size : 2 * size] + written[:size])
    elif fault == "shifted":
        change(file, size, written[:size])
    else:
        change(file, 0, written[SIZE : SIZE + size])
    with pytest.raises(DiskError, match="checksums differ"):
        reads(space, extent, contents)


@pytest.mark.parametrize("distance", [1, 2, 8, 512 // 8, 4096 // 8, 8192 // 8])
@pytest.mark.parametrize("flip", [1 << 63, 1 << 31, 1 << 32, 1 << 15, 1])
def test_two_changes_that_might_cancel(space: DiskSpace, tmp_path: Path, flip: int, distance: int) -> None:
    """The same bit of two words of 64 bits, as when two numbers change their signs."""
    (extent,) = space.allocate([SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    (file,) = files(tmp_path)
    written = bytearray(file.read_bytes())
    for word in (3, 3 + distance):
        number = int.from_bytes(written[8 * word : 8 * word + 8], "little") ^ flip
        written[8 * word : 8 * word + 8] = number.to_bytes(8, "little")
    change(file, 0, bytes(written))
    with pytest.raises(DiskError, match="checksums differ"):
        reads(space, extent, contents)


def test_zeros_in_one_place_are_not_zeros_in_another(space: DiskSpace, tmp_path: Path) -> None:
    """New state is nearly all zeros: one number among them has its place."""
    (extent,) = space.allocate([SIZE])
    contents = pages(SIZE)
    contents[5 * PAGE] = 1
    space.write(extent, contents)
    (file,) = files(tmp_path)
    for place in (5 * PAGE + 8, 5 * PAGE + 64, 5 * PAGE + SECTOR, 6 * PAGE):
        moved = bytearray(SIZE)
        moved[place] = 1
        change(file, 0, bytes(moved))
        with pytest.raises(DiskError, match="checksums differ"):
            reads(space, extent, contents)


def test_direct_reading_that_is_refused_at_a_request(
    tmp_path: Path, transfers: Callable[..., list[Requests]], caplog: pytest.LogCaptureFixture
) -> None:
    """Is tried again through the page cache, with one warning; and so is all that comes after."""
    space = DiskSpace([tmp_path])
    if not space.direct:
        pytest.skip(f"{tmp_path} is not read directly")
    (extent,) = space.allocate([SIZE])
    seen = transfers((0, 0, errno.EINVAL))
    space.write(extent, contents := pages(SIZE, 1))
    assert reads(space, extent, contents)
    space.write(extent, contents := pages(SIZE, 2))
    assert reads(space, extent, contents)
    assert not space.direct
    descriptors = [requests[0][0] for requests in seen]
    assert descriptors[0] != descriptors[1]
    assert len(set(descriptors[1:])) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path}: its file system refuses direct I/O (Invalid argument)" in record.getMessage()
    transfers((0, 0, errno.EINVAL))
    with pytest.raises(DiskError, match="Invalid argument"):  # of a file that is not read directly, it is an error
        reads(space, extent, contents)


def refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> str:
    opened = os.open

    def refuse(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    return "Invalid argument"


def align_to(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_adam", SimpleNamespace(direct_alignment=lambda fd: nbytes))


@pytest.mark.parametrize("why", ["Invalid argument", f"aligns to {8 * PAGE} bytes", "in memory"])
def test_a_file_system_that_refuses_direct_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "Invalid argument":
        refuse_to_open(monkeypatch)
    else:
        align_to(0 if why == "in memory" else 8 * PAGE, monkeypatch)
    spaces = [DiskSpace([tmp_path]), DiskSpace([tmp_path])]
    (record,) = caplog.records
    assert f"{tmp_path}: its file system refuses direct I/O" in record.getMessage()
    assert why in record.getMessage()
    for space in spaces:
        assert not space.direct
        (extent,) = space.allocate([SIZE])
        space.write(extent, contents := pages(SIZE, 1))
        assert reads(space, extent, contents)


@pytest.mark.parametrize("alignment", [1, 512, PAGE])
def test_alignments_of_up_to_a_page_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, alignment: int
) -> None:
    align_to(alignment, monkeypatch)
    assert DiskSpace([tmp_path]).direct
    assert not caplog.records


def test_after_closing_nothing_is_written(tmp_path: Path) -> None:
    """A descriptor of the same number may be another file's by then."""
    space = DiskSpace([tmp_path])
    (extent,) = space.allocate([SIZE])
    numbers = {space._files[0].fd, space._files[0].buffered}
    space.close()
    with (tmp_path / "one").open("w+b", buffering=0) as one, (tmp_path / "two").open("w+b", buffering=0) as two:
        assert numbers <= {one.fileno(), two.fileno()}
        with pytest.raises(DiskError, match="Bad file descriptor"):
            space.write(extent, pages(SIZE, 1))
        assert os.fstat(one.fileno()).st_size == os.fstat(two.fileno()).st_size == 0
