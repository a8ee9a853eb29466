"""Pinned host memory that the CUDA runtime allocates, where it registers none of ours. No GPU has run this."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.devices import pinned

_PORTABLE = 1
"""CUDA's cudaHostAllocPortable: pinned for all devices."""


def allocate_pinned(nbytes: int, device: torch.device) -> Tensor | None:
    """Return pinned zeros, 1-D uint8, of memory that the runtime allocates, which takes all of it at once.

    It is freed with the last view. Returns None if `pin` has had success in this process, or was not refused, or if the
    runtime does not allocate so much either: a size that it has refused is not tried again.
    device: any CUDA device that this process uses.
    """
    limit, runtime = pinned._limit(), library()
    if runtime is None or not limit.may_allocate(nbytes):
        return None
    found = ctypes.c_void_p()
    with torch.cuda.device(device):
        error = runtime.cudaHostAlloc(ctypes.byref(found), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE))
    if error or found.value is None:
        limit.refuse_allocation(nbytes)
        pinned._forget_error(device)
        return None
    address = found.value
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(pinned.Pages)
    pages[:] = 0
    limit.regions[address] = nbytes
    free = weakref.finalize(pages, _free, runtime, address, os.getpid(), device, limit.regions)
    free.atexit = False  # the runtime frees it when the process ends, and may be gone before
    pinned._find(_Allocated(pages, nbytes), pages)
    return torch.from_numpy(pages)


class _Allocated(pinned.Mapped):
    """Memory of the runtime: it is pinned as a whole as long as it exists."""

    def __init__(self, pages: pinned.Pages, nbytes: int) -> None:
        super().__init__(pages, None, 0)
        first = pages.ctypes.data
        self._regions[first] = first + nbytes, lambda: None
        self.borders = first, first + nbytes

    def unregister(self, first: int, end: int) -> list[tuple[int, int]]:
        return []

    def advise(self, option: int, address: int, nbytes: int) -> None:
        pass


def _free(runtime: Any, address: int, owner: int, device: torch.device, regions: dict[int, int]) -> None:
    regions.pop(address, None)
    if os.getpid() == owner:  # a forked child has no CUDA
        with torch.cuda.device(device):
            runtime.cudaFreeHost(ctypes.c_void_p(address))


@functools.cache
def library() -> Any:
    """Return the CUDA runtime's library that torch has loaded, as ctypes knows it; None without one, and for ROCm."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{'11.0' if major == '11' else major}")  # the names that the library has
    except OSError:
        return None
