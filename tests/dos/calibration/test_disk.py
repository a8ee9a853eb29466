"""The disk's rates: measured where state is to be, within the room that is there, and said what they are of."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dos.calibration import command as calibrate
from dos.calibration import disk
from dos.calibration.disk import UPDATE_BESIDE, DiskBench, unexplained
from dos.calibration.measure import measure
from dos.calibration.rounds import Figure, Rounds
from dos.state.disk import DiskError, DiskSpace, Extent
from perfmodel.hardware import HardwareProfile
from tests.support.calibration import TINY
from tests.support.training import profile


def test_host_memory_is_no_less_than_updates_and_the_disk_used_at_once(tmp_path: Path) -> None:
    figures = measure(None, TINY, [1], disk=[tmp_path]).figures
    both = sum(figures[f"disk_{way}_bandwidth_beside"].value for way in ("read", "write"))
    used = 28 * figures[UPDATE_BESIDE].value + both
    assert figures["host_bandwidth"].value >= used * (1 - 1e-9), "but for rounding, as it is added in another order"


def test_a_drive_that_fails_says_nothing_of_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(space: DiskSpace, extent: Extent, buffer: object) -> None:
        raise DiskError(errno.EIO, "the cable came off")

    monkeypatch.setattr(DiskSpace, "read", fail)
    monkeypatch.setattr(calibrate, "QUICK", TINY)
    with pytest.raises(SystemExit, match=r"^dos\.calibrate: the cable came off; choose another folder with --disk$"):
        calibrate.main(["--quick", "--device", "cpu", "--threads", "1", "--disk", str(tmp_path)])


def rounds(**effort: object) -> Rounds:
    return Rounds(dataclasses.replace(TINY, **effort), lambda value: [value])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tenth_of_the_free_room_is_used(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]

    class Small(DiskSpace):
        def free_bytes(self) -> int:
            return 2**27 - self.nbytes

        def allocate(self, sizes: Sequence[int]) -> list[Extent]:
            extents = super().allocate(sizes)
            most[0] = max(most[0], self.nbytes)
            return extents

    monkeypatch.setattr(disk, "DiskSpace", Small)
    bench = DiskBench([tmp_path], None, rounds(disk_bytes=2**30, seconds=1e3), ranks)
    bench.close()
    assert 0.5 < most[0] / (2**27 / 10 / ranks) <= 1.0


def test_a_slow_disk_is_measured_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Noted(DiskSpace):
        def allocate(self, sizes_: Sequence[int]) -> list[Extent]:
            sizes.extend(sizes_)
            return super().allocate(sizes_)

    monkeypatch.setattr(disk, "DiskSpace", Noted)
    DiskBench([tmp_path], None, rounds(disk_bytes=2**25, seconds=1e-9), 1).close()
    assert sizes.pop(0) == 2**25
    assert max(sizes) == disk.LEAST_BYTES


def test_rates_of_a_page_cache_are_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    open_, refused = os.open, []

    def refuses(path: object, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and str(path).startswith(str(two)):
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuses)
    found = measure(None, TINY, [1], disk=[one, two])
    assert refused
    note = f"disk rates are of {one}, {two}, where not all is direct I/O: they may be those of memory that caches files"
    assert note in found.notes
    assert note in found.profile(HardwareProfile.builtin("unknown"), "here").provenance.note


def test_rates_below_what_shared_host_memory_explains_are_reported() -> None:
    machine = profile(
        host_bandwidth=30e9,
        cpu_update_rate=1e9,
        disk_read_bandwidth=8e9,
        disk_write_bandwidth=6e9,
        disk_read_bandwidth_duplex=4e9,
        disk_write_bandwidth_duplex=4e9,
    )  # updates want 28 GB/s and find 22 beside the disk
    rates = {UPDATE_BESIDE: 22e9 / 28, "disk_read_bandwidth_beside": 4e9, "disk_write_bandwidth_beside": 4e9}

    def said(**lower: float) -> str:
        return unexplained({name: Figure(rate * lower.get(name, 1.0), 0.0) for name, rate in rates.items()}, machine)

    assert said() == said(disk_read_bandwidth_beside=0.95) == ""
    slower = said(disk_read_bandwidth_beside=0.5, **{UPDATE_BESIDE: 0.8})
    assert slower.endswith("than sharing host memory explains: CPU at 80%, disk read at 50% of that")
