"""Sums of the bits of many runs of memory on a GPU, by one launch.

Importing this module imports Triton, which comes with torch for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from dos.kernels.native import Launched, entry_of

_BLOCK, _STEPS = 2048, 16
ELEMENTS = _BLOCK * _STEPS
"""Of a run that share a sum."""
ADDRESS, NUMEL, FIRST, BEHIND = range(4)
"""Columns of the table. FIRST: place of the run's first sum. BEHIND: sums of all runs before it in the table."""
_WORDS, _NUMEL, _FIRST, _BEHIND = (tl.constexpr(n) for n in (BEHIND + 1, NUMEL, FIRST, BEHIND))


def sums_of(numel: Any) -> Any:
    """Return the number of sums of a run of so many elements, or of each run."""
    return -(-numel // ELEMENTS)


def sum_bits(
    rows: np.ndarray,
    send: Callable[[np.ndarray], Tensor],
    sums: Tensor,
    itemsize: int,
    differs: Tensor | None = None,
) -> Launched | None:
    """Queue sums of the bits of runs on the current stream of the current device, which must be the tensors' device.

    Returns what native code can launch again; None: nothing.

    Each sum is of 32,768 elements as integers, each times an odd number that depends on its place, modulo 2**64. So any
    other element changes it, and as a rule any other order.

    Args:
        rows: int64 of shape (runs, 4), none of the runs empty, BEHIND not yet filled in.
        send: copies the rows to the device.
        sums: int64, of which the places that the rows name are written, or compared.
        itemsize: bytes of an element, 2 or 4.
        differs: bool, of which the same places are written: whether the sums are others. None: the sums are written.
    """
    ends = np.cumsum(sums_of(rows[:, NUMEL]))
    rows[1:, BEHIND], rows[0, BEHIND] = ends[:-1], 0
    aligned = not (rows[:, : NUMEL + 1] & 15).any()
    launch: Any = sums_kernel[(int(ends[-1]),)]  # its signature is not the kernel's
    kind = {"WIDE": itemsize == 4, "ALIGNED": aligned, "BLOCK": _BLOCK, "STEPS": _STEPS}
    table, tensors = send(rows), [sums] if differs is None else [sums, differs]
    compiled = launch(table, len(rows), sums, differs, **kind, num_warps=4)
    entry = entry_of(compiled, ["u64", "u32", *["u64"] * len(tensors)])
    if entry is None:
        return None
    arguments = [table.data_ptr(), len(rows), *map(Tensor.data_ptr, tensors)]
    return Launched(entry, int(ends[-1]), arguments, [table, *tensors])


@triton.jit(do_not_specialize=["count"])
def sums_kernel(
    table: tl.tensor,
    count: tl.tensor,
    sums: tl.tensor,
    differs: tl.tensor,
    WIDE: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
) -> None:
    """Write the sum of one block, or whether it differs, if `differs` is not None.

    WIDE: elements have four bytes. ALIGNED: addresses, lengths are multiples of 16.
    """
    block = tl.program_id(0).to(tl.int64)
    low = 0
    high = count - 1
    while low < high:  # the last run that does not begin behind this block
        middle = (low + high + 1) // 2
        behind = tl.load(table + middle * _WORDS + _BEHIND) > block
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    run = table + low * _WORDS
    block -= tl.load(run + _BEHIND)
    numel = tl.load(run + _NUMEL)
    elements = tl.load(run).to(tl.pointer_type(tl.int32 if WIDE else tl.int16))
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
        numel = tl.multiple_of(numel, 16)
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(STEPS):
        index = (block * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(elements + index, mask=index < numel, other=0)
        drawn = index.to(tl.uint32) * 0x9E3779B1
        drawn = (drawn ^ (drawn >> 15)) * 0x85EBCA6B | 1
        total += bits.to(tl.int64) * drawn.to(tl.int64)
    place = tl.load(run + _FIRST) + block
    if differs is None:
        tl.store(sums + place, tl.sum(total, 0))
    else:
        tl.store(differs + place, tl.sum(total, 0) != tl.load(sums + place))
