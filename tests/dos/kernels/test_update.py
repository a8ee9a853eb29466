"""The Adam update: against torch, and to the bit against its formula in torch operations."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from dos.kernels.adam import off_ties
from dos.kernels.gpu_update import _fma
from dos.kernels.update import AdamArrays, AdamStep, adam_update, instruction_sets, sum_of_squares
from tests.support.arrays import (
    FLOATS,
    STEP,
    STEPS,
    assert_same_bits,
    bits,
    clone,
    random_arrays,
    random_bits,
    update,
)

CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


# Against torch


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("step", STEPS)
def test_matches_torch(step: AdamStep, grad_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(1003)
    theirs = torch.nn.Parameter(start.clone())
    betas, decay, amsgrad, maximize = (step.beta1, step.beta2), step.weight_decay, step.amsgrad, step.maximize
    settings = {"betas": betas, "eps": step.eps, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    kind = torch.optim.AdamW if step.decoupled_weight_decay else torch.optim.Adam
    optimizer = kind([theirs], lr=step.lr, foreach=False, **settings)
    ours = [start.clone(), *(torch.zeros(1003) for _ in range(3))]
    for count in range(1, 6):
        grad = torch.randn(1003).to(grad_dtype)
        theirs.grad = grad.float() * step.grad_scale
        optimizer.step()
        update([grad, *ours[:3], ours[3] if amsgrad else None, None], replace(step, step=count))
    state = optimizer.state[theirs]
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    torch.testing.assert_close(ours[0], theirs.detach(), rtol=5e-7, atol=1e-7)
    for name, array in zip(names, ours[1:], strict=False):
        torch.testing.assert_close(array, state[name], rtol=1e-6, atol=1e-7)


# Against the formula in torch operations, whose rounding is exact


def test_multiply_and_add_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (random_bits(5000, torch.float32, generator) for _ in range(3))
    c[::2] = -a[::2] * b[::2]  # what is left is what was rounded off
    few, many = torch.randint(1, 2**8, (999,), generator=generator), torch.randint(2**23, (999,), generator=generator)
    # Next to the middle of two float32, by less than double precision has: rounded twice, half of them were wrong.
    a[:999], b[:999], c[:999] = (1 + few * 2.0**-23) * 2.0**-24, 1 - few * 2.0**-23, 1 + many * 2.0**-23
    usual = (a.double() * b.double() + c.double()).abs() < torch.finfo(torch.float32).max
    a, b, c = (x[usual] for x in (a, b, c))
    found = _fma(a, b, c)
    sides = [found.nextafter(torch.full_like(found, end)) for end in (-math.inf, math.inf)]
    for x, y, z, ours, below, above in zip(*(t.tolist() for t in (a, b, c, found, *sides)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert all(abs(Fraction(ours) - exact) <= abs(Fraction(side) - exact) for side in (below, above))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_to_nearest(dtype: torch.dtype, isa: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    widened, *others = torch.zeros(3, 2**16)
    update([every, others[0], widened, others[1], None, None], replace(STEP, beta1=0.0), isa=isa)
    usual = every.isfinite()  # the first average of an infinite gradient is NaN
    assert torch.equal(widened[usual], every.float()[usual])
    assert not widened[~usual].isfinite().any()

    # Every value, every midpoint of two values, their neighbours, and random patterns.
    finite = every.float()[every.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    around = torch.cat([middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(-math.inf))])
    param = torch.cat([every.float(), around, random_bits(4096, torch.float32, torch.Generator().manual_seed(0))])
    out, zeros = torch.empty(len(param), dtype=dtype), torch.zeros(len(param))
    before = param.clone()
    nothing = replace(STEP, lr=0.0, eps=1.0)
    update([zeros, param, zeros.clone(), zeros.clone(), None, out], nothing, isa=isa)
    kept = off_ties(before) if dtype == torch.bfloat16 else before
    assert torch.equal(param.nan_to_num(), kept.nan_to_num())
    nan = param.isnan()
    assert torch.equal(bits(out)[~nan], bits(before.to(dtype))[~nan])
    assert (bits(out)[nan] == CANONICAL_NAN[dtype]).all()


# Against itself; test_batch.py has the rest


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_of_denormals_changes_nothing(isa: str, threads: int, flush_denormal: None) -> None:
    tiny = torch.full((40_000,), 1 << 16, dtype=torch.int32).view(torch.float32)  # 9e-41
    arrays: list[Tensor | None] = [tiny.clone(), tiny.clone(), tiny.clone(), tiny.clone(), None, None]
    other = clone(arrays)
    update(arrays, STEP, isa=isa, threads=threads)
    assert (torch.ones(1) * 1e-39).item() == 0, "the caller's setting was not restored"
    torch.set_flush_denormal(False)
    update(other, STEP, isa=isa, threads=threads)
    assert_same_bits(arrays, other)
    assert (bits(arrays[2]) != 0).all()


def test_two_python_threads_at_once() -> None:
    start = [random_arrays(200_000, STEP, torch.float32, torch.float32, torch.bfloat16, seed) for seed in range(4)]
    expected, actual = [clone(arrays) for arrays in start], [clone(arrays) for arrays in start]

    def run(arrays: list[Tensor | None]) -> None:
        for count in range(1, 6):
            update(arrays, replace(STEP, step=count), threads=2)

    for arrays in expected:
        run(arrays)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, actual))
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs)


# The other kernel


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_of_squares(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for numel in (0, 1, 31, 4096, 4097, 70_003):
        src = torch.randn(numel + 1).to(dtype)[1:]
        exact = math.fsum(x * x for x in src.tolist())
        sums = {sum_of_squares(src, threads=threads, isa=isa) for threads in (1, 2, 3) for isa in instruction_sets()}
        assert len(sums) == 1
        assert sums.pop() == pytest.approx(exact, rel=1e-14)
    assert sum_of_squares(torch.full((10,), 1e30)) == pytest.approx(1e61, rel=1e-6)
    assert math.isnan(sum_of_squares(torch.tensor([1.0, math.nan])))


# What users get wrong

NEGATED = torch._neg_view(torch.ones(8))


def test_parameters_that_require_grad_are_accepted() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    update([torch.ones(8), param, torch.zeros(8), torch.zeros(8)], STEP)
    assert (param < 1).all()
    assert param.requires_grad
    assert sum_of_squares(param) > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": torch.zeros(8, dtype=torch.float64)}, TypeError, "grad: expected torch.float32 or .*float64"),
        ({"grad": None}, TypeError, "grad: expected a tensor, found NoneType"),
        ({"grad": NEGATED}, ValueError, "grad: expected values in memory, found a lazily negated or zero tensor"),
        ({"grad": torch.zeros(8).to_sparse()}, TypeError, "grad: expected a dense tensor"),
        ({"grad": torch.zeros(9)}, ValueError, "grad: expected 8 elements, found 9"),
        ({"grad": torch.zeros(8, device="meta")}, ValueError, "grad: expected device cpu, found meta"),
        ({"param": torch.zeros(2, 4)}, ValueError, r"param: expected 1 dimension, found shape \(2, 4\)"),
        ({"param": torch.zeros(16)[::2]}, ValueError, "param: expected a contiguous tensor, found stride 2"),
        ({"exp_avg": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "exp_avg: expected torch.float32, found"),
        ({"exp_avg_sq": torch.zeros(7)}, ValueError, "exp_avg_sq: expected 8 elements, found 7"),
        ({"step": replace(STEP, amsgrad=True)}, ValueError, "max_exp_avg_sq: expected a tensor with amsgrad=True"),
        ({"out": torch.zeros(8, dtype=torch.float64)}, TypeError, "out: expected torch.float32 or"),
        ({"param": torch.zeros(8).half(), "out": torch.zeros(8).half()}, TypeError, "out: .* beside a float32 param"),
        ({"threads": -1}, ValueError, "threads: expected at least 1, or 0"),
        ({"isa": "mmx"}, ValueError, "'mmx' is not usable here; usable: .*portable"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(8) for name in ("grad", "param", "exp_avg", "exp_avg_sq")}
    options = {"step": STEP} | {key: value for key, value in change.items() if key not in AdamArrays._fields}
    arrays = AdamArrays(**arguments | {key: value for key, value in change.items() if key in AdamArrays._fields})
    with pytest.raises(error, match=message):
        adam_update(arrays, **options)
    assert all((arguments[name] == 0).all() for name in arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sum_of_squares(torch._efficientzerotensor(4)), r"src: expected values in memory.*use \.clone\(\)"),
        (lambda: sum_of_squares(torch.zeros(2, 2)), "src: expected 1 dimension"),
        (lambda: sum_of_squares(torch.zeros(2, device="meta")), "src: expected device cpu, found meta"),
        (lambda: replace(STEP, step=0), "step: expected at least 1"),
    ],
)
def test_other_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
