"""Moments in codes of 8 bits: every kernel writes what the definition says, and decoding gives the codes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.codes import Codes, decode_mean, decode_square, encode
from dos.kernels.gpu_update import _adam_update_torch
from dos.kernels.update import adam_update
from perfmodel.format import BLOCK
from tests.support.arrays import FLOATS, KERNELS, STEP, STEPS, assert_same_bits, clone
from tests.support.coded import PARAMETERS, coded_arrays


def decode(codes: Codes) -> tuple[Tensor, Tensor]:
    return decode_mean(*codes[:2]), decode_square(*codes[2:])


class CudaArithmetic(TorchDispatchMode):
    """Computes as torch does on CUDA: divides by a Python number with its reciprocal.

    Refuses what compilers for GPUs contract or approximate there.
    """

    contracted = ("add", "addcdiv", "addcmul", "exp", "lerp", "log", "pow", "rsqrt", "rsub", "sub")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__.rstrip("_"), kwargs or {}
        if name == "div" and not isinstance(args[1], Tensor):
            reciprocal = torch.ones((), dtype=args[0].dtype) / args[1]
            return torch.ops.aten.mul.Tensor(args[0], reciprocal)
        assert name not in self.contracted or (name in ("add", "sub", "rsub") and kwargs.get("alpha", 1) == 1), name
        return func(*args, **kwargs)


def run_of(blocks: int) -> AdamArrays:
    """A run with a split master."""
    return coded_arrays(blocks * BLOCK, torch.bfloat16, *PARAMETERS[0], seed=1)


def copy_of(run: AdamArrays) -> AdamArrays:
    return AdamArrays(*clone(run))


def by_torch_as_on_cuda(arrays: AdamArrays, step: AdamStep) -> None:
    with CudaArithmetic():
        _adam_update_torch(arrays, step)


OTHERS = {name: kernel for name, kernel in KERNELS.items() if name != "torch"} | {"torch on CUDA": by_torch_as_on_cuda}


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("step", [step for step in STEPS if not step.amsgrad])
@pytest.mark.parametrize("kernel", OTHERS)
def test_kernels_write_the_same_codes(kernel: str, step: AdamStep, grad: torch.dtype) -> None:
    for seed, kind in enumerate(PARAMETERS):
        expected = coded_arrays(1 << 13, grad, *kind, seed)
        if seed == 3:  # was loaded so
            expected.exp_avg_sq_scale[::2] = torch.inf
            expected.exp_avg_sq.view(-1, BLOCK)[::2] = 0
        ours = copy_of(expected)
        for count in range(3):  # also on what came of infinities and of the largest floats
            now = replace(step, step=step.step + count)
            OTHERS[kernel](ours, now)
            _adam_update_torch(expected, now)
            assert_same_bits(ours, expected)


@pytest.mark.parametrize("threads", [1, 5])
def test_neither_threads_nor_a_division_into_runs_matter(threads: int) -> None:
    whole = run_of(700)
    parts, several = copy_of(whole), copy_of(whole)
    adam_update(whole, step=STEP, threads=1)
    adam_update(several, step=STEP, threads=threads)
    for start, stop in ((0, 1), (1, 2), (2, 7), (7, 300), (300, 700)):
        adam_update(parts.slice(start * BLOCK, stop * BLOCK), step=STEP, threads=threads)
    assert_same_bits(several, whole)
    assert_same_bits(parts, whole)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60))
def test_encoding_decoded_moments_gives_the_same_codes(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(2, 8 * BLOCK, generator=generator) * 2.0**exponent
    codes = encode(moments[0], moments[1].square())
    assert_same_bits(list(encode(*decode(codes))), list(codes))
    # Any codes with the scales that encoding gives: those of blocks that reach the highest code.
    means = torch.randint(-127, 128, (8, BLOCK), generator=generator, dtype=torch.int8)
    squares = torch.randint(0, 256, (8, BLOCK), generator=generator, dtype=torch.uint8)
    means[:, 3], squares[:, 4] = -127, 255
    some = Codes(means.view(-1), codes.exp_avg_scale, squares.view(-1), codes.exp_avg_sq_scale)
    assert_same_bits(list(encode(*decode(some))), list(some))


def test_codes_are_within_a_level_and_right_in_the_mean() -> None:
    torch.manual_seed(0)
    exp_avg = torch.randn(4000, BLOCK) * torch.linspace(0.01, 1, BLOCK)
    root = torch.rand(4000, BLOCK) + 0.02
    exp_avg[:, -1], root[:, -1] = 5.0, 2.0  # the scale of every block
    codes = encode(exp_avg.view(-1), root.square().view(-1))
    decoded, squares = (moment.view(4000, BLOCK) for moment in decode(codes))
    level, root_level = 5.0 / 127, 2.0 / 256
    assert ((decoded - exp_avg).abs() <= 1.001 * level).all()
    assert ((squares.sqrt() - root).abs() <= 1.001 * root_level).all()
    # Of 4000 draws within a level the mean is off by 0.005 of it, one time in a thousand by 0.016.
    assert ((decoded - exp_avg).mean(0).abs() < 0.03 * level).all()
    assert ((squares.sqrt() - root).mean(0).abs() < 0.03 * root_level).all()


def test_small_averages_move_beside_large_ones() -> None:
    """Those of a few levels move by thousandths of one in a step (rounded to nearest not at all), and fall again."""
    codes = [torch.zeros(16 * BLOCK, dtype=torch.int8), torch.zeros(16 * BLOCK, dtype=torch.uint8)]
    scales = [torch.zeros(16), torch.zeros(16)]
    torch.manual_seed(0)
    exact = 0.0
    for step in range(1, 6001):
        size = (2.7, 8.0, 0.0)[(step - 1) // 2000]  # in levels
        exact = STEP.beta2 * exact + (1 - STEP.beta2) * size**2
        gradient = size / 256 * (1 + 0.01 * torch.randn(16 * BLOCK))
        gradient[::BLOCK] = 1  # always the same, so that the scales stand still
        run = AdamArrays(gradient, torch.zeros(16 * BLOCK), *codes, exp_avg_scale=scales[0], exp_avg_sq_scale=scales[1])
        adam_update(run, step=replace(STEP, step=step))
        if step % 2000 == 0:
            levels = decode_square(codes[1], scales[1]).sqrt().view(16, BLOCK)[:, 1:].mean() / scales[1][0]
            assert levels.item() == pytest.approx(max(exact**0.5, 1), rel=0.12)


def test_a_value_that_is_not_finite_makes_its_block_nan() -> None:
    exp_avg, exp_avg_sq = torch.ones(3 * BLOCK), torch.ones(3 * BLOCK)
    exp_avg[5], exp_avg_sq[2 * BLOCK] = -torch.inf, torch.nan
    means, squares = (moment.view(3, BLOCK) for moment in decode(encode(exp_avg, exp_avg_sq)))
    for moment in (means, squares):
        assert moment[[0, 2]].isnan().all()
        assert ((moment[1] - 1).abs() < 1e-4).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"exp_avg_scale": None}, TypeError, "exp_avg_scale: expected a tensor, found NoneType"),
        ({"exp_avg_sq_scale": torch.zeros(3)}, ValueError, "exp_avg_sq_scale: expected 11 elements, found 3"),
        ({"exp_avg": torch.zeros(11 * BLOCK)}, TypeError, "exp_avg: expected torch.int8, found torch.float32"),
        ({"exp_avg_sq": torch.zeros(11 * BLOCK, dtype=torch.int8)}, TypeError, "exp_avg_sq: expected torch.uint8"),
        ({"max_exp_avg_sq": torch.zeros(11 * BLOCK)}, ValueError, "max_exp_avg_sq: expected None beside scales"),
    ],
)
def test_arrays_that_do_not_fit(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        adam_update(run_of(11)._replace(**changes), step=STEP)


def test_runs_are_whole_blocks() -> None:
    run = run_of(11)
    odd = AdamArrays(*(None if a is None else a[:-1] for a in run))
    with pytest.raises(ValueError, match=r"expected a multiple of 128 elements beside scales, found 1407"):
        adam_update(odd, step=STEP)
