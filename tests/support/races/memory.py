"""What is accessed past torch, and what is released past devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from dos.activations.saved import Saved
from dos.devices import pinned
from dos.gradients.offload import OffloadedGradients
from dos.kernels import update as kernels
from dos.kernels.adam import EXP_AVG_SCALE, GRAD, GRAD_TYPE, NUMEL, OUT, OUT_TYPE, PARAM, PARAM_TYPE, REST, STEP
from dos.state import bit_sums, record
from dos.state.bit_sums import BitSums
from dos.state.disk.space import DiskSpace
from dos.state.host_tensor import HostTensor
from dos.weights import former
from dos.weights.block import Block
from perfmodel.format import BLOCK
from tests.support.races.checker import Checker, here, on_host
from tests.support.races.devices import around


class Kernels:
    """The native kernels, which torch does not know."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def adam_update(self, table: int, count: int, scalars: Any, *rest: Any) -> Any:
        if Checker.active is not None:
            _kernel_accesses(Checker.active, _ranges_of(table, count))
        return self._native.adam_update(table, count, scalars, *rest)

    def sum_of_squares(self, numel: int, address: int, dtype: int, *rest: Any) -> Any:
        if Checker.active is not None and numel:
            _kernel_accesses(Checker.active, [(address, address + numel * _itemsize(dtype), False)])
            if not here.ours:
                Checker.active.wait_for_queue()
        return self._native.sum_of_squares(numel, address, dtype, *rest)


def _kernel_accesses(checker: Checker, ranges: list[tuple[int, int, bool]]) -> None:
    this = checker.this
    if here.ours or all(on_host(first) for first, *_ in ranges):
        checker.access(ranges, "kernel", this, this.clock)
    else:
        checker.access_in_queue(ranges, "kernel")


def _itemsize(dtype: int) -> int:
    return kernels.FLOATS[dtype].itemsize


def _ranges_of(table: int, count: int) -> list[tuple[int, int, bool]]:
    """What the update of so many runs accesses."""

    columns = STEP + 1
    rows = np.ctypeslib.as_array(ctypes.cast(table, ctypes.POINTER(ctypes.c_int64)), (count, columns)).tolist()
    found = []
    for row in rows:
        numel = row[NUMEL]
        if not row[GRAD] or not numel:
            continue
        coded = bool(row[EXP_AVG_SCALE])
        for column, address in enumerate(row[:GRAD_TYPE]):
            if not address:
                continue
            nbytes = numel * (1 if coded else 4)
            if column in (GRAD, PARAM, OUT):
                nbytes = numel * _itemsize(row[{GRAD: GRAD_TYPE, PARAM: PARAM_TYPE, OUT: OUT_TYPE}[column]])
                nbytes = numel * 4 if column == PARAM and row[OUT] else nbytes  # see TAKES_WRITTEN
            elif column == REST:
                nbytes = numel * 2
            elif column >= EXP_AVG_SCALE:
                nbytes = numel // BLOCK * 4
            found.append((address, address + nbytes, column != GRAD))
    return found


def _sharing(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def shared(*args: Any) -> Tensor:
        made = plain(*args)
        return made if Checker.active is None or not made.numel() else Checker.active.share(made)

    return shared


def patch_memory(patch: pytest.MonkeyPatch) -> None:
    """What is accessed past torch, and what is released."""
    _patch_host(patch)
    _patch_saved(patch)
    _patch_disk(patch)


def _patch_host(patch: pytest.MonkeyPatch) -> None:
    """Host memory, the kernels that use it, and what is read of it by address."""
    add_mapping = pinned._add_mapping

    def adding(pages: Any, *rest: Any) -> None:
        if Checker.active is not None:
            checker, first, end = Checker.active, pages.ctypes.data, pages.ctypes.data + pages.nbytes
            checker._do(lambda: checker.shadow.forget(first, end))
        add_mapping(pages, *rest)

    patch.setattr(pinned, "_add_mapping", adding)
    for module, name in ((bit_sums, "tensor_at"), (former, "with_own_storage"), (record, "with_own_storage")):
        patch.setattr(module, name, _sharing(getattr(module, name)))
    patch.setattr(kernels, "_adam", Kernels(kernels._adam))

    @around(patch, HostTensor, "release")
    def release(checker: Checker, plain: Any, self: Any, start: int, stop: int) -> None:
        if self.has(start, stop) and start < stop:
            first, last = self.part(start, stop)
            checker.touch([self.tensor[first:last]], "release of host memory")
        plain(start, stop)

    @around(patch, OffloadedGradients, "take")
    def take(checker: Checker, plain: Any, self: Any, owner: Any, leaf: Tensor, *rest: Any, **more: Any) -> Any:
        if owner.arena.streams and leaf is not owner.leaf:
            checker.wait_for_queue()  # the gradient of a home is the host's, which computes as it is called
        return plain(owner, leaf, *rest, **more)

    @around(patch, BitSums, "other")
    def read_answer(_: Checker, plain: Any, self: Any, *pieces: Any) -> Any:
        here.answered = True  # the answer is on the host: to read it waits for nothing
        try:
            return plain(*pieces)
        finally:
            here.answered = False


def _patch_saved(patch: pytest.MonkeyPatch) -> None:
    """Saved tensors, and copies of blocks."""

    @around(patch, Saved, "save")
    def save(_: Checker, plain: Any, self: Any, *rest: Any) -> Any:
        # User code may write to the tensor, or empty it, meanwhile: then backward does not use the copy.
        here.sends = [self._source]
        try:
            return plain(*rest)
        finally:
            here.sends = None

    @around(patch, Saved, "read")
    def read_saved(checker: Checker, plain: Any, self: Any, tensor: Any) -> Any:
        if self._back is not None:
            checker.use_saved(self._host[1])
        return plain(tensor)

    @around(patch, Saved, "release")
    def release_saved(checker: Checker, plain: Any, self: Any) -> None:
        source, found = self._source, checker.range_of(self._source)
        plain()
        if self._source is not source:
            checker.release(found)

    @around(patch, Saved, "__del__")
    def discard(checker: Checker, plain: Any, self: Any) -> None:
        lost = self._in_flight.get(self._reference)
        found = None if lost is None else checker.range_of(lost[0])
        plain()
        if self._reference not in self._in_flight:
            checker.release(found)

    @around(patch, Block, "__del__")
    def delete(checker: Checker, plain: Any, self: Any) -> None:
        plain()
        if self.filled and self._buffer.untyped_storage().nbytes():
            checker.release(checker.range_of(self._buffer))


def _patch_disk(patch: pytest.MonkeyPatch) -> None:
    """Files, their mappings, and the windows that they are read to and written from."""

    def extent_ranges(checker: Checker, extent: Any, *, writes: bool) -> list[tuple[int, int, bool]]:
        found = []
        for file, offset, nbytes, _ in extent.pieces:
            base = checker.file_address(file) + offset
            found.append((base, base + nbytes, writes))
        return found

    def _windows(buffer: Tensor) -> list[Tensor]:
        return [buffer] if on_host(buffer.data_ptr()) else []  # the disk's own memory, which the host alone uses

    @around(patch, DiskSpace, "write")
    def write(checker: Checker, plain: Any, self: Any, extent: Any, buffer: Tensor) -> None:
        checker.touch(_windows(buffer), "write to disk", writes=False)
        checker.access(extent_ranges(checker, extent, writes=True), "disk", checker.this, checker.this.clock)
        plain(extent, buffer)

    @around(patch, DiskSpace, "read")
    def read(checker: Checker, plain: Any, self: Any, extent: Any, buffer: Tensor) -> None:
        checker.touch(_windows(buffer), "read from disk")
        ranges = extent_ranges(checker, extent, writes=False)
        ranges += [(first, first + nbytes, False) for first, nbytes in extent.mapped.items()]
        checker.access(ranges, "disk", checker.this, checker.this.clock)
        plain(extent, buffer)

    @around(patch, DiskSpace, "expose")
    def expose(
        checker: Checker, plain: Any, self: Any, extent: Any, start: int, nbytes: int, address: int, **more: bool
    ) -> None:
        plain(extent, start, nbytes, address, **more)
        ranges = extent_ranges(checker, extent, writes=False)
        mapped = (address, address + nbytes, True)
        checker.access([*ranges, mapped], "mapping of a file", checker.this, checker.this.clock)

    @around(patch, DiskSpace, "hide")
    def hide(checker: Checker, plain: Any, self: Any, extent: Any) -> None:
        mapped = [(address, address + nbytes, True) for address, nbytes in extent.mapped.items()]
        checker.access(mapped, "end of the mapping of a file", checker.this, checker.this.clock)
        plain(extent)
