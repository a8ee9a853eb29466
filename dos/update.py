"""The Adam update of one flat range, on the CPU (C++ extension) or on a GPU (Triton, or torch where that is missing).

The formula is AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2) as
``torch.optim.AdamW`` writes it, in float32 with round to nearest, fused multiply-adds and IEEE square root and
division in one fixed order. So a result depends, to the bit, on neither instruction set, thread count, device nor on
how a range was split. Against ``torch.optim.AdamW`` it differs by a few units in the last place. Every NaN written is
the same quiet NaN.

The float32 master of a bfloat16 parameter is never a tie: where the lower 16 bits of a new master
come out as exactly 0x8000, halfway between two bfloat16, it moves one unit in the last place towards
the even one, to which the parameter is rounded. So the parameter, which is an upper half, and the
master's lower half together give the master back::

    bits = (upper << 16 | lower) - (lower > 0x8000 ? 0x10000 : 0)

It changes 65,280 of the 2**32 floats, none of them to another bfloat16, and holds wherever state is
kept and whoever updates it. What a user writes into a master in place is used as it is.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from dos.adam import AdamArrays, AdamStep
from dos.extension import load_extension
from dos.threads import kernel_threads

_adam = load_extension()

logger = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = {dtype: index for index, dtype in enumerate(_FLOATS)}  # the order of DType in csrc/adam.h


def instruction_sets() -> list[str]:
    """The instruction sets that can be asked for here, best first."""
    return _adam.instruction_sets()


def adam_update(arrays: AdamArrays, *, step: AdamStep, threads: int = 0, isa: str | None = None) -> None:
    """Update ``param`` and its state in place, in one pass over memory.

    Args:
        threads: at most so many on the CPU; 0 stands for :func:`dos.threads.kernel_threads`.
        isa: one of :func:`instruction_sets`, None for the best.

    Raises:
        TypeError: an array is not a dense tensor, or of a dtype not listed in :class:`AdamArrays`.
        ValueError: a tensor of another length or device, not 1-D, not contiguous or not in memory as it is (lazily
            negated); ``max_exp_avg_sq`` given without amsgrad or missing with it; unknown ``isa``; negative
            ``threads``.
    """
    grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, out = arrays
    if step.amsgrad != (max_exp_avg_sq is not None):
        raise ValueError(
            f"max_exp_avg_sq: expected {'a tensor' if step.amsgrad else 'None'} with amsgrad={step.amsgrad}"
        )
    _check("param", param, _FLOATS, param)
    _check("grad", grad, _FLOATS, param)
    _check("exp_avg", exp_avg, (torch.float32,), param)
    _check("exp_avg_sq", exp_avg_sq, (torch.float32,), param)
    if max_exp_avg_sq is not None:
        _check("max_exp_avg_sq", max_exp_avg_sq, (torch.float32,), param)
    if out is not None:
        if param.dtype != torch.float32:
            raise TypeError(f"low_precision_out: expected only beside a float32 param, found {param.dtype}")
        _check("low_precision_out", out, (torch.bfloat16, torch.float16), param)

    if param.is_cpu:
        addresses = (
            grad.data_ptr(),
            param.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            0 if max_exp_avg_sq is None else max_exp_avg_sq.data_ptr(),
            0 if out is None else out.data_ptr(),
        )
        types = _TYPES[grad.dtype], _TYPES[param.dtype], 0 if out is None else _TYPES[out.dtype]
        _adam.adam_update_at(param.numel(), addresses, types, step.scalars, step.use_l2, _threads(threads), isa)
    else:
        with torch.no_grad():
            _adam_update_on_gpu(arrays, step)


def off_ties(master: Tensor) -> Tensor:
    """float32 values as the update leaves them in masters of bfloat16 parameters; a copy."""
    bits = master.view(torch.int32)
    return torch.where(bits & 0xFFFF == 0x8000, bits + (bits >> 15 & 2) - 1, bits).view(torch.float32)


def gpu_kernel_name() -> str:
    """``"triton"``, or ``"torch"`` where Triton is missing or has failed. Both are written to give the same bits."""
    return "torch" if _triton_kernel() is None else "triton"


def accumulate(src: Tensor, dst: Tensor, *, overwrite: bool = False, threads: int = 0, isa: str | None = None) -> None:
    """``dst += src``, or ``dst = src`` if ``overwrite``; 1-D contiguous tensors of one length on one device.

    ``src`` is float32, bfloat16 or float16, ``dst`` is float32. ``threads``, ``isa`` and the errors raised are those
    of :func:`adam_update`.
    """
    _check("dst", dst, (torch.float32,), dst)
    _check("src", src, _FLOATS, dst)
    if dst.is_cpu:
        _adam.accumulate(src.detach(), dst.detach(), overwrite, _threads(threads), isa)
    else:
        with torch.no_grad():
            dst.copy_(src) if overwrite else dst.add_(src)


def sum_of_squares(src: Tensor, *, threads: int = 0, isa: str | None = None) -> float:
    """The sum of squares of a 1-D contiguous CPU tensor (float32, bfloat16 or float16), in double precision.

    The order of summation is fixed, so the result depends on the values alone. ``threads``, ``isa`` and the errors
    raised are those of :func:`adam_update`.
    """
    _check("src", src, _FLOATS, src)
    return _adam.sum_of_squares(src.detach(), _threads(threads), isa)


def _adam_update_on_gpu(arrays: AdamArrays, step: AdamStep) -> None:
    """Queue the update without waiting for it: by Triton if it works here, else by torch."""
    kernel = _triton_kernel()
    if kernel is not None:
        try:
            with torch.cuda.device_of(arrays.param):
                _launch(kernel, arrays, step)
            return
        except Exception as error:  # raised before anything was queued
            if not _can_be_of_the_compiler(error):
                raise
            _give_up_triton(error)
    _adam_update_torch(arrays, step)


def _launch(kernel: Callable[..., None], *arguments: object) -> None:
    """Launch the kernel. Its first launch loads it, which needs memory that is not the allocator's."""
    try:
        kernel(*arguments)
    except Exception as error:
        if not _out_of_device_memory(error):
            raise
        torch.cuda.empty_cache()
        kernel(*arguments)


def _out_of_device_memory(error: Exception) -> bool:
    """Whether the device had no memory. The driver says so in a RuntimeError, "Triton Error [CUDA]: out of memory"."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _can_be_of_the_compiler(error: Exception) -> bool:
    """Whether the kernel could not be made for this machine, so that it will not be next time either.

    Triton and what it calls raise many types: its own, RuntimeError without a C compiler, CalledProcessError, OSError
    where its cache cannot be written. So all counts as that but a want of memory and what the driver reports of the
    device, unless that is of the kernel's code.
    """
    if isinstance(error, MemoryError) or _out_of_device_memory(error):
        return False
    text = str(error)
    return not re.search(r"Triton Error \[|CUDA error|HIP error", text) or bool(re.search("kernel image|PTX", text))


_triton_failed = False


def _triton_kernel() -> Callable[..., None] | None:
    """The GPU kernel; None if it cannot be used."""
    return None if _triton_failed else _import_triton_kernel()


@functools.cache
def _import_triton_kernel() -> Callable[..., None] | None:
    try:
        from dos.triton_kernel import adam_update
    except Exception as error:  # whatever a broken installation raises
        _give_up_triton(error)
        return None
    logger.info("updates on the GPU are done by the Triton kernel")
    return adam_update


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


def _adam_update_torch(arrays: AdamArrays, step: AdamStep) -> None:
    """The formula in torch operations, on any device, without waiting for it: the reference of csrc/kernels.cpp."""
    # Rounded already, because _fma multiplies in double precision.
    scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction2_sqrt, eps, step_size = (
        step.float32_scalars
    )
    for start in range(0, len(arrays.param), _CHUNK):
        grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, out = arrays.slice(start, start + _CHUNK)
        g = grad.float() * scale
        p = param.float()
        m = exp_avg
        v = exp_avg_sq
        if step.use_l2:
            g = _fma(p, l2, g)
        p = p * decay
        m = _fma(g - m, one_minus_beta1, m) if one_minus_beta1 < 0.5 else _fma(g - m, -beta1, g)
        v = _fma(g * one_minus_beta2, g, v * beta2)
        _store(m, exp_avg)
        _store(v, exp_avg_sq)
        if max_exp_avg_sq is not None:
            v = torch.where((v > max_exp_avg_sq) | v.isnan(), v, max_exp_avg_sq)
            _store(v, max_exp_avg_sq)
        # torch's float32 square root is not correctly rounded on every processor; by way of double precision it is.
        denom = _fma(v.double().sqrt().float(), inv_bias_correction2_sqrt, torch.full_like(v, eps))
        p = _fma(m / denom, -step_size, p)
        if out is not None and out.dtype == torch.bfloat16:
            p = off_ties(p)
        _store(p, param)
        if out is not None:
            _store(p, out)


_CHUNK = 1 << 22  # elements; bounds the memory of the double-precision intermediates


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors, rounded once. torch has no such operation.

    The product is exact in double precision. The sum is rounded to odd, after which rounding it again to float32 gives
    what rounding the exact value would (Boldo and Melquiond 2008).
    """
    product = a.double() * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    to_odd = (error.abs() > 0) & (bits & 1 == 0)  # false where the error is NaN
    return (bits + torch.where((error > 0) == (total > 0), 1, -1) * to_odd).view(torch.float64).float()


def _store(value: Tensor, destination: Tensor) -> None:
    destination.copy_(value)
    destination.masked_fill_(destination.isnan(), math.nan)


def _threads(threads: int) -> int:
    if threads < 0:
        raise ValueError(f"threads: expected at least 1, or 0 for what dos.threads finds, found {threads}")
    return threads or kernel_threads()


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise unless ``tensor`` is dense, 1-D, contiguous, of a dtype listed, of the length and device of ``like``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, found {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, found {tensor.layout}")
    if tensor.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, found shape {tuple(tensor.shape)}")
    if tensor.numel() != like.numel():
        raise ValueError(f"{name}: expected {like.numel()} elements, found {tensor.numel()}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, found {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, found stride {tensor.stride(0)}")
    if tensor.is_neg() or tensor._is_zerotensor():
        # The kernels read memory, which does not hold what such a tensor stands for.
        raise ValueError(f"{name}: expected values in memory, found a lazily negated or zero tensor; use .clone()")
