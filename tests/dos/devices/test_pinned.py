"""Pinned host memory, on the fake runtime, which notes what is registered."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dos.devices import pinned
from dos.devices.pinned import lazy_zeros, pin, pinned_parts
from tests.support.fake_cuda import Runtime, install

DEVICE = torch.device("cuda", 1)
HUGE = 2 << 20


def pinned_zeros(nbytes: int, device: torch.device) -> Tensor:
    tensor = lazy_zeros(nbytes, torch.uint8)
    pin(tensor, device)
    return tensor


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = install(monkeypatch, None)
    pinned._warn.cache_clear()
    pinned._warn_of_parts.cache_clear()
    yield runtime
    gc.collect()
    assert not runtime.regions, "still registered although no tensor uses it"
    assert runtime.contexts == {DEVICE.index}


@pytest.mark.parametrize("nbytes", [1, 4097, HUGE - 1, HUGE, 5 * HUGE + 12345])
def test_exactly_as_many_bytes_as_asked_for(runtime: Runtime, nbytes: int) -> None:
    tensor = pinned_zeros(nbytes, DEVICE)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert not tensor.any()
    assert runtime.regions == {tensor.data_ptr(): tensor.data_ptr() + nbytes}
    assert tensor.data_ptr() % (HUGE if nbytes >= HUGE else mmap.PAGESIZE) == 0
    tensor.fill_(7)


def test_pages_are_made_by_several_threads_before_they_are_registered(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_SHARE_BYTES", HUGE)
    monkeypatch.setattr(pinned, "kernel_threads", lambda: 2)
    tensor = lazy_zeros(8 * HUGE + 4096, torch.uint8)
    tensor[5] = 7
    there: list[bool] = []
    register = runtime.cudaHostRegister

    def seen(address: int, nbytes: int, flags: int) -> int:
        resident = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident) == 0
        there.append(all(page & 1 for page in resident))
        return register(address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", seen)
    pin(tensor, DEVICE)
    assert there == [True]
    assert tensor[:8].tolist() == [0, 0, 0, 0, 0, 7, 0, 0]


def test_unregistered_with_the_last_view(runtime: Runtime) -> None:
    tensor = pinned_zeros(1000, DEVICE)
    view = tensor[40:80].view(torch.float32)
    del tensor
    gc.collect()
    assert runtime.regions
    view.fill_(1.0)
    del view
    gc.collect()
    assert not runtime.regions


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices of the kernels that report what a failed call has left behind."""
    launches = []

    def launch(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", launch)
    return launches


def test_pages_that_cannot_be_pinned(
    runtime: Runtime, launches: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = [2]
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (64 << 10, 64 << 10))
    with caplog.at_level(logging.WARNING):
        tensors = [pinned_zeros(nbytes, DEVICE) for nbytes in (1000, HUGE)]
    for tensor in tensors:
        assert not tensor.any()
        tensor.fill_(7)
    assert launches == [DEVICE], "a larger call cannot succeed"
    assert len(caplog.records) == 1
    assert "pinning host memory failed (out of memory)" in caplog.text
    assert "ulimit -l" in caplog.text


PARTS = [(0, 3 * mmap.PAGESIZE), (3 * mmap.PAGESIZE, 7 * mmap.PAGESIZE + 5)]


def refuse_more_than(most: int, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver fail where it is to register more bytes in one call."""
    register = runtime.cudaHostRegister

    def limited(address: int, nbytes: int, flags: int) -> int:
        return 2 if nbytes > most else register(address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", limited)


def test_parts_that_cannot_be_pinned_as_a_whole_stay_pinned(
    runtime: Runtime, launches: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = lazy_zeros(PARTS[-1][1], torch.uint8)
    for part in PARTS:
        pin(whole[slice(*part)], DEVICE)
    regions, borders = dict(runtime.regions), [whole[part] for part in pinned_parts(whole)]
    refuse_more_than(5 * mmap.PAGESIZE, runtime, monkeypatch)
    with caplog.at_level(logging.WARNING):
        pin(whole, DEVICE)
    assert runtime.regions == regions
    assert [len(part) for part in borders] == [len(whole[part]) for part in pinned_parts(whole)]
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "host memory that was pinned in parts cannot be pinned as a whole"
    ]
    pinned.unpin(whole, whole)
    assert not runtime.regions


def test_memory_is_registered_in_chunks_that_drivers_take(
    runtime: Runtime, launches: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = 2 * mmap.PAGESIZE
    monkeypatch.setattr(pinned, "_MOST_BYTES", most)
    whole = lazy_zeros(7 * mmap.PAGESIZE + 5, torch.uint8)
    for part in PARTS:
        pin(whole[slice(*part)], DEVICE)
    refuse_more_than(most, runtime, monkeypatch)
    with caplog.at_level(logging.WARNING):
        pin(whole, DEVICE)
    starts = range(whole.data_ptr(), whole.data_ptr() + len(whole), most)
    assert runtime.regions == {first: min(first + most, whole.data_ptr() + len(whole)) for first in starts}
    assert [part.start for part in pinned_parts(whole)] == list(range(0, len(whole), most))
    assert not caplog.records


def test_a_forked_child_has_no_copy(runtime: Runtime) -> None:
    tensor = pinned_zeros(3 * HUGE, DEVICE).fill_(7)
    tensor.fill_(7)
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def mapped() -> bool:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(first, 16) < end and start < int(last, 16) for first, last in ranges)

    assert mapped()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            present = mapped()
            del tensor
            gc.collect()
            status = 0 if not present and runtime.regions else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child has the pages, or unregistered them"
    assert (tensor == 7).all()
