"""A drive that fails: no state that is torn, stale or another's is ever read."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dos.state.disk import PAGE, DiskError, DiskSpace
from dos.state.disk import files as files_module
from dos.state.disk import space as space_module
from tests.support.disk import (
    Requests,
    Result,
    Transfer,
    change,
    files,
    pages,
    read_through_cache,
    reads,
    replace_transfer,
    truncate,
)

SIZE = 16 * PAGE
SECTOR = 512
REMEDY = "load the last checkpoint"


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

    def install(*results: tuple[int, int, int]) -> list[Requests]:
        left, seen = list(results), []

        def replaced(real: Transfer) -> Transfer:
            def transfer(write: bool, requests: Requests, threads: int) -> Result:
                seen.append(requests)
                return ([0] * len(requests), *left.pop(0)) if left else real(write, requests, threads)

            return transfer

        replace_transfer(monkeypatch, replaced)
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
    for use in (lambda: reads(space, extent, contents), lambda: space.expose(extent, 0, PAGE, 0)):
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
        read_through_cache(space)
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
        read_through_cache(space)
    space.write(extent, contents := pages(SIZE, 1))
    (file,) = files(tmp_path)
    truncate(file, size)
    with pytest.raises(DiskError, match=f"{file}: read .* of {4 * PAGE} bytes at byte .* truncated.*{REMEDY}"):
        reads(space, extent, contents)
    memory = pages(SIZE)
    with pytest.raises(DiskError, match=f"{file}: expected {SIZE} bytes, found {size}, was it truncated.*{REMEDY}"):
        space.expose(extent, 0, SIZE, memory.data_ptr())
    assert not memory.any()


def flipped(contents: bytes, mask: int, *places: int) -> bytes:
    """The same bits of 64-bit words at these bytes, as when two numbers change their signs."""
    changed = bytearray(contents)
    for place in places:
        word = int.from_bytes(contents[place : place + 8], "little") ^ mask
        changed[place : place + 8] = word.to_bytes(8, "little")
    return bytes(changed)


CORRUPTIONS: dict[str, Callable[[bytes, bytes, bytes, int], bytes]] = {
    **{
        f"bit {bit} of byte {place}": lambda now, old, other, size, bit=bit, place=place: (
            now[:place] + bytes([now[place] ^ 1 << bit]) + now[place + 1 :]
        )
        for place in (0, 1, 7, PAGE - 1, 5 * PAGE + 17, SIZE - 1)
        for bit in (0, 7)
    },
    **{
        f"{mask:x} of two words {apart} apart": lambda now, old, other, size, mask=mask, apart=apart: flipped(
            now, mask, 24, 24 + 8 * apart
        )
        for mask in (1 << 63, 1 << 31, 1 << 32, 1 << 15, 1)
        for apart in (1, 2, 8, 512 // 8, 4096 // 8, 8192 // 8)
    },
    "zeroed": lambda now, old, other, size: now[:size] + bytes(size) + now[2 * size :],
    "stale": lambda now, old, other, size: now[:size] + old[size : 2 * size] + now[2 * size :],
    "swapped": lambda now, old, other, size: now[size : 2 * size] + now[:size] + now[2 * size :],
    "shifted": lambda now, old, other, size: now[:size] + now[:size] + now[2 * size :],
    "another's": lambda now, old, other, size: other[:size] + now[size:],
}
"""What becomes of an extent's contents, of older ones and another extent's, in pieces of a size."""


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_contents_that_are_not_what_was_written(space: DiskSpace, tmp_path: Path, corruption: str) -> None:
    """Bits, sectors, pages and whole requests: lost writes, misdirected writes, foreign contents."""
    other, extent = space.allocate([SIZE, SIZE])
    (file,) = files(tmp_path)
    for size in (SECTOR, PAGE, 4 * PAGE):
        space.write(extent, pages(SIZE, 1))
        old = file.read_bytes()[SIZE:]
        space.write(extent, contents := pages(SIZE, 2))
        space.write(other, beside := pages(SIZE, 3))
        written = file.read_bytes()
        assert written[SIZE:] == bytes(contents.tolist())
        spoilt = CORRUPTIONS[corruption](written[SIZE:], old, written[:SIZE], size)
        assert len(spoilt) == SIZE
        change(file, SIZE, spoilt)
        first = next(i for i, (a, b) in enumerate(zip(spoilt, written[SIZE:], strict=True)) if a != b) // (4 * PAGE)
        where = f"{4 * PAGE} bytes at byte {SIZE + first * 4 * PAGE}"
        with pytest.raises(
            DiskError, match=f"{file}: expected what was last written there, .*{where}.*checksums.*{REMEDY}"
        ):
            reads(space, extent, contents)
        assert reads(space, other, beside)


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
    file = extent.pieces[0].file
    numbers = {file.fd, file.buffered}
    space.close()
    with (tmp_path / "one").open("w+b", buffering=0) as one, (tmp_path / "two").open("w+b", buffering=0) as two:
        assert numbers <= {one.fileno(), two.fileno()}
        with pytest.raises(DiskError, match="Bad file descriptor"):
            space.write(extent, pages(SIZE, 1))
        assert os.fstat(one.fileno()).st_size == os.fstat(two.fileno()).st_size == 0
