"""Host memory that takes no room until it is used, and is pinned then: registered with the CUDA runtime.

`pin_memory=True` would round up to a power of two: for the state of a large model, up to twice what it needs.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.machine.threads import kernel_threads

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
_SHARE_BYTES = 32 << 20
"""Bytes of which a thread makes the pages at a time."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE."""

_libc = ctypes.CDLL(None)


class _Pages(np.ndarray):
    """An array that can be referenced weakly. Its finaliser runs before the mapping under it goes."""


class _Mapped:
    """Addresses, and the mapping in which they lie: an address plus `offset` is where in it.

    regions: what of them is pinned: by first byte, the end, and what unregisters it.
    borders: where regions begin and end, in order; replaced as a whole, because copies read it on any thread.
    """

    def __init__(self, pages: _Pages, mapping: mmap.mmap, offset: int) -> None:
        self.pages = weakref.ref(pages)
        self.regions: dict[int, tuple[int, Callable[[], object]]] = {}
        self.borders: tuple[int, ...] = ()
        self._mapping = mapping
        self._offset = offset

    def find_borders(self) -> None:
        """Regions have come or gone."""
        self.borders = tuple(sorted({*self.regions, *(end for end, _ in self.regions.values())}))

    def advise(self, option: int, part: Tensor) -> None:
        """Tell the system what to do with the pages of this part."""
        self._mapping.madvise(option, self._offset + part.data_ptr(), part.nbytes)


_mapped: dict[int, _Mapped] = {}
"""By address of the first byte."""


def lazy_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """1-D zeros on a page boundary, in huge pages where whole ones fit and the system has them.

    They take memory page by page, when something is first written there or it is pinned. Addresses
    beside them that alignment needs are never touched.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.zeros(0, dtype=dtype, device="cpu")
    whole = nbytes // _HUGE_PAGE * _HUGE_PAGE
    mapping = mmap.mmap(-1, nbytes + (_HUGE_PAGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % _HUGE_PAGE if whole else 0
    if whole:
        with contextlib.suppress(OSError):  # this kernel has none
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    pages = everything[start : start + nbytes].view(_Pages)
    address = pages.ctypes.data
    _mapped[address] = _Mapped(pages, mapping, start - address)
    weakref.finalize(pages, _mapped.pop, address, None)
    return torch.from_numpy(pages).view(dtype)


def pin(tensor: Tensor, device: torch.device) -> None:
    """Let all CUDA devices copy to and from a part of what `lazy_zeros` gave by themselves.

    It is unregistered with the last view of the whole. Parts that are pinned one by one begin on
    page boundaries. Parts that were pinned before and lie in this one become one with it; nothing
    may use them meanwhile. The pages are near the CPU on which the caller runs. A forked child,
    which would have to copy them all, does not have them: touching the tensor there is a
    segmentation fault. If pages cannot be pinned they are pageable, in children too, and one
    warning says so.

    device: any CUDA device that this process uses.
    """
    mapped = _mapped[tensor.untyped_storage().data_ptr()]
    pages = mapped.pages()
    assert pages is not None, "the tensor is a view of them"
    runtime, on, address = torch.cuda.cudart(), torch.cuda.device, tensor.data_ptr()
    pinned_before = [first for first in mapped.regions if address <= first < address + tensor.nbytes]
    for first in pinned_before:
        mapped.regions.pop(first)[1]()
    if not pinned_before:
        _make_pages(address, tensor.nbytes)
    with on(device):  # or this call would make a context on the first GPU
        # The default flags pin for all devices where addresses are unified, as on all 64-bit systems.
        error = runtime.cudaHostRegister(address, tensor.nbytes, 0)
    if error == runtime.cudaError.success:
        unregister = weakref.finalize(pages, _unregister, runtime, on, address, os.getpid(), device)
        mapped.regions[address] = address + tensor.nbytes, unregister
        mapped.advise(mmap.MADV_DONTFORK, tensor)
    else:
        _forget_error(device)
        _warn(runtime.cudaGetErrorString(error))  # the error itself prints as "cudaError.???"
    mapped.find_borders()


def unpin(tensor: Tensor, unused: Tensor) -> None:
    """Undo `pin` for a part that was pinned as one, and let the system have the pages of `unused`, which is in it.

    Nothing may use them. They are zeros when they are next used.
    """
    mapped = _mapped[tensor.untyped_storage().data_ptr()]
    known = mapped.regions.pop(tensor.data_ptr(), None)
    if known is not None:
        known[1]()
        mapped.advise(mmap.MADV_DOFORK, tensor)
        mapped.find_borders()
    mapped.advise(mmap.MADV_DONTNEED, unused)


def pinned_parts(tensor: Tensor) -> list[slice]:
    """A 1-D host tensor, cut where pinned regions begin and end, because CUDA refuses a copy that crosses a border."""
    mapped = _mapped.get(tensor.untyped_storage().data_ptr())
    first = tensor.data_ptr()
    inside = () if mapped is None else mapped.borders
    inside = inside[bisect.bisect_right(inside, first) : bisect.bisect_left(inside, first + tensor.nbytes)]
    cuts = [0, *((border - first) // tensor.itemsize for border in inside), len(tensor)]
    return [slice(*cut) for cut in itertools.pairwise(cuts)]


def _make_pages(address: int, nbytes: int) -> None:
    """Make pages on several threads, because registering does so on one. It changes nothing of what is there.

    Linux before 5.14 does not know how, and leaves it to registering.
    """
    starts = range(address, address + nbytes, _SHARE_BYTES)
    if len(starts) == 1:
        return
    threads = ThreadPoolExecutor(min(len(starts), kernel_threads()))
    with contextlib.suppress(RuntimeError), threads as pool:  # once the interpreter ends, it starts none
        for start in starts:
            length = min(_SHARE_BYTES, address + nbytes - start)
            pool.submit(_libc.madvise, ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


def _unregister(
    runtime: Any, on: Callable[[torch.device], Any], address: int, owner: int, device: torch.device
) -> None:
    if os.getpid() == owner:  # a forked child has neither the pages nor CUDA
        with on(device):
            runtime.cudaHostUnregister(address)


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
