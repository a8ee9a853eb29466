"""Compares the Triton kernel under Triton's interpreter with the C++ kernels, to the bit; a program of its own.

The interpreter computes with numpy, which rounds to nearest even as GPUs do, but has no fused
multiply-add and makes 0.0 of an argument of -0.0. It is given the one and cured of the other, so
that what is compared is the kernel: every operation, its order, and what becomes of special values.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from dos.kernels import triton_bits
from dos.kernels.adam import taken
from dos.kernels.gpu_update import GpuBatch, _fma, gpu_kernel_name
from dos.kernels.update import AdamArrays, AdamBatch, AdamStep
from tests.support.arrays import (
    FLOATS,
    L2,
    NOTHING,
    STEPS,
    assert_alike,
    assert_same_bits,
    clone,
    mixed_arrays,
    random_arrays,
    random_bits,
    splitting,
    ties,
    update,
)
from tests.support.coded import PARAMETERS, coded_arrays


def exact_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    x_, y_, z_ = (torch.from_numpy(np.ascontiguousarray(t.data)) for t in (x, y, z))
    return interpreter.TensorHandle(_fma(x_, y_, z_).numpy(), x.dtype.scalar)


scalar_constant = TritonSemantic.scalar_constant


def signed_constant(semantic: Any, value: Any, dtype: tl.dtype) -> Any:
    if dtype == tl.float32:
        return semantic.tensor(semantic.builder.get_fp32(value), dtype)
    return scalar_constant(semantic, value, dtype)


def interpreted(runs: list[list[Tensor | None]], step: AdamStep, *, takes_written: bool = False) -> None:
    batch = AdamBatch([AdamArrays(*run) for run in runs])
    if takes_written:
        batch.take_written()
    GpuBatch(torch.device("cpu")).prepare([step], batch._table)()
    assert gpu_kernel_name() == "triton"


def compare(
    ours: list[AdamArrays], theirs: list[AdamArrays], step: AdamStep, same: Callable[[AdamArrays, AdamArrays], None]
) -> None:
    """One launch for all runs here, against the C++ kernel on their twins."""
    interpreted([list(run) for run in ours], step)
    for run, expected in zip(ours, theirs, strict=True):
        update(list(expected), step)
        same(run, expected)


def main() -> None:
    np.seterr(all="ignore")
    interpreter.InterpreterBuilder.create_fma = exact_fma
    TritonSemantic.scalar_constant = signed_constant
    low = [torch.bfloat16, torch.float16]
    outputs = [(torch.float32, out) for out in (*low, torch.float32, None)] + [(param, None) for param in low]
    compared = 0
    for seed, step in enumerate(STEPS):
        for grad in FLOATS:
            for param, out in outputs:
                for numel in (0, 1, 1024, 2500):
                    start = random_arrays(numel, step, grad, param, out, seed)
                    ours, expected = clone(start), clone(start)
                    interpreted([ours], step)
                    update(expected, step)
                    assert_same_bits(ours, expected)
                    compared += 1
                batch = [random_arrays(n, step, grad, param, out, seed) for n in (3, 0, 1024, 48, 2500, 1, 1025, 4096)]
                ours = [clone(run) for run in batch]
                interpreted(ours, step)
                for mine, expected in zip(ours, batch, strict=True):
                    update(expected, step)
                    assert_same_bits(mine, expected)
                compared += 1
    for out in low:
        start = [torch.zeros(2**16), ties(), torch.zeros(2**16), torch.zeros(2**16), None]
        start.append(torch.zeros(2**16, dtype=out))
        ours, expected = clone(start), clone(start)
        interpreted([ours], NOTHING)
        update(expected, NOTHING)
        assert_same_bits(ours, expected)
        compared += 1
    for seed, step in enumerate([*STEPS, L2]):
        for grad in FLOATS:
            mixed = [mixed_arrays(n, step, grad, seed) for n in (2500, 3, 0, 1024, 48, 1, 1025, 4096)]
            for chosen in (mixed[:1], mixed[1:]):
                compare([splitting(run) for run in chosen], chosen, step, assert_alike)
                compared += 1
    for seed, step in enumerate(step for step in [*STEPS, L2] if not step.amsgrad):
        for grad in FLOATS:
            for kind in PARAMETERS:
                coded = [coded_arrays(n, grad, *kind, seed) for n in (8192, 128, 0, 1024, 384, 1152, 4096)]
                for chosen in (coded[:1], coded[1:]):
                    compare([AdamArrays(*clone(run)) for run in chosen], chosen, step, assert_same_bits)
                    compared += 1
    for out in FLOATS:  # of which user code has written every third element
        written = [mixed_arrays(n, STEPS[0], torch.bfloat16, n)._replace(out=None) for n in (2500, 1024, 3)]
        written = [run._replace(out=run.param.to(out, copy=True)) for run in written]
        for run in written:
            run.out[::3] = random_bits(len(run.out[::3]), out, torch.Generator().manual_seed(1))
        for runs in (written[:1], written):
            ours = [clone(run) for run in runs]
            interpreted(ours, STEPS[0], takes_written=True)
            for mine, run in zip(ours, runs, strict=True):
                expected = AdamArrays(*clone(run))
                expected.param.copy_(taken(expected.param, expected.out))
                update(list(expected), STEPS[0])
                assert_same_bits(mine, expected)
            compared += 1
    print(f"{compared} updates compared")


def changes(of: np.ndarray) -> list[np.ndarray]:
    """Ways in which user code may write to a parameter of 16 or 32 bits."""
    sign = np.array(1 << (8 * of.itemsize - 1), np.uint64).astype(of.dtype.str.replace("i", "u")).view(of.dtype)
    one, last, swapped = of.copy(), of.copy(), of.copy()
    one[len(of) // 3] ^= 1
    last[-1] ^= sign
    swapped[: len(of) // 2], swapped[-(len(of) // 2) :] = of[-(len(of) // 2) :], of[: len(of) // 2]
    return [one, last, of ^ sign, np.zeros_like(of), of[::-1].copy(), swapped]


def sums(runs: list[np.ndarray]) -> np.ndarray:
    """The sums of the bits of runs, by one launch; between them is a place that nothing may write."""
    counts = [triton_bits.sums_of(len(run)) + 1 for run in runs]
    firsts = np.cumsum([0, *counts])
    found = torch.full((int(firsts[-1]),), 7, dtype=torch.int64)
    rows = np.array([(run.ctypes.data, len(run), first, 0) for run, first in zip(runs, firsts, strict=False)])
    triton_bits.sum_bits(rows, torch.from_numpy, found, runs[0].itemsize)
    assert (found[firsts[1:] - 1] == 7).all()
    return np.delete(found.numpy(), firsts[1:] - 1)


def others(runs: list[np.ndarray], before: np.ndarray) -> np.ndarray:
    """Whether the sums are others than these, by one launch."""
    counts = [triton_bits.sums_of(len(run)) for run in runs]
    rows = np.array([(run.ctypes.data, len(run), sum(counts[:n]), 0) for n, run in enumerate(runs)])
    found = torch.ones(len(before), dtype=torch.bool)
    triton_bits.sum_bits(rows, torch.from_numpy, torch.from_numpy(before), runs[0].itemsize, found)
    return found.numpy()


def sums_of_bits() -> None:
    compared = 0
    for dtype in (np.int16, np.int32):
        drawn = np.random.default_rng(0).integers(-(2**15), 2**15, 3 * triton_bits.ELEMENTS).astype(dtype)
        for start in (0, 1, 8):
            runs = [drawn[start : start + n].copy() for n in (5, triton_bits.ELEMENTS, triton_bits.ELEMENTS + 7, 2048)]
            runs = [np.concatenate([drawn[:start], run])[start:] for run in runs]  # at any address
            before = sums(runs)
            assert len(before) == 5
            assert (sums([run.copy() for run in runs]) == before).all()
            assert not others(runs, before).any()
            for number, run in enumerate(runs):
                for other in changes(run):
                    written = [other if n == number else each for n, each in enumerate(runs)]
                    after = sums(written)
                    assert (after != before).any()
                    if not compared % len(changes(run)):  # of each run; the interpreter takes its time
                        assert (others(written, before) == (after != before)).all()
                    compared += 1
    print(f"{compared} changes seen")


main()
sums_of_bits()
