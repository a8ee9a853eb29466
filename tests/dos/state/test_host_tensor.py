"""Host memory that is made part by part: what is taken is what was made, in huge pages or not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.state.disk.files import map_memory
from dos.state.host_tensor import HostTensor
from tests.support.training import FAST

HUGE = 2 << 20
PART = HUGE // 8
"""Parameters of a part, and its bytes."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has no huge pages"
)


def taken(tensor: Tensor) -> int:
    """Bytes of its pages that are in memory."""
    there = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), there) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in there)


def mapping_of(tensor: Tensor) -> tuple[int, int, list[str]]:
    """The addresses, from where to where, of the system's mapping that has the first byte, and its flags."""
    start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(address, 16) for address in name.split("-"))
        elif name == "VmFlags:" and start <= tensor.data_ptr() < end:
            return start, end, rest.split()
    raise AssertionError("it is mapped nowhere")


def made(numbers: Iterable[int], parts: int = 64) -> HostTensor:
    """A tensor of which these parts are made, and written to."""
    tensor = HostTensor(parts * PART, torch.uint8, EmulatedDevice(FAST, capacity=10**9), PART)
    ranges = [tensor.part(number * PART, (number + 1) * PART) for number in numbers]
    for each in ranges:
        tensor.allow_huge_pages(*each)
    for each in ranges:
        tensor.make(*each)
        tensor.tensor[slice(*each)] = 1
    return tensor


@pytest.mark.parametrize("every", [2, 3, 8, 9])
def test_parts_that_are_spread_take_what_they_are(every: int) -> None:
    tensor = made(range(0, 64, every))
    assert taken(tensor.tensor) == tensor.nbytes == len(range(0, 64, every)) * PART


def test_neighbours_share_huge_pages() -> None:
    """They are one mapping, in which the system may use them, and what is beside it is another."""
    tensor = made(range(4, 60))
    assert taken(tensor.tensor) == tensor.nbytes == 56 * PART
    run = tensor.tensor[4 * PART : 60 * PART]
    start, end, flags = mapping_of(run)
    assert (start, end) == (run.data_ptr(), run.data_ptr() + run.nbytes)
    assert "hg" in flags
    assert "hg" not in mapping_of(tensor.tensor)[2]


def test_released_pages_are_not_made_again_by_neighbours() -> None:
    tensor = made(range(16))
    for number in (3, 8, 15):
        tensor.release(number * PART, (number + 1) * PART)
    for number in set(range(16)) - {3, 8, 15}:
        tensor.tensor[number * PART : (number + 1) * PART] = 2
    assert taken(tensor.tensor) == tensor.nbytes == 13 * PART
    assert not tensor.tensor[3 * PART : 4 * PART].any()


def test_memory_that_files_were_mapped_over_takes_nothing_afterwards() -> None:
    """Though all of a huge page may be such."""
    tensor = made(())
    map_memory(tensor.tensor.data_ptr(), 32 * PART)
    tensor.tensor[5] = 1
    assert taken(tensor.tensor) == mmap.PAGESIZE
