"""Times reads and writes of state on disk, as training does them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from dos.calibration.bench import host_zeros
from dos.calibration.rounds import Figure, Link, Rounds
from dos.devices import Device
from dos.devices.pinned import lazy_zeros
from dos.state.disk import PAGE, DiskSpace, Extent
from perfmodel import Lane, Op, Span
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANES, lane_speeds

LEAST_BYTES = 16 * PAGE
"""The least bytes of a read or write; small ones, which show fixed costs, have a page or more."""

_ROOM = 10
"""All ranks together use one part in this number of the free room."""
_EXTENTS = 8
"""The number of extents for each way, used in turns, so that a drive's cache of the last one does not count."""
_SMALL = 256
"""How many times smaller the reads and writes are that show fixed costs."""
_PROBE_BYTES = 32 << 20
"""The bytes of a first write, which shows how much can be written in the time of an effort."""
_EXPLAINED = 0.9
"""The model explains a rate above this share of its prediction."""

_LANES = {Op.READ: Lane.READ, Op.WRITE: Lane.WRITE}
_BANDWIDTHS = {op: LANES[lane].rate for op, lane in _LANES.items()}
UPDATE_BESIDE = "cpu_update_rate_beside_disk"


class DiskBench:
    """Extents of state on disk, half of them to be read, half to be written. All figures are means over the ranks."""

    def __init__(self, folders: Sequence[Path], device: Device | None, rounds: Rounds, ranks: int) -> None:
        """Write all extents once. ranks: the number that share the folders. Raises OSError as `DiskSpace` does."""
        self._folders = folders
        self._rounds = rounds
        self._device = device
        self._space = DiskSpace(folders)
        self._nbytes = self._fitting(ranks)
        self._small = max(PAGE, self._nbytes // _SMALL // PAGE * PAGE)
        self._buffers = {op: _random(host_zeros(device, self._nbytes, torch.uint8)) for op in _LANES}
        self._extents = {
            (op, nbytes): cycle(self._written(nbytes)) for nbytes in (self._nbytes, self._small) for op in _LANES
        }

    def close(self) -> None:
        """Remove the files."""
        self._space.close()

    def note(self) -> str:
        """Return the description of the measurement. Call it before `close`."""
        folders = f"disk rates are of {', '.join(map(str, self._folders))}"
        if self._space.direct:
            return folders
        return f"{folders}, where not all is direct I/O: they may be those of memory that caches files"

    @property
    def link(self) -> Link:
        """The measurements of reads and writes."""
        return Link(
            self._rounds, _BANDWIDTHS, "disk_latency_s", UPDATE_BESIDE, self._nbytes, self._small, self._transfer
        )

    def _transfer(self, op: Op, nbytes: int) -> list[Span]:
        lane, move = _LANES[op], self._space.read if op is Op.READ else self._space.write
        transfer: AbstractContextManager[float] = nullcontext(time.perf_counter())
        if self._device is not None:
            transfer = self._device.disk_io(lane, nbytes)
        with transfer as start:
            move(next(self._extents[op, nbytes]), self._buffers[op][:nbytes])
        return [Span(lane, op, 0, start, time.perf_counter())]

    def _fitting(self, ranks: int) -> int:
        """Return the bytes of a read or write for which there is room and time."""
        effort = self._rounds.effort
        room = self._space.free_bytes() // _ROOM // ranks // (len(_LANES) * (_EXTENTS + 1))
        nbytes = max(LEAST_BYTES, min(effort.disk_bytes, *self._rounds.exchange(room)))
        (extent,) = self._space.allocate([_pages(min(nbytes, _PROBE_BYTES))])
        buffer = _random(lazy_zeros(extent.nbytes, torch.uint8))
        start = time.perf_counter()
        self._space.write(extent, buffer)
        rate = extent.nbytes / (time.perf_counter() - start)
        self._space.release(extent)
        in_time = int(min(self._rounds.exchange(rate)) * effort.seconds / effort.repeats)
        return _pages(max(LEAST_BYTES, min(nbytes, in_time)))

    def _written(self, nbytes: int) -> list[Extent]:
        """Return extents of `nbytes`, written once, because the first write of an extent takes longer."""
        extents = self._space.allocate([nbytes] * _EXTENTS)
        for extent in extents:
            self._space.write(extent, self._buffers[Op.WRITE][:nbytes])
        return extents


def unexplained(figures: Mapping[str, Figure], profile: HardwareProfile) -> str:
    """Return a text about slowdowns of updates, reads and writes at once that host DRAM does not explain, or "".

    profile: the measured one, of one rank.
    """
    rates = {lane: getattr(profile, service.rate) for lane, service in LANES.items()}
    traffic = {Lane.CPU: MIXED.update_traffic * rates[Lane.CPU], **{lane: rates[lane] for lane in _LANES.values()}}
    numbers = {number: lane for number, lane in enumerate(LANES) if lane in traffic}
    speeds = lane_speeds({number: traffic[lane] for number, lane in numbers.items()}, profile)
    names = {Lane.CPU: UPDATE_BESIDE} | {_LANES[op]: f"{name}_beside" for op, name in _BANDWIDTHS.items()}
    shares = {lane: figures[names[lane]].value / (rates[lane] * speeds[number]) for number, lane in numbers.items()}
    slower = [f"{lane.value} at {share:.0%}" for lane, share in shares.items() if share < _EXPLAINED]
    if not slower:
        return ""
    return f"CPU updates and disk at once were slower than sharing host memory explains: {', '.join(slower)} of that"


def _pages(nbytes: int) -> int:
    return nbytes // PAGE * PAGE


def _random(buffer: Tensor) -> Tensor:
    """Fill the buffer with random bytes, because drives may store zeros faster; return it."""
    buffer.view(torch.int64).random_()
    return buffer
