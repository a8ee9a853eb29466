"""State on disk that users read, and that loading writes, where it is mapped."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dos.state.disk import PAGE, DiskError, DiskSpace, Extent
from dos.state.disk import space as space_module
from tests.support.disk import change, files, give_rates, pages, read_through_cache, reads

SIZE = 16 * PAGE


@pytest.fixture(params=["one folder", "three folders", "page cache"])
def space(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskSpace:
    monkeypatch.setattr(space_module, "_REQUEST_BYTES", 4 * PAGE)
    give_rates(monkeypatch, [1.0] * 3)
    space = DiskSpace([tmp_path / str(i) for i in range(3 if request.param == "three folders" else 1)])
    if request.param == "page cache":
        read_through_cache(space)
    return space


def shown(space: DiskSpace, extent: Extent, *, writable: bool = True) -> Tensor:
    """A view of all of it."""
    view = pages(SIZE, seed=98)
    space.expose(extent, 0, SIZE, view.data_ptr(), writable=writable)
    return view


def disturb(extent: Extent, place: int) -> None:
    """Change a byte of it as another program may."""
    piece = next(piece for piece in extent.pieces if piece.start <= place < piece.start + piece.nbytes)
    offset = piece.offset + place - piece.start
    change(piece.file.path, offset, bytes([piece.file.path.read_bytes()[offset] ^ 1]))


def read(space: DiskSpace, extent: Extent) -> Tensor:
    """All of it, with what user code wrote."""
    space.sync_mappings(extent)
    space.read(extent, buffer := pages(SIZE))
    return buffer


def test_views_that_stay_have_what_is_written_later(space: DiskSpace) -> None:
    (extent,) = space.allocate([SIZE])
    view = shown(space, extent)
    for seed in range(4):
        space.write(extent, contents := pages(SIZE, seed))
        assert torch.equal(view, contents)
        space.expose(extent, 0, SIZE, view.data_ptr(), writable=True)
        view.add_(1)  # its pages wait for being written when the next write comes
        space.sync_mappings(extent)
        assert reads(space, extent, contents + 1)


@pytest.mark.parametrize("settles", [True, False])
def test_the_next_read_has_what_users_wrote(space: DiskSpace, settles: bool) -> None:
    (extent,) = space.allocate([SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    view = shown(space, extent)
    view[100:-100:PAGE] = 7
    if settles:
        space.sync_mappings(extent)
    assert reads(space, extent, view)
    view[3 * PAGE : 9 * PAGE] = contents[5 * PAGE : 11 * PAGE]
    written = view.clone()
    space.hide(extent)
    space.sync_mappings(extent)
    assert reads(space, extent, written), "hidden meanwhile"
    space.write(extent, contents)
    assert reads(space, extent, contents), "what users wrote does not come after it"


def test_a_part_is_shown_at_its_place(space: DiskSpace) -> None:
    """The end is rounded up to a page, and the memory around it stays as it was."""
    _, extent = space.allocate([3 * PAGE, SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    around = pages(12 * PAGE, 2)
    before = around.clone()
    space.expose(extent, 4 * PAGE, 6 * PAGE + 10, around[2 * PAGE :].data_ptr(), writable=True)
    assert torch.equal(around[2 * PAGE : 9 * PAGE], contents[4 * PAGE : 11 * PAGE])
    assert torch.equal(around[: 2 * PAGE], before[: 2 * PAGE])
    assert torch.equal(around[9 * PAGE :], before[9 * PAGE :])
    around[2 * PAGE : 9 * PAGE] = 5
    space.sync_mappings(extent)
    contents[4 * PAGE : 11 * PAGE] = 5
    assert reads(space, extent, contents)
    space.hide(extent)
    assert not around[2 * PAGE : 9 * PAGE].any()
    assert torch.equal(around[9 * PAGE :], before[9 * PAGE :])


@pytest.mark.parametrize("used", [False, True])
def test_an_extent_never_written_shows_zeros(space: DiskSpace, used: bool) -> None:
    """Also in room that was another's, and the parts that were not shown."""
    if used:
        (other,) = space.allocate([SIZE])
        space.write(other, pages(SIZE, 1))
        space.release(other)
    (extent,) = space.allocate([SIZE])
    view = pages(PAGE, 2)
    space.expose(extent, PAGE, PAGE, view.data_ptr(), writable=True)
    assert not view.any()
    view[5] = 6
    expected = pages(SIZE)
    expected[PAGE + 5] = 6
    space.sync_mappings(extent)
    assert reads(space, extent, expected)


def test_checksums_count_again_from_the_next_write_on(space: DiskSpace) -> None:
    (extent,) = space.allocate([SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    view = shown(space, extent)
    view[0] += 1
    space.hide(extent)
    space.write(extent, contents)
    file = extent.pieces[0].file.path
    change(file, 0, bytes((contents[:1] + 1).tolist()))
    with pytest.raises(DiskError, match="checksums differ"):
        reads(space, extent, contents)


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_contents_that_something_else_changed_are_not_shown(space: DiskSpace, place: int) -> None:
    other, extent = space.allocate([SIZE, SIZE])
    for each in (other, extent):
        space.write(each, contents := pages(SIZE, 1))
    disturb(extent, place)
    view = pages(SIZE, 2)
    with pytest.raises(DiskError, match=r"expected what was last written there, found something else .*checksums"):
        space.expose(extent, 0, SIZE, view.data_ptr())
    assert torch.equal(view, pages(SIZE, 2))
    assert torch.equal(shown(space, other), contents)


@pytest.mark.parametrize("written", [True, False])
def test_what_is_shown_may_not_change(space: DiskSpace, written: bool) -> None:
    """By whoever it is; zeros, too, of an extent that was never written."""
    extent, other = space.allocate([SIZE, SIZE])
    if written:
        space.write(extent, pages(SIZE, 1))
    view, beside = (shown(space, each, writable=False) for each in (extent, other))
    assert torch.equal(read(space, extent), view)
    disturb(extent, 9 * PAGE)
    with pytest.raises(DiskError, match="checksums differ"):
        read(space, extent)
    beside[7] += 1
    with pytest.raises(DiskError, match="checksums differ"):
        read(space, other)


def test_nothing_waits_for_what_was_not_shown(space: DiskSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    (extent,) = space.allocate([SIZE])
    space.write(extent, pages(SIZE, 1))
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    space.sync_mappings(extent)
    assert not synced
    shown(space, extent)
    space.sync_mappings(extent)
    assert len(synced) == len({piece.file for piece in extent.pieces if space.direct})
    space.write(extent, pages(SIZE, 1))
    del synced[:]
    space.sync_mappings(extent)
    assert not synced


def test_a_drive_that_fails_when_it_settles(space: DiskSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, os.strerror(5))

    if not space.direct:
        pytest.skip("reading and views share the page cache")
    (extent,) = space.allocate([SIZE])
    shown(space, extent)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(DiskError, match=r"writing state failed: Input/output error; .*load the last checkpoint"):
        space.sync_mappings(extent)


def test_views_outlive_the_files(space: DiskSpace, tmp_path: Path) -> None:
    (extent,) = space.allocate([SIZE])
    space.write(extent, contents := pages(SIZE, 1))
    view = shown(space, extent)
    space.close()
    assert not files(tmp_path)
    assert torch.equal(view, contents)
    view.zero_()


def test_a_forked_child_cannot_write_where_its_parents_state_is_mapped(space: DiskSpace) -> None:
    (extent,) = space.allocate([SIZE])
    view = shown(space, extent)
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            view.data.fill_(1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert not view.any()


def test_a_mapping_that_fails_names_the_limit(space: DiskSpace) -> None:
    (extent,) = space.allocate([SIZE])
    with pytest.raises(OSError, match=r"mapping \d+ bytes of state failed: .*max_map_count"):
        space.expose(extent, 0, SIZE, 1)  # within no page
