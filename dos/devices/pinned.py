"""Pinned host memory of exact size: ordinary pages that are registered with the CUDA runtime.

`pin_memory=True` would round up to a power of two: for the state of a large model, up to twice what it needs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20


def pinned_zeros(nbytes: int, device: torch.device) -> Tensor:
    """1-D uint8 zeros that all CUDA devices copy to and from by themselves; unregistered and freed with the last view.

    The pages are near the CPU on which the caller runs. A forked child, which would have to copy them all, does not
    have them: touching the tensor there is a segmentation fault. If pages cannot be pinned they are pageable, in
    children too, and one warning says so.

    nbytes: at least 1. device: any CUDA device that this process uses.
    """
    pages, mapping = _huge_pages(nbytes)
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):  # or this call would make a context on the first GPU
        # The default flags pin for all devices where addresses are unified, as on all 64-bit systems.
        error = runtime.cudaHostRegister(pages.ctypes.data, nbytes, 0)
    if error == runtime.cudaError.success:
        weakref.finalize(pages, _unregister, pages.ctypes.data, os.getpid(), device)
        mapping.madvise(mmap.MADV_DONTFORK)
    else:
        _forget_error(device)
        _warn(runtime.cudaGetErrorString(error))  # the error itself prints as "cudaError.???"
    return torch.from_numpy(pages)


class _Pages(np.ndarray):
    """An array that can be referenced weakly. Its finaliser runs before the mapping under it goes."""


def _huge_pages(nbytes: int) -> tuple[_Pages, mmap.mmap]:
    """Zeros on a page boundary, in huge pages where whole ones fit and the system has them; and what they are part of.

    Addresses beside them that alignment needs are never touched and cost no memory.
    """
    whole = nbytes // _HUGE_PAGE * _HUGE_PAGE
    mapping = mmap.mmap(-1, nbytes + (_HUGE_PAGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % _HUGE_PAGE if whole else 0
    if whole:
        with contextlib.suppress(OSError):  # this kernel has none
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return everything[start : start + nbytes].view(_Pages), mapping


def _unregister(address: int, owner: int, device: torch.device) -> None:
    if os.getpid() == owner:  # a forked child has neither the pages nor CUDA
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Let the next kernel launch be this one: the runtime reports a failed call there once more."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.uint8, device=device)


@functools.cache
def _warn(error: str) -> None:
    logger.warning(
        "pinning host memory failed (%s): copies of optimizer state will be slower and not overlap with computation; "
        "raise the limit of locked memory (ulimit -l unlimited)",
        error,
    )
