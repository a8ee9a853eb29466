"""The Adam update on a GPU: by Triton if it works here, else by torch operations."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.kernels.adam import (
    EXP_AVG_SCALE,
    EXP_AVG_SQ_SCALE,
    FLOATS,
    GRAD,
    GRAD_TYPE,
    MAX_EXP_AVG_SQ,
    NUMEL,
    OUT,
    OUT_TYPE,
    PARAM_TYPE,
    PART,
    REST,
    STEP,
    TAKES_WRITTEN,
    AdamArrays,
    AdamStep,
    joined,
    off_ties,
    rest_of,
    taken,
    where_there_is_memory,
)
from dos.kernels.codes import decode_mean, decode_square, encode, rooted
from dos.torch_internals.modes import without_gradients
from dos.torch_internals.operators import tensor_at
from perfmodel.format import BLOCK

logger = logging.getLogger(__name__)

_LOOKED_AT = np.array([15 if column <= EXP_AVG_SQ_SCALE or column == NUMEL else -1 for column in range(STEP + 1)])
"""The bits of the columns by which runs share a launch, besides which are 0."""
MOST_TABLES = 4
"""Of one launch, that stay on the device, or the arrays of so many first rows: the last ones used."""


def gpu_kernel_name() -> str:
    """Return ``"triton"``, or ``"torch"`` where Triton is missing or has failed. Both compute the same bits."""
    return "torch" if _triton_kernel() is None else "triton"


class GpuBatch:
    """Queues the updates of some runs: one launch for all runs of one setting, kind and alignment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: defaultdict[int, SentTable] = defaultdict(functools.partial(SentTable, device))
        self._chosen: tuple[object, list[np.ndarray]] | None = None
        self._known: dict[tuple[bytes, bool], AdamArrays] = {}

    def prepare(self, steps: Sequence[AdamStep], table: np.ndarray) -> Callable[[], None]:
        """Prepare the updates of the runs that have a gradient; return the function that queues them.

        It does not wait for the device.
        """
        # What `_alike` looks at; all but the gradients' addresses is mostly as in the last step.
        key = (table & _LOOKED_AT).tobytes(), (table != 0).tobytes()
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = key, list(_alike(table))
        launches = self._chosen[1]

        def queue() -> None:
            for number, chosen in enumerate(launches):
                self._queue(number, table[chosen], steps[table[chosen[0], STEP]])

        return without_gradients(queue)

    def _queue(self, number: int, rows: np.ndarray, step: AdamStep) -> None:
        """Queue the updates of these rows of the table, by one launch if there is a kernel."""
        kernel = _triton_kernel()
        if kernel is not None:
            try:
                arrays = self._first_arrays(rows[0], step)
                with torch.cuda.device_of(arrays.param):
                    _launch(kernel, arrays, step, rows, self._sent[number].send)
                return
            except Exception as error:  # raised before anything was queued
                if not _can_be_of_the_compiler(error):
                    raise
                _give_up_triton(error)
        for row in rows:
            arrays = self._arrays(row, step)
            _adam_update_torch(arrays, step, takes_written=arrays.out is not None and bool(row[TAKES_WRITTEN]))

    def _first_arrays(self, row: np.ndarray, step: AdamStep) -> AdamArrays:
        """Return the arrays of a launch's first row. Remembered, as to make tensors takes longer than the launch."""
        key = row[:STEP].tobytes(), step.amsgrad
        found = self._known.pop(key, None) or self._arrays(row, step)
        if len(self._known) == MOST_TABLES:
            del self._known[next(iter(self._known))]
        self._known[key] = found
        return found

    def _arrays(self, row: np.ndarray, step: AdamStep) -> AdamArrays:
        """Return the arrays to which a row of the table points, which must have a gradient."""
        numel, addresses = int(row[NUMEL]), [int(address) for address in row[:GRAD_TYPE]]
        moments = (torch.int8, torch.uint8) if addresses[EXP_AVG_SCALE] else (torch.float32, torch.float32)
        grad, param, out = (FLOATS[row[column]] for column in (GRAD_TYPE, PARAM_TYPE, OUT_TYPE))
        param = torch.float32 if addresses[OUT] else param  # then the column is another; see TAKES_WRITTEN
        dtypes = (grad, param, *moments, torch.float32, out, torch.int16, torch.float32, torch.float32)
        lengths = [numel] * (REST + 1) + [numel // BLOCK] * 2  # of scales there is one for each block
        if not step.amsgrad:
            addresses[MAX_EXP_AVG_SQ] = 0
        each = zip(addresses, lengths, dtypes, strict=True)
        return AdamArrays._make(
            tensor_at(at, length, dtype, self._device) if at else None for at, length, dtype in each
        )


class SentTable:
    """Tables of one launch on the device, sent only if they are not there.

    Most often gradients have the same addresses each step, and state is in one of two slots. A table that is sent waits
    on the link behind a piece of state, which takes longer than the update.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = -1
        self._there: dict[bytes, Tensor] = {}

    def send(self, rows: np.ndarray) -> Tensor:
        """Return these rows on the device, sent on the current stream. Does not wait."""
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream().cuda_stream if cuda else 0
        if stream != self._stream:
            # What was sent on another stream may not be there yet when a launch on this one reads it.
            self._there, self._stream = {}, stream
        key = rows.tobytes()
        found = self._there.pop(key, None)
        if found is None:
            here = torch.from_numpy(rows)
            found = here.pin_memory().to(self._device, non_blocking=True) if cuda else here
            if len(self._there) == MOST_TABLES:  # the allocator reuses its memory behind the launch that reads it
                del self._there[next(iter(self._there))]
        self._there[key] = found
        return found


def _alike(table: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the runs that one launch updates: of one setting, types and alignment."""
    # Scales may be misaligned, because no thread loads several at once.
    misaligned = ((table[:, : REST + 1] | table[:, NUMEL, None]) & 15).any(axis=1)
    keys = (table[:, STEP] * 2 + misaligned) * 2 + (table[:, REST] != 0)
    keys = keys * 2 + (table[:, EXP_AVG_SCALE] != 0)
    keys = (keys * 4 + table[:, OUT_TYPE] + 1) * 9
    keys += table[:, GRAD_TYPE] * 3 + table[:, PARAM_TYPE]
    keys[(table[:, GRAD] == 0) | (table[:, NUMEL] == 0)] = -1
    for key in np.unique(keys):
        if key >= 0:
            yield np.flatnonzero(keys == key)


def _launch(kernel: Callable[..., object], *arguments: object) -> None:
    """Launch the kernel. Its first launch loads it, which needs device memory outside of the allocator's cache."""
    try:
        kernel(*arguments)
    except Exception as error:
        if not _out_of_device_memory(error):
            raise
        torch.cuda.empty_cache()
        kernel(*arguments)


def _out_of_device_memory(error: Exception) -> bool:
    """Return whether memory ran out. The driver raises RuntimeError then, "Triton Error [CUDA]: out of memory"."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _can_be_of_the_compiler(error: Exception) -> bool:
    """Return whether the kernel could not be compiled for this machine, and so will not be next time either.

    Triton and the programs that it calls raise many types: its own, RuntimeError without a C compiler,
    CalledProcessError, OSError where its cache cannot be written. So all errors count, except a lack of memory and the
    driver's errors of the device, unless they concern the kernel's code.
    """
    if isinstance(error, MemoryError) or _out_of_device_memory(error):
        return False
    text = str(error)
    return not re.search(r"Triton Error \[|CUDA error|HIP error", text) or bool(re.search("kernel image|PTX", text))


_triton_failed = False


def _triton_kernel() -> Callable[..., None] | None:
    """Return the GPU kernel; None if it cannot be used."""
    return None if _triton_failed else _import_triton_kernel()


@functools.cache
def _import_triton_kernel() -> Callable[..., None] | None:
    try:
        from dos.kernels.triton_kernel import adam_update
    except Exception as error:  # a broken installation may raise any error
        _give_up_triton(error)
        return None
    logger.info("updates on the GPU are done by the Triton kernel")
    return adam_update


def bits_kernel(device: torch.device) -> Any:
    """Return the module of the kernel that sums bits on a GPU; None if it cannot be used on this device."""
    return _tried_bits_kernel(device) if device.type == "cuda" and _triton_kernel() is not None else None


@functools.cache
def _tried_bits_kernel(device: torch.device) -> Any:
    try:
        from dos.kernels import triton_bits

        with torch.cuda.device(device):
            sums, memory = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(8, device=device)
            rows = np.array([[memory.data_ptr(), len(memory), 0, 0]])
            _launch(triton_bits.sum_bits, rows, SentTable(device).send, sums, memory.itemsize)
    except Exception as error:  # raised before anything was queued
        if not _can_be_of_the_compiler(error):
            raise
        _give_up_triton(error)
        return None
    return triton_bits


def _give_up_triton(error: Exception) -> None:
    global _triton_failed
    if not _triton_failed:
        logger.warning(
            "updates on the GPU are done by torch operations, with the same result but many times slower, because the "
            "Triton kernel cannot be used (%s: %s); it needs the triton package, which comes with torch for CUDA, and "
            "a C compiler (set CC to its path)",
            type(error).__name__,
            error,
        )
    _triton_failed = True


def _adam_update_torch(arrays: AdamArrays, step: AdamStep, *, takes_written: bool = False) -> None:
    """Update by torch operations, on any device; wait for the device only where it runs out of memory."""
    for start in range(0, len(arrays.param), PART):
        part = arrays.slice(start, start + PART)
        new = where_there_is_memory(functools.partial(_updated, step, takes_written), *part)
        for array, values in zip(part, new, strict=True):
            if array is not None and values is not None and array is not part.grad:
                array.copy_(values)  # of the same type, which needs no memory


def _updated(step: AdamStep, takes_written: bool, *part: Tensor) -> AdamArrays:
    """Return the result of a run: the formula in torch operations, the reference of csrc/kernels.cpp."""
    # Rounded already, because _fma multiplies in double precision.
    scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction2_sqrt, eps, step_size = (
        step.float32_scalars
    )
    grad, param, m, v, most, out, rest, mean_scale, square_scale = run = AdamArrays(*part)
    g = grad.float() * scale
    p = param.float() if rest is None else joined(param, rest)
    p = taken(p, out) if takes_written and out is not None else p
    if mean_scale is not None and square_scale is not None:
        m, v = decode_mean(m, mean_scale), decode_square(v, square_scale)
    if step.use_l2:
        g = _fma(p, l2, g)
    p = p * decay
    m = _fma(g - m, one_minus_beta1, m) if one_minus_beta1 < 0.5 else _fma(g - m, -beta1, g)
    v = _fma(g * one_minus_beta2, g, v * beta2)
    if mean_scale is None:
        run = run._replace(exp_avg=_canonical(m), exp_avg_sq=_canonical(v))
    if most is not None:
        v = torch.where((v > most) | v.isnan(), v, most)
        run = run._replace(max_exp_avg_sq=_canonical(v))
    root = rooted(v)
    if mean_scale is not None:
        run = run._replace(**encode(m, v, root, step.seed)._asdict())
    denom = _fma(root, inv_bias_correction2_sqrt, torch.full_like(v, eps))
    p = _fma(m / denom, -step_size, p)
    if rest is not None or (out is not None and out.dtype == torch.bfloat16):
        p = off_ties(p)
    if rest is not None:
        run = run._replace(rest=rest_of(p).masked_fill_(p.isnan(), 0))
    return run._replace(param=_canonical(p, param.dtype), out=None if out is None else _canonical(p, out.dtype))


def _canonical(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    values = values.to(dtype)
    return values.masked_fill(values.isnan(), math.nan)


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Return ``a * b + c`` of float32 tensors, rounded once. torch has no such operation.

    The product is exact in double precision. The sum is rounded to odd, so that rounding it again to float32 equals
    rounding the exact value (Boldo and Melquiond 2008).
    """
    product = a.double() * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    to_odd = (error.abs() > 0) & (bits & 1 == 0)  # false where the error is NaN
    return (bits + torch.where((error > 0) == (total > 0), 1, -1) * to_odd).view(torch.float64).float()
