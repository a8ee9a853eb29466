"""Host memory that takes no pages until it is used, and is pinned then: registered with the CUDA runtime.

`pin_memory=True` would round up to a power of two: for the state of a large model, up to twice the bytes needed.
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

from dos.devices.pin_limit import LEAST_BYTES, PinLimit, remedy
from dos.machine.host_memory import check_mapping
from dos.machine.threads import kernel_threads

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
_SHARE_BYTES = 32 << 20
"""The bytes whose pages a thread allocates at a time."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE."""
_MOST_BYTES = 64 << 30
"""The most bytes of a call that registers, where a larger one failed: drivers fail from 512 GiB (R580) or less on."""

_libc = ctypes.CDLL(None)


class Pages(np.ndarray):
    """An array that can be referenced weakly. Its finaliser runs before its mapping is unmapped."""


class Mapped:
    """Addresses in a mapping: an address plus `offset` is the position in it.

    end: the address behind its last byte.
    borders: the addresses at which regions begin and end, in order; replaced as a whole: any thread may read it.
    """

    def __init__(self, pages: Pages, mapping: mmap.mmap | None, offset: int) -> None:
        self.borders: tuple[int, ...] = ()
        self.end = pages.ctypes.data + pages.nbytes
        self._regions: dict[int, tuple[int, Callable[[], object]]] = {}
        """The pinned regions: by first byte, the end, and the function that unregisters the region."""
        # Weak: the module's table has this object, and the mapping must be released with the last tensor.
        self._pages = weakref.ref(pages)
        self._mapping = mapping
        self._offset = offset
        self._owner = os.getpid()

    def register(self, first: int, end: int, device: torch.device) -> str:
        """Pin these addresses as one region, for all devices.

        Returns the runtime's error message, empty if they are pinned.
        """
        runtime, on, pages = torch.cuda.cudart(), torch.cuda.device, self._pages()
        assert pages is not None, "the caller has a view of them"
        with on(device):  # else this call would make a context on the first GPU
            # The default flags pin for all devices where addresses are unified, as on all 64-bit systems.
            error = runtime.cudaHostRegister(first, end - first, 0)
        if error != runtime.cudaError.success:
            _forget_error(device)
            return str(runtime.cudaGetErrorString(error))  # the error itself prints as "cudaError.???"
        # Before the mapping is unmapped: the runtime would take pages that are mapped there later for these.
        unregister = weakref.finalize(pages, _unregister, runtime, on, first, os.getpid(), device, _limit().regions)
        self._regions[first], _limit().regions[first] = (end, unregister), end - first
        # Linux copies pinned pages at each fork: all of the state, for each worker of a data loader.
        self.advise(mmap.MADV_DONTFORK, first, end - first)
        self._find_borders()
        return ""

    def pinned(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the regions that begin in this range, from first byte to end, in order."""
        # Over a copy: any thread may ask.
        return sorted((start, stop) for start, (stop, _) in [*self._regions.items()] if first <= start < end)

    def lost(self, first: int, end: int) -> bool:
        """Return whether pages of this range are missing here, a forked child of the process that has pinned them."""
        return os.getpid() != self._owner and any(a < end and first < b for a, (b, _) in self._regions.items())

    def unregister(self, first: int, end: int) -> list[tuple[int, int]]:
        """Undo `register` for all regions in this range; return them in order."""
        inside = self.pinned(first, end)
        for start, stop in inside:
            self._regions.pop(start)[1]()
            self.advise(mmap.MADV_DOFORK, start, stop - start)
        self._find_borders()
        return inside

    def has(self, first: int, end: int) -> bool:
        """Return whether this range lies within one region."""
        borders = self.borders
        place = bisect.bisect_right(borders, first) - 1
        region = self._regions.get(borders[place]) if place >= 0 else None
        return region is not None and end <= region[0]

    def _find_borders(self) -> None:
        global _changes
        self.borders = tuple(sorted({*self._regions, *(end for end, _ in self._regions.values())}))
        _changes += 1

    def advise(self, option: int, address: int, nbytes: int) -> None:
        """Call madvise for these pages."""
        assert self._mapping is not None, "the runtime's memory takes no advice"
        self._mapping.madvise(option, self._offset + address, nbytes)


_mapped: dict[int, Mapped] = {}
"""The mappings by the address of their first byte."""
_changes = 0
"""Of pinned regions."""
_starts: tuple[int, ...] = ()
"""These addresses in order, and perhaps some of mappings that are gone; replaced as a whole: any thread may read it."""


def _add_mapping(pages: Pages, mapping: mmap.mmap, offset: int) -> None:
    _find(Mapped(pages, mapping, offset), pages)


def _find(mapped: Mapped, pages: Pages) -> None:
    """Find these pages by address from now on, as long as they exist."""
    global _starts
    address = pages.ctypes.data
    _mapped[address] = mapped
    # The system may give the address to another mapping, which must not find the regions of this one.
    weakref.finalize(pages, _mapped.pop, address, None)
    # Not under a lock, which a forked child might inherit locked. Another thread may add a mapping meanwhile, and write
    # what it has found before.
    while _starts != (found := tuple(sorted(_mapped))):
        _starts = found


def _mapping_of(tensor: Tensor) -> Mapped | None:
    """Return the mapping in which a tensor lies; None: in none, as where `share_memory_` has moved its memory."""
    # By address: tensors that user code sees have storages of their own.
    starts, address = _starts, tensor.data_ptr()
    place = bisect.bisect_right(starts, address) - 1
    mapped = _mapped.get(starts[place]) if place >= 0 else None
    return mapped if mapped is not None and address < mapped.end else None


def lazy_zeros(numel: int, dtype: torch.dtype, *, in_parts: bool = False) -> Tensor:
    """Return 1-D zeros on a page boundary, in huge pages where whole ones fit and the system has them.

    Raises MemoryError if the system maps no more.
    They take memory page by page, when they are first written or pinned. Addresses before and after them that alignment
    needs are never touched.

    in_parts: only parts of them will be used, each after `use_huge_pages`; the rest never takes memory.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.zeros(0, dtype=dtype, device="cpu")
    whole = nbytes // _HUGE_PAGE * _HUGE_PAGE
    length = nbytes + (_HUGE_PAGE if whole else 0)
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        check_mapping(length)  # raises if this process has a limit that is known
        raise MemoryError(f"mapping {length} bytes of host memory failed: {error.strerror}") from error
    everything = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % _HUGE_PAGE if whole else 0
    pages = everything[start : start + nbytes].view(Pages)
    _add_mapping(pages, mapping, start - pages.ctypes.data)
    with contextlib.suppress(OSError):  # this kernel has no huge pages
        # A system that always uses huge pages would allocate memory beyond the parts that are used.
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    zeros = torch.from_numpy(pages).view(dtype)
    if not in_parts:
        use_huge_pages(zeros)
    return zeros


def use_huge_pages(part: Tensor, *, use: bool = True) -> None:
    """Let the system use huge pages for a part of a tensor of `lazy_zeros`, and across the border to such neighbours.

    part: begins on a page boundary, and ends on one or with the tensor. use: False forbids huge pages again.
    """
    mapped = _mapping_of(part)
    if mapped is not None:
        with contextlib.suppress(OSError):  # this kernel has no huge pages, or the process has its limit of mappings
            mapped.advise(mmap.MADV_HUGEPAGE if use else mmap.MADV_NOHUGEPAGE, part.data_ptr(), part.nbytes)


def pin(tensor: Tensor, device: torch.device) -> bool:
    """Pin a tensor of `lazy_zeros`, or a part of one, so that all CUDA devices can copy to and from it.

    It is unregistered with the last view of the whole tensor. Parts that are pinned one by one begin on page
    boundaries. Parts of this part that were pinned before are joined to one region; no work in flight may use them.
    Where they cannot be joined, these stay as they were. Other memory that cannot be pinned at once is pinned in
    pieces. The pages are allocated near the CPU on which the caller runs. A forked child, which would have to copy all
    pages, does not have them: touching the tensor there is a segmentation fault. Pages that cannot be pinned are
    pageable, in children too, and one warning says so.

    device: any CUDA device that this process uses.
    Returns whether all of the tensor is pinned.
    """
    mapped, address = _mapping_of(tensor), tensor.data_ptr()
    if mapped is None:
        return False  # copies to and from memory that is not pinned are slow, and right
    end = address + tensor.nbytes
    before = mapped.pinned(address, end)
    if before:
        return _join(mapped, before, address, end, device)
    _make_pages(address, tensor.nbytes)
    _register(mapped, address, end, device)
    for first, stop in reversed(mapped.pinned(address, end)):
        if excess():  # this memory, because nothing uses it yet
            mapped.unregister(first, stop)
    regions = mapped.pinned(address, end)
    missing = tensor.nbytes - sum(stop - first for first, stop in regions)
    if missing:
        _warn(_limit().error)
    elif any(stop - first < _MOST_BYTES for first, stop in regions[:-1]):
        _warn_of_parts(_limit().error)
    return not missing


def _join(mapped: Mapped, before: list[tuple[int, int]], address: int, end: int, device: torch.device) -> bool:
    """Pin regions anew as one, or leave them as they are; return whether all bytes are pinned."""
    pinned = sum(stop - first for first, stop in before)
    if len(before) == 1 and pinned == end - address:
        return True
    # Where a part could not be pinned, neither can the whole.
    if pinned == end - address and _limit().fitting(pinned, _MOST_BYTES, unpinned=pinned):
        mapped.unregister(address, end)  # the runtime registers no page twice
        if _register(mapped, address, end, device, _MOST_BYTES):
            return True
        # As it was rather than in part: CUDA refuses copies across the border of pinned memory.
        mapped.unregister(address, end)
        pinned = sum(stop - first for first, stop in before if _register(mapped, first, stop, device))
    _warn_of_parts(_limit().error)
    return pinned == end - address


def _register(mapped: Mapped, address: int, end: int, device: torch.device, least: int = LEAST_BYTES) -> bool:
    """Pin these addresses in as few regions as can be, from the first one on; return whether all are pinned.

    least: the least bytes of a region, if they are not pinned as one.
    """
    limit = _limit()
    while address < end and (nbytes := limit.fitting(end - address, least)):
        error = mapped.register(address, address + nbytes, device)
        if error:
            limit.failed(nbytes, error)
        else:
            limit.succeeded(nbytes)
            address += nbytes
    limit.settle()
    return address == end


def pinned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor of `lazy_zeros` that are pinned."""
    mapped, first = _mapping_of(tensor), tensor.data_ptr()
    regions = [] if mapped is None else mapped.pinned(first, first + tensor.nbytes)
    return sum(end - start for start, end in regions)


def excess() -> int:
    """Return the bytes that are pinned and should be left to other code, where the system limits the total."""
    return 0 if _limited is None else _limited[1].excess()


def _limit() -> PinLimit:
    """Return the limit of the runtime. Tests replace the runtime."""
    global _limited
    runtime = torch.cuda.cudart()
    if _limited is None or _limited[0] is not runtime:
        _limited = runtime, PinLimit()
    return _limited[1]


_limited: tuple[Any, PinLimit] | None = None
"""The runtime of this process, and what it has refused; None: nothing was pinned."""


def unpin(tensor: Tensor, unused: Tensor) -> None:
    """Undo `pin` for memory pinned by one call, and release the pages of `unused`, a part of it.

    No work in flight may use the memory. Released pages are zeros when they are next used.
    """
    mapped, address = _mapping_of(tensor), tensor.data_ptr()
    if mapped is None:
        return  # other processes may use it
    # First, because the GPU would continue to use the old pages, which this process does not see any more.
    mapped.unregister(address, address + tensor.nbytes)
    if unused.nbytes:
        mapped.advise(mmap.MADV_DONTNEED, unused.data_ptr(), unused.nbytes)


def lost(tensor: Tensor) -> bool:
    """Return whether this process is a forked child that lacks memory of the tensor, because its parent pinned it."""
    mapped = _mapping_of(tensor)
    return mapped is not None and mapped.lost(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def pinned_parts(tensor: Tensor) -> list[slice]:
    """Return slices of a 1-D host tensor between the borders of pinned regions, which no CUDA copy may cross."""
    mapped = _mapping_of(tensor)
    first = tensor.data_ptr()
    inside = () if mapped is None else mapped.borders
    inside = inside[bisect.bisect_right(inside, first) : bisect.bisect_left(inside, first + tensor.nbytes)]
    cuts = [0, *((border - first) // tensor.itemsize for border in inside), len(tensor)]
    return [slice(*cut) for cut in itertools.pairwise(cuts)]


def without_borders(first: Tensor, last: Tensor) -> bool:
    """Return whether all memory from one host tensor to another one after it has no border of pinned regions."""
    mapped = _mapping_of(first)
    if mapped is None:
        return False
    start, end = first.data_ptr(), last.data_ptr() + last.nbytes
    borders = mapped.borders
    return end <= mapped.end and bisect.bisect_right(borders, start) == bisect.bisect_left(borders, end)


def changes() -> int:
    """Return a number that rises as memory is pinned or unpinned."""
    return _changes


def pinned_as_one(first: Tensor, last: Tensor) -> bool:
    """Return whether all memory from one host tensor to another one after it is one pinned region, or within one."""
    mapped = _mapping_of(first)
    return mapped is not None and mapped.has(first.data_ptr(), last.data_ptr() + last.nbytes)


def _make_pages(address: int, nbytes: int) -> None:
    """Allocate pages on several threads, because registering does so on one. Their contents stay as they are.

    Linux before 5.14 cannot do this; registering then allocates them.
    """
    starts = range(address, address + nbytes, _SHARE_BYTES)
    if len(starts) == 1:
        return
    threads = ThreadPoolExecutor(min(len(starts), kernel_threads()))
    with contextlib.suppress(RuntimeError), threads as pool:  # the interpreter starts no thread once it ends
        for start in starts:
            length = min(_SHARE_BYTES, address + nbytes - start)
            pool.submit(_libc.madvise, ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


def _unregister(
    runtime: Any,
    on: Callable[[torch.device], Any],
    address: int,
    owner: int,
    device: torch.device,
    regions: dict[int, int],
) -> None:
    regions.pop(address, None)
    if os.getpid() == owner:  # a forked child has neither the pages nor CUDA
        with on(device):
            runtime.cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Launch a kernel here, because the runtime reports a failed call once more at the next launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.uint8, device=device)


@functools.cache
def _warn_of_parts(error: str) -> None:
    logger.warning(
        "host memory that was pinned in parts cannot be pinned as a whole (%s), so it stays in parts: a tensor of "
        "optimizer.state that lies in two of them cannot be copied to a GPU (CUDA error: invalid argument); copy its "
        ".clone() there",
        error,
    )


@functools.cache
def _warn(error: str) -> None:
    logger.warning(
        "pinning host memory failed (%s); copies to and from memory that is not pinned will be slower and not overlap "
        "with computation, and optimizer.explain() says how much is pinned; %s",
        error,
        remedy(),
    )
