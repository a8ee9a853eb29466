"""The Adam update on a GPU: the formula of csrc/kernels.cpp, operation for operation, in one pass over memory.

Its results are those of the C++ kernels to the bit, because every operation is correctly rounded, and fused only where
the formula says so: launched with ``enable_fp_fusion=False``, Triton writes ``mul.rn``, ``add.rn`` and ``sub.rn``,
which the PTX specification forbids to contract. Square root and division are written in PTX, because ``tl.sqrt_rn`` and
``tl.div_rn`` of Triton 3.5 and older flush denormals. No other operation flushes them. For ROCm, which has no PTX,
square root and division are Triton's.

Importing this module imports Triton, which comes with torch for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dos.kernels.adam import NUMEL, REST, STEP, TAKES_WRITTEN, AdamArrays, AdamStep
from perfmodel.format import BLOCK as SCALED

_BLOCK = 1024  # elements for one program: eight for each thread, so that 16-bit loads are 16 bytes wide
_WARPS = 4
_ZERO = tl.constexpr(0x4B400000 >> 12)  # a root's level of 0
_WORDS = tl.constexpr(STEP + 1)
_NUMEL = tl.constexpr(NUMEL)
_SCALED = tl.constexpr(SCALED)  # elements that share a scale
_FIRST = tl.constexpr(STEP)  # on the device this column has the number of the run's first block


def adam_update(arrays: AdamArrays, step: AdamStep, rows: np.ndarray, send: Callable[[np.ndarray], Tensor]) -> None:
    """Queue the update on the current stream of the current device, which must be the tensors' device.

    :func:`dos.kernels.update.adam_update` has checked the arrays. The scalars are float32 already, so that
    passing them rounds nothing.

    Args:
        rows: of runs of one kind, none of them empty, of which ``arrays`` is the first.
        send: copies the rows to the device. For one run nothing is sent, because a copy could wait for a transfer of
            state.
    """
    scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction2_sqrt, eps, step_size = (
        step.float32_scalars
    )
    lerp_from_grad = not one_minus_beta1 < 0.5
    numel, count, table, aligned = len(arrays.param), 0, None, False
    blocks, takes_written = triton.cdiv(numel, _BLOCK), arrays.out is not None and bool(rows[0, TAKES_WRITTEN])
    if len(rows) > 1:
        ends = np.cumsum(-(-rows[:, NUMEL] // _BLOCK))
        rows[1:, STEP], rows[0, STEP] = ends[:-1], 0
        aligned = not (rows[:, [*range(REST + 1), NUMEL]] & 15).any()
        # Each run has its own length; always a number of the same type and alignment, so that Triton compiles once.
        numel, blocks, count, table = _BLOCK, int(ends[-1]), len(rows), send(rows)
        # The kernel reads only the types of these, but Triton compiles anew for pointers of other alignment.
        arrays = AdamArrays._make(None if array is None else table.view(array.dtype) for array in arrays)
    launch: Any = adam_kernel[(blocks,)]  # its signature is not the kernel's
    launch(
        *arrays,
        numel,
        table,
        count,
        scale,
        l2,
        decay,
        -beta1 if lerp_from_grad else one_minus_beta1,
        beta2,
        one_minus_beta2,
        inv_bias_correction2_sqrt,
        eps,
        -step_size,
        step.seed - (step.seed >> 31 << 32),  # signed, so that its type is the same in every step
        ALIGNED=aligned,
        USE_L2=step.use_l2,
        LERP_FROM_GRAD=lerp_from_grad,
        TAKES_WRITTEN=takes_written,
        PTX=arrays.param.is_cuda and torch.version.hip is None,  # ROCm's tensors say that they are CUDA's
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


# Without specialisation, which compiles anew for multiples of 16 and for 1: these arguments differ between steps.
@triton.jit(do_not_specialize=["count", "seed", "exp_avg_scale", "exp_avg_sq_scale"])
def adam_kernel(
    grad: tl.tensor,
    param: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor,
    out: tl.tensor,
    rest: tl.tensor,
    exp_avg_scale: tl.tensor,
    exp_avg_sq_scale: tl.tensor,
    numel: tl.tensor,
    table: tl.tensor,
    count: tl.tensor,
    grad_scale: tl.tensor,
    l2: tl.tensor,
    decay: tl.tensor,
    lerp_weight: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    inv_bias_correction2_sqrt: tl.tensor,
    eps: tl.tensor,
    minus_step_size: tl.tensor,
    seed: tl.tensor,
    ALIGNED: tl.constexpr,  # noqa: N803
    USE_L2: tl.constexpr,  # noqa: N803
    LERP_FROM_GRAD: tl.constexpr,  # noqa: N803
    TAKES_WRITTEN: tl.constexpr,  # noqa: N803
    PTX: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Update elements [0, numel) of arrays on the device. max_exp_avg_sq, out, rest, scales: None where missing.

    table: of `count` runs, which are updated instead; the arrays then give only their types.
    ALIGNED: whether all lengths, and all addresses except those of scales, in the table are multiples of 16.
    TAKES_WRITTEN: whether masters take over what user code has written to `out`; see dos/kernels/adam.py.
    PTX: False under Triton's interpreter and on ROCm, which know no PTX.
    """
    block = tl.program_id(0).to(tl.int64)
    if table is not None:
        run = _run_of(block, table, count)
        block -= tl.load(run + _FIRST)
        numel = tl.load(run + _NUMEL)
        numel = tl.multiple_of(numel, 16) if ALIGNED else numel
        grad, param = _pointer(run, 0, grad, ALIGNED), _pointer(run, 1, param, ALIGNED)
        exp_avg, exp_avg_sq = _pointer(run, 2, exp_avg, ALIGNED), _pointer(run, 3, exp_avg_sq, ALIGNED)
        if max_exp_avg_sq is not None:
            max_exp_avg_sq = _pointer(run, 4, max_exp_avg_sq, ALIGNED)
        if out is not None:
            out = _pointer(run, 5, out, ALIGNED)
        if rest is not None:
            rest = _pointer(run, 6, rest, ALIGNED)
        if exp_avg_scale is not None:
            exp_avg_scale = _pointer(run, 7, exp_avg_scale, False)
            exp_avg_sq_scale = _pointer(run, 8, exp_avg_sq_scale, False)
    index = block * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    g = _widened(tl.load(grad + index, mask=mask, other=0.0)) * grad_scale
    p = _master(param, rest, out, index, mask, TAKES_WRITTEN)
    scaled = block * (BLOCK // _SCALED) + tl.arange(0, BLOCK // _SCALED)
    in_range = scaled * _SCALED < numel
    m, v = _moments(exp_avg + index, exp_avg_sq + index, mask, exp_avg_scale, exp_avg_sq_scale, scaled, in_range)
    g = tl.fma(p, l2, g) if USE_L2 else g
    p = p * decay
    m = tl.fma(g - m, lerp_weight, g if LERP_FROM_GRAD else m)
    v = tl.fma(g * one_minus_beta2, g, v * beta2)
    if exp_avg_scale is None:
        tl.store(exp_avg + index, _canonical(m), mask=mask)
        tl.store(exp_avg_sq + index, _canonical(v), mask=mask)
    if max_exp_avg_sq is not None:
        v = _maximum(v, tl.load(max_exp_avg_sq + index, mask=mask, other=0.0))
        tl.store(max_exp_avg_sq + index, _canonical(v), mask=mask)
    root = _sqrt(v, PTX)
    if exp_avg_scale is not None:
        scale, root_scale, levels, root_levels = _codes(m, root, _drawn(m, v, index, seed), PTX)
        tl.store(exp_avg_scale + scaled, scale, mask=in_range)
        tl.store(exp_avg + index, levels, mask=mask)
        tl.store(exp_avg_sq_scale + scaled, root_scale, mask=in_range)
        tl.store(exp_avg_sq + index, root_levels, mask=mask)
    denominator = tl.fma(root, inv_bias_correction2_sqrt, eps)
    _store_master(_canonical(tl.fma(_divide(m, denominator, PTX), minus_step_size, p)), param, rest, out, index, mask)


@triton.jit
def _run_of(block: tl.tensor, table: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the address of the last run in the table that does not begin behind the block."""
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        behind = tl.load(table + middle * _WORDS + _FIRST) > block
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    return table + low * _WORDS


@triton.jit
def _pointer(run: tl.tensor, word: tl.constexpr, like: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:  # noqa: N803
    address = tl.load(run + word).to(like.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _master(
    param: tl.tensor,
    rest: tl.tensor,
    out: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    TAKES_WRITTEN: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    p = _widened(tl.load(param + index, mask=mask, other=0.0))
    if rest is not None:
        p = _joined(p, tl.load(rest + index, mask=mask, other=0))
    if TAKES_WRITTEN:
        p = _taken(p, tl.load(out + index, mask=mask, other=0.0))
    return p


@triton.jit
def _moments(
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    mask: tl.tensor,
    exp_avg_scale: tl.tensor,
    exp_avg_sq_scale: tl.tensor,
    scaled: tl.tensor,
    in_range: tl.tensor,
) -> tl.tensor:
    m, v = tl.load(exp_avg, mask=mask, other=0), tl.load(exp_avg_sq, mask=mask, other=0)
    if exp_avg_scale is not None:
        m = _times(m.to(tl.float32), tl.load(exp_avg_scale + scaled, mask=in_range, other=0.0))
        v = _times(v.to(tl.float32) + 1.0, tl.load(exp_avg_sq_scale + scaled, mask=in_range, other=0.0))
        v = v * v
    return m, v


@triton.jit
def _maximum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Return the larger of each two, and NaN where x is."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _store_master(
    p: tl.tensor, param: tl.tensor, rest: tl.tensor, out: tl.tensor, index: tl.tensor, mask: tl.tensor
) -> None:
    if out is not None:
        if out.dtype.element_ty == tl.bfloat16:
            p = _off_tie(p)
        tl.store(out + index, _rounded(p, out.dtype.element_ty), mask=mask)
    if rest is not None:
        p = _off_tie(p)
        tl.store(rest + index, p.to(tl.uint32, bitcast=True).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    tl.store(param + index, _rounded(p, param.dtype.element_ty), mask=mask)


@triton.jit
def _times(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return each element times the scale of its block."""
    return tl.reshape(tl.reshape(x, (scale.shape[0], _SCALED)) * scale[:, None], (x.shape[0],))


@triton.jit
def _drawn(m: tl.tensor, v: tl.tensor, index: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return the bits by which each element is rounded to a level; see dos/kernels/codes.py."""
    both = m.to(tl.uint32, bitcast=True) ^ v.to(tl.uint32, bitcast=True)
    salt = (index % _SCALED).to(tl.uint32) * 0x85EBCA6B ^ seed.to(tl.uint32, bitcast=True)
    return (both ^ salt) * 0x9E3779B1


@triton.jit
def _codes(m: tl.tensor, root: tl.tensor, drawn: tl.tensor, PTX: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Return the scales of both moments and their levels; see dos/kernels/codes.py for all of it."""
    most, most_root = _largest(m), _largest(root)
    finite = (most < 0x7F7FFFF9) & (most_root < 0x7F800000)
    scale = _mean_scale(most, finite, PTX)
    m_levels = _levels(m, scale, (drawn >> 16) & 0x7F, 7, PTX).to(tl.int8)
    root_scale = _root_scale(most_root, finite)
    root_levels = _levels(root, root_scale, drawn >> 20, 12, PTX)
    return scale, root_scale, m_levels, (tl.maximum(root_levels, _ZERO + 1) - 1).to(tl.uint8)


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    """Return the bits of the largest magnitude in each block."""
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.reshape(magnitudes, (x.shape[0] // _SCALED, _SCALED)), axis=1)


@triton.jit
def _mean_scale(most: tl.tensor, finite: tl.tensor, PTX: tl.constexpr) -> tl.tensor:  # noqa: N803
    least = _divide(most.to(tl.float32, bitcast=True), tl.full(most.shape, 127.0, tl.float32), PTX)
    bits = (least.to(tl.int32, bitcast=True) + 0x7F) & 0x7FFFFF80
    bits = tl.where(bits < 0x03800000, 0, bits)  # 2**-120
    return tl.where(finite, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _root_scale(most: tl.tensor, finite: tl.tensor) -> tl.tensor:
    bits = (most.to(tl.float32, bitcast=True) * (1 / 256)).to(tl.int32, bitcast=True)
    return tl.where(finite, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _levels(x: tl.tensor, scale: tl.tensor, drawn: tl.tensor, LOG: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Return x in levels of the scale: rounded to the nearest 2**-LOG of one, then down or up by `drawn`.

    Only the lowest byte of the result counts.
    """
    parts = tl.full(scale.shape, 1.0, tl.float32) * (1 << LOG)
    factor = tl.where(scale > 0, _divide(parts, scale, PTX), 0.0)
    finite = tl.reshape(tl.where((scale == scale)[:, None], tl.reshape(x, (scale.shape[0], _SCALED)), 0.0), x.shape)
    near = _times(finite, factor) + 12582912.0  # 1.5 * 2**23, which leaves no bits below one
    return (near.to(tl.uint32, bitcast=True) + drawn) >> LOG


@triton.jit
def _canonical(x: tl.tensor) -> tl.tensor:
    # On the bits, because compilers may assume that all NaN are alike, and the hardware's NaN differs from ours.
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _off_tie(x: tl.tensor) -> tl.tensor:
    """Move ties: a master of a bfloat16 parameter is never one; see csrc/adam.h."""
    bits = x.to(tl.uint32, bitcast=True)
    towards_even = tl.where((bits & 0x10000) != 0, bits + 1, bits - 1)
    return tl.where((bits & 0xFFFF) == 0x8000, towards_even, bits).to(tl.float32, bitcast=True)


@triton.jit
def _joined(upper: tl.tensor, rest: tl.tensor) -> tl.tensor:
    """Return a master from its upper half, widened, and its lower half; see csrc/adam.h."""
    rounded = upper.to(tl.int32, bitcast=True)
    bits = rounded + rest.to(tl.int32)
    return tl.where((bits ^ rounded) < 0, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def _taken(master: tl.tensor, parameter: tl.tensor) -> tl.tensor:
    rounded = _rounded(_canonical(master), parameter.dtype)
    written = _widened(parameter)
    if parameter.dtype == tl.float32:
        kept = rounded.to(tl.uint32, bitcast=True) == parameter.to(tl.uint32, bitcast=True)
    else:
        kept = rounded.to(tl.uint16, bitcast=True) == parameter.to(tl.uint16, bitcast=True)
        if parameter.dtype == tl.bfloat16:
            lower = master.to(tl.uint32, bitcast=True).to(tl.uint16).to(tl.int16, bitcast=True)
            written = _joined(written, lower)
    return tl.where(kept, master, written)


@triton.jit
def _widened(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.bfloat16:  # older compilers have no conversion of it for older GPUs
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  (the branch that is not taken must not be compiled)
        return x.to(tl.float32)


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round a canonical float32 to another type, to nearest even; NaN stay canonical, unlike the hardware's."""
    bits = x.to(tl.uint32, bitcast=True)
    if dtype == tl.bfloat16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:  # noqa: RET505
        # On the bits of the result: for a test of `bits` LLVM leaves the constant out, because all NaN are alike to it.
        half = x.to(tl.float16).to(tl.uint16, bitcast=True)
        return tl.where((half & 0x7FFF) > 0x7C00, 0x7E00, half).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return x


@triton.jit
def _sqrt(x: tl.tensor, PTX: tl.constexpr) -> tl.tensor:  # noqa: N803
    if PTX:
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return tl.sqrt_rn(x)


@triton.jit
def _divide(x: tl.tensor, y: tl.tensor, PTX: tl.constexpr) -> tl.tensor:  # noqa: N803
    if PTX:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.div_rn(x, y)
