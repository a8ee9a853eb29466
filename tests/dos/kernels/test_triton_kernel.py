"""The GPU kernel without a GPU: interpreted, compiled to PTX, and what happens where it cannot be used.

Triton is no dependency of the tests: it comes with torch for CUDA, and is several hundred megabytes without that.
"""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dos.kernels import gpu_update as module
from dos.kernels import masters
from dos.kernels.gpu_update import GpuBatch, gpu_kernel_name
from dos.kernels.update import AdamArrays, AdamBatch, AdamStep
from perfmodel.format import BLOCK
from tests.support.arrays import STEP, STEPS, assert_same_bits, random_arrays, update
from tests.support.processes import run


def test_interpreted_it_has_the_bits_of_the_cpu_kernel() -> None:
    semantic = pytest.importorskip("triton.language.semantic", reason="Triton is not installed")
    if not hasattr(semantic, "TritonSemantic"):
        pytest.skip("this Triton, which may be that of torch 2.6, has no TritonSemantic to interpret with")
    # In a process that has not imported Triton, which asks when it is imported whether it is to interpret.
    said = run(sys.executable, "-m", "tests.support.interpret_triton").stdout
    assert "602 updates compared" in said
    assert "144 changes seen" in said


FULL = (torch.float32, torch.float32, None)
Compile = Callable[[AdamStep, torch.dtype, torch.dtype, torch.dtype | None, bool, bool, int, int], Any]


NVIDIA = [("cuda", 80, 32), ("cuda", 90, 32)]
"""Backend, architecture and threads of a warp."""


@pytest.fixture(params=NVIDIA)
def compile_for_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Compile]:
    """Calls the kernel as an update on such a GPU does, up to the launch; the compiled kernel."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from dos.kernels import triton_kernel

    class OnGpu(torch.Tensor):
        is_cuda = True

    class Driver:
        def get_current_target(self) -> object:
            return GPUTarget(*request.param)

        def get_current_device(self) -> int:
            return NVIDIA.index(request.param) if request.param in NVIDIA else len(NVIDIA)

        def get_current_stream(self, device: int) -> int:
            return 0

    kind = type(triton_kernel.adam_kernel)
    run, compiled = kind.run, []

    def warm_up(self: object, *args: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **options))

    def compile_(
        step: AdamStep,
        grad: torch.dtype,
        param: torch.dtype,
        out: torch.dtype | None,
        split: bool,
        coded: bool,
        shift: int,
        runs: int,
    ) -> Any:
        arrays = random_arrays(4096 + shift, step, grad, param, out, seed=0)
        arrays.append(torch.zeros(4096 + shift, dtype=torch.int16) if split else None)
        if coded:
            arrays[2:4] = (torch.zeros(4096 + shift, dtype=code) for code in (torch.int8, torch.uint8))
            # Where loads of 16 bytes would not be possible.
            arrays += [torch.zeros(4096 // BLOCK + 1 + shift)[1:]] * 2
        on_gpu = [None if array is None else array[shift:].as_subclass(OnGpu) for array in arrays]
        run = AdamArrays(*on_gpu)
        rows = AdamBatch([AdamArrays(*(a if a is None else a[shift:] for a in arrays))] * runs)._table
        triton_kernel.adam_update(run, step, rows, lambda rows: torch.from_numpy(rows).as_subclass(OnGpu))
        return compiled[-1]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kind, "run", warm_up)
    driver.set_active(Driver())
    yield compile_
    with contextlib.suppress(RuntimeError):  # there is no GPU to go back to
        driver.reset_active()


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize(
    ("step", "dtypes", "split", "coded", "shift"),
    [
        (STEP, (torch.bfloat16, torch.float32, torch.bfloat16), False, False, 0),
        (STEP, (torch.bfloat16, torch.float32, torch.bfloat16), False, False, 1),
        (replace(STEP, lr=1.0, eps=1.0, weight_decay=1.0, step=1), FULL, False, False, 0),
        (STEPS[1], (torch.float16, torch.float32, torch.float16), False, False, 0),
        (STEPS[3], (torch.bfloat16, torch.bfloat16, None), False, False, 0),
        (STEP, (torch.bfloat16, torch.bfloat16, None), True, False, 0),
        (STEP, (torch.bfloat16, torch.bfloat16, None), True, False, 1),
        (STEP, (torch.bfloat16, torch.bfloat16, None), True, True, 0),
        (STEP, (torch.bfloat16, torch.float32, torch.bfloat16), False, True, 0),
        (STEPS[4], (torch.float16, torch.float16, None), False, True, 1),
    ],
)
def test_compiled_it_has_the_operations_of_the_formula(
    compile_for_gpu: Compile,
    step: AdamStep,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    split: bool,
    coded: bool,
    shift: int,
    runs: int,
) -> None:
    ptx = compile_for_gpu(step, *dtypes, split, coded, shift, runs).asm["ptx"]
    found = re.findall(r"^\s*(?:@\S+ )?((?:mul|add|sub|fma|mad|div|rcp|sqrt|rsqrt|ex2)\.\S*f\d\S*)", ptx, re.MULTILINE)
    elements = 8  # of one thread: 1024 in a program of 4 warps
    # An operation that says how it rounds is not contracted: PTX ISA, section "Floating Point Instructions".
    fmas = 4 + step.use_l2
    formula = {"mul.rn.f32": 4, "sub.rn.f32": 1, "fma.rn.f32": fmas, "sqrt.rn.f32": 1, "div.rn.f32": 1}
    if coded:
        scales = 1 / elements if shift == 0 else 1  # of a thread's elements, each: neighbours or not
        formula |= {"mul.rn.f32": 9 + scales, "add.rn.f32": 3, "div.rn.f32": 1 + 3 * scales}
    assert {name: found.count(name) / elements for name in set(found)} == formula
    assert not re.search(r"\.ftz|\.approx|\.full", ptx)
    # The canonical NaN is written out, because the hardware's is another one, also where parameters are rounded.
    assert ptx.count("2143289344") >= elements
    if torch.float16 in dtypes[1:]:
        assert len(re.findall(r"selp\.b16\s+%\w+, (?:0x7E00|32256)", ptx)) >= elements
    # No scalar was folded into the code: another learning rate must not be compiled anew.
    arrays = 4 + step.amsgrad + (dtypes[2] is not None) + split + 2 * coded
    where = arrays + len(["numel"]) if runs == 1 else len(["table", "count"])
    assert len(re.findall(r"ld\.param", ptx)) == where + 8 + step.use_l2 + coded
    wide = r"ld\.global\S*\.v4\.b32"
    assert bool(re.search(wide, ptx)) == (shift == 0), "loads are 16 bytes wide exactly where addresses allow it"


@pytest.mark.parametrize("compile_for_gpu", [("hip", "gfx942", 64)], indirect=True)
@pytest.mark.parametrize("coded", [False, True])
def test_compiled_for_rocm_it_has_the_operations_of_the_formula(
    compile_for_gpu: Compile, coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There tensors say that they are on CUDA, and PTX is no code."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    code = compile_for_gpu(STEP, torch.bfloat16, torch.bfloat16, None, True, coded, 0, 2).asm["llir"]
    assert re.search(r" fdiv .*\n", code)
    if "@llvm.amdgcn.rsq" in code:  # Triton 3.6 writes it out, from an estimate that fused multiply-adds correct
        estimates = len(re.findall(r"call float @llvm\.amdgcn\.rsq\.f32", code))
        assert estimates == 2 * len(re.findall(r"@llvm\.fma\.v2f32\(.*splat \(float 5\.000000e-01\)\)", code)) > 0
    else:
        assert "@llvm.sqrt" in code
    # Written as it is, what rounds is rounded correctly: no approximation is allowed, nothing fused, nothing flushed.
    assert not re.search(r"\basm\b|\bcontract\b|\bfast\b|\bafn\b|!fpmath|preserve-sign", code)


@pytest.mark.parametrize("runs", [(1, 1), (2, 17)])
def test_it_is_compiled_once_for_all_steps(compile_for_gpu: Compile, runs: tuple[int, int]) -> None:
    steps = [replace(STEP, step=number) for number in range(1, 21)]
    assert {step.seed % 16 == 0 for step in steps} == {True, False}
    kind = (torch.bfloat16, torch.float32, torch.bfloat16, False, True, 0)
    assert len({id(compile_for_gpu(step, *kind, count)) for step in steps for count in runs}) == 1


# Where it cannot be used


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process that has not tried yet."""
    monkeypatch.setattr(module, "_triton_failed", False)
    cached = module._import_triton_kernel
    cached.cache_clear()
    yield
    cached.cache_clear()


def updated_by_gpu_code(arrays: list[torch.Tensor | None], step: AdamStep) -> None:
    runs = [AdamArrays(*arrays)]
    GpuBatch(torch.device("cpu")).prepare([step], AdamBatch(runs)._table)()


class ShortOfMemory(TorchDispatchMode):
    """A device that has no memory for the result of one operation, and is asked for so much (bytes) at most."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.left, self.peak = fails, 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if not isinstance(made, torch.Tensor) or made.untyped_storage()._cdata in known:
            return made
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError(f"no {made.nbytes} bytes")
        key = made.untyped_storage()._cdata
        self._live[key] = made.untyped_storage().nbytes()
        weakref.finalize(made.untyped_storage(), self._live.pop, key, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return made


@pytest.mark.parametrize("work", ["exact", "split", "coded", "follow", "correct"])
def test_running_out_of_memory_in_torch_operations_breaks_nothing(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "_intermediates", lambda numel: (None, None, None))  # as on a device
    numel, step = 2 * BLOCK, replace(STEPS[0], amsgrad=work == "exact")

    def attempt(fails: int) -> tuple[ShortOfMemory, list[torch.Tensor]]:
        arrays = random_arrays(numel, step, torch.bfloat16, torch.bfloat16, None, seed=0)
        rest = torch.arange(numel, dtype=torch.int16) * 999 - 99 * 256
        rest[7] = -0x8000
        if work == "coded":
            arrays[2:4] = torch.ones(numel, dtype=torch.int8), torch.ones(numel, dtype=torch.uint8)
        arrays += [rest if work != "exact" else None, *([torch.ones(2)] * 2 if work == "coded" else [None] * 2)]
        run = AdamArrays(*(None if array is None else array.clone() for array in arrays))
        with ShortOfMemory(fails) as memory:
            if work == "follow":
                masters.follow(run.exp_avg, run.param)
            elif work == "correct":
                masters.correct_rest(rest, run.param)
            else:
                module._adam_update_torch(run, step)
        return memory, [array for array in (*run, rest) if array is not None]

    operations, expected = attempt(0)
    assert -operations.left >= (4 if work == "correct" else 8)
    for number in range(1, 1 - operations.left, 3 if work == "coded" else 1):
        assert_same_bits(attempt(number)[1], expected)


@pytest.mark.parametrize("work", ["exact", "coded"])
def test_torch_operations_need_no_more_memory_than_they_say(work: str) -> None:
    """See dos.kernels.adam.PART."""
    numel = 1 << 15
    arrays = random_arrays(numel, STEP, torch.bfloat16, torch.bfloat16, None, seed=0)
    arrays += [torch.zeros(numel, dtype=torch.int16), None, None]
    if work == "coded":
        arrays[2:4] = torch.ones(numel, dtype=torch.int8), torch.ones(numel, dtype=torch.uint8)
        arrays[-2:] = [torch.ones(numel // BLOCK) for _ in range(2)]
    with ShortOfMemory(0) as memory:
        module._adam_update_torch(AdamArrays(*arrays), STEP)
    assert memory.peak / numel <= 100


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_kernel_that_finds_no_memory_is_tried_again(
    error: Exception, afresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def loads(*arguments: object) -> None:
        calls.append("load")
        if "trim" not in calls:
            raise error

    monkeypatch.setattr(module, "_import_triton_kernel", lambda: loads)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("trim"))
    arrays = some_arrays()
    updated_by_gpu_code(arrays, STEP)
    assert calls == ["load", "trim", "load"]
    assert_same_bits(arrays, some_arrays())
    assert gpu_kernel_name() == "triton"
    assert not caplog.records


@pytest.mark.parametrize(
    "error",
    [*NO_MEMORY, MemoryError(), RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")],
)
def test_errors_of_the_device_are_raised_and_triton_stays(error: Exception, failing: Fails) -> None:
    failing(error)
    arrays = some_arrays()
    with pytest.raises(type(error)) as caught:
        updated_by_gpu_code(arrays, STEP)
    assert caught.value is error
    assert_same_bits(arrays, some_arrays())
    assert gpu_kernel_name() == "triton"


def test_scalars_are_rounded_once() -> None:
    exact = torch.tensor(STEP.scalars, dtype=torch.float64)
    assert torch.tensor(STEP.float32_scalars, dtype=torch.float64).equal(exact.float().double())
    assert STEP.float32_scalars != STEP.scalars


Fails = Callable[[BaseException], list[Any]]


@pytest.fixture
def failing(afresh: None, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Has the Triton kernel raise this; the calls of it."""

    def fail_with(error: BaseException) -> list[Any]:
        calls: list[Any] = []

        def fails(*arguments: object) -> None:
            calls.append(arguments)
            raise error

        monkeypatch.setattr(module, "_import_triton_kernel", lambda: fails)
        assert gpu_kernel_name() == "triton"
        return calls

    return fail_with


def some_arrays(step: AdamStep = STEP) -> list[torch.Tensor | None]:
    return random_arrays(100, step, torch.bfloat16, torch.float32, torch.bfloat16, seed=0)


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, "gcc"),
        PermissionError("~/.triton/cache"),
        ImportError("cuda_utils.so"),
        RuntimeError("PassManager::run failed"),
        RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain."),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    ],
)
def test_a_kernel_that_will_not_work_next_time_either_is_given_up(
    error: Exception | None, failing: Fails, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And torch does the same. None: there is no Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "dos.kernels.triton_kernel", raising=False)
    calls = [] if error is None else failing(error)
    with caplog.at_level(logging.WARNING):
        for step in STEPS:
            expected, ours = some_arrays(step), some_arrays(step)
            updated_by_gpu_code(ours, step)
            update(expected, step)
            assert_same_bits(ours, expected)
    assert gpu_kernel_name() == "torch"
    assert [call[1] for call in calls] == ([] if error is None else [STEPS[0]])
    (record,) = caplog.records
    said = "ModuleNotFoundError" if error is None else f"{type(error).__name__}: {error}"
    assert f"Triton kernel cannot be used ({said}" in record.getMessage()
    assert "it needs the triton package" in caplog.text
