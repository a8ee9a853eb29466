"""On a GPU: both kernels there against the C++ kernels, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dos.devices.pinned import lazy_zeros, pin
from dos.kernels import gpu_update as module
from dos.kernels.gpu_update import gpu_kernel_name
from dos.kernels.update import AdamArrays, AdamBatch, AdamStep
from tests.support.arrays import (
    FLOATS,
    L2,
    NOTHING,
    STEP,
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
from tests.support.gpu import DEVICE, NEEDS_GPU, SIMULATED
from tests.support.training import no_synchronisation

pytestmark = NEEDS_GPU

NUMEL = 1_000_000
Arrays = list[Tensor | None]


@pytest.fixture(params=["triton", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel that updates on the GPU use."""
    if request.param == "torch":
        monkeypatch.setattr(module, "_triton_kernel", lambda: None)
    elif gpu_kernel_name() != "triton":
        pytest.skip("Triton cannot be used here")
    yield request.param
    assert gpu_kernel_name() == request.param, "given up"


def moved(arrays: Arrays, device: str, offset: int = 0) -> Arrays:
    """Copies whose addresses are `offset` elements from where allocators put them."""

    def move(array: Tensor) -> Tensor:
        memory = torch.empty(len(array) + offset, dtype=array.dtype, device=device)
        return memory[offset:].copy_(array)

    return [None if array is None else move(array) for array in arrays]


def check(arrays: Arrays, steps: list[AdamStep], offset: int = 0) -> None:
    """The same updates there and here leave the same bits."""
    ours = moved(arrays, DEVICE, offset)
    for step in steps:
        update(ours, step)
        update(arrays, step)
    assert_same_bits(moved(ours, "cpu"), arrays)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("param", "out"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
    ],
)
@pytest.mark.parametrize("grad", FLOATS)
def test_a_million_elements(
    kernel: str, grad: torch.dtype, param: torch.dtype, out: torch.dtype | None, step: AdamStep
) -> None:
    check(random_arrays(NUMEL, step, grad, param, out, seed=0), [step] * 3)  # one in eight is any bit pattern


@pytest.mark.parametrize("step", STEPS)
def test_nothing_but_special_values(kernel: str, step: AdamStep) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = random_arrays(NUMEL, step, torch.bfloat16, torch.float32, torch.bfloat16, seed=0)
    for array in expected[:5]:
        if array is not None:
            array.copy_(random_bits(NUMEL, array.dtype, generator))
    check(expected, [step])


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_masters_that_come_out_as_ties(kernel: str, out: torch.dtype) -> None:
    zeros = [torch.zeros(2**16) for _ in range(3)]
    check([zeros[0], ties(), *zeros[1:], None, torch.zeros(2**16, dtype=out)], [NOTHING])


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("step", [*STEPS, L2])
def test_a_split_master(kernel: str, step: AdamStep, grad: torch.dtype) -> None:
    for numel, offset in ((NUMEL, 0), (1025, 1), (70_001, 4)):
        mixed = mixed_arrays(numel, step, grad, seed=0)
        ours = moved(list(splitting(mixed)), DEVICE, offset)
        for _ in range(3):
            update(ours, step)
            update(list(mixed), step)
        assert_alike(AdamArrays(*moved(ours, "cpu")), mixed)


@pytest.mark.parametrize("number", range(len(PARAMETERS)))
@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("step", [step for step in STEPS if not step.amsgrad])
def test_moments_in_codes(kernel: str, step: AdamStep, grad: torch.dtype, number: int) -> None:
    """In one launch, of several runs together or of one that is not aligned: so each test compiles one kernel."""
    together = (number + STEPS.index(step)) % 2 == 0
    sizes = [(128 * 7000, 0), (128, 0), (1152, 0), (4096, 0)] if together else [(128 * 501, 4)]
    start = [list(coded_arrays(numel, grad, *PARAMETERS[number], seed=number)) for numel, _ in sizes]
    ours = [moved(run, DEVICE, offset) for run, (_, offset) in zip(start, sizes, strict=True)]
    batch = AdamBatch([AdamArrays(*run) for run in ours])
    for _ in range(3):
        batch.update([step])
        for run in start:
            update(run, step)
    for run, expected in zip(ours, start, strict=True):
        assert_same_bits(moved(run, "cpu"), expected)


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 1023, 1024, 1025, 70_001])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_any_length_and_address(kernel: str, numel: int, offset: int) -> None:
    check(random_arrays(numel, STEP, torch.bfloat16, torch.float32, torch.bfloat16, seed=numel), [STEP], offset)


def test_a_batch_has_the_bits_of_its_runs(kernel: str) -> None:
    sizes = [(1, 0), (64, 0), (5000, 1), (0, 0), (1 << 20, 0), (1023, 4), (100_000, 0)]
    start = [random_arrays(n, STEPS[1], torch.bfloat16, torch.float32, torch.bfloat16, seed=n) for n, _ in sizes]
    ours = [moved(run, DEVICE, offset) for run, (_, offset) in zip(start, sizes, strict=True)]
    batch = AdamBatch([AdamArrays(*run) for run in ours])
    which = [i % 2 for i in range(len(sizes))]
    for _ in range(3):
        batch.update(STEPS[:2], which)
        for run, number in zip(start, which, strict=True):
            update(run, STEPS[number])
    for run, expected in zip(ours, start, strict=True):
        assert_same_bits(moved(run, "cpu"), expected)
    dtypes = [torch.float32] * len(sizes)
    gradients = [torch.randn(n, device=DEVICE) if n != 64 else None for n, _ in sizes]
    batch.point([0 if g is None else g.data_ptr() for g in gradients], dtypes)
    batch.update(STEPS[0])
    for gradient, run in zip(gradients, start, strict=True):
        if gradient is not None:
            update([gradient.cpu(), *run[1:]], STEPS[0])
    for run, expected in zip(ours, start, strict=True):
        assert_same_bits(moved(run, "cpu")[1:], expected[1:])


def test_nothing_beside_the_range_is_written() -> None:
    arrays = random_arrays(3000, STEP, torch.bfloat16, torch.float32, torch.bfloat16, seed=0)
    ours = moved(arrays, DEVICE)
    update([None if array is None else array[1000:1777] for array in ours], STEP)
    for before, after in zip(arrays, moved(ours, "cpu"), strict=True):
        if before is not None and after is not None:
            outside = torch.cat([torch.arange(1000), torch.arange(1777, 3000)])
            assert_same_bits([after[outside]], [before[outside]])


def test_more_elements_than_32_bits_count() -> None:
    numel, tail = 2**31 + 5000, 4000
    if torch.cuda.mem_get_info()[0] < 15 * numel:
        pytest.skip(f"needs {15 * numel / 2**30:.0f} GiB of free device memory")
    expected = random_arrays(tail, STEP, torch.bfloat16, torch.bfloat16, None, seed=0)
    ours = [None if a is None else torch.zeros(numel, dtype=a.dtype, device=DEVICE) for a in expected]
    for array, end in zip(ours, expected, strict=True):
        if array is not None and end is not None:
            array[-tail:] = end.to(DEVICE)
    update(ours, STEP)
    update(expected, STEP)
    assert_same_bits(moved([None if a is None else a[-tail:] for a in ours], "cpu"), expected)


def test_on_the_current_stream_without_waiting(kernel: str) -> None:
    arrays = moved(random_arrays(1000, STEP, torch.bfloat16, torch.float32, torch.bfloat16, seed=0), DEVICE)
    update(clone(arrays), STEP)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), no_synchronisation():
        torch.cuda._sleep(100_000_000)
        update(arrays, STEP)
        assert not stream.query(), "the update waited"
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_tensors_device(kernel: str) -> None:
    expected = random_arrays(1000, STEP, torch.bfloat16, torch.float32, torch.bfloat16, seed=0)
    ours = moved(expected, f"{DEVICE}:1")
    with torch.cuda.device(0):
        update(ours, STEP)
    update(expected, STEP)
    assert_same_bits(moved(ours, "cpu"), expected)


@pytest.mark.parametrize("nbytes", [1, 5000, (32 << 20) + 4])
def test_pinned_memory(nbytes: int) -> None:
    tensor = lazy_zeros(nbytes, torch.uint8)
    pin(tensor, torch.device(DEVICE, 0))
    assert tensor.is_pinned() or SIMULATED, "torch asks CUDA's own runtime"
    assert not tensor.any()
    tensor.copy_(torch.arange(nbytes) % 251)
    with no_synchronisation():
        there = tensor.to(DEVICE, non_blocking=True)
    assert torch.equal(there.cpu(), tensor)


def test_host_and_device_tensors_are_not_mixed() -> None:
    arrays: list[Callable[[], Tensor]] = [lambda: torch.zeros(8, device=DEVICE)] * 3
    with pytest.raises(ValueError, match=f"grad: expected device {DEVICE}:0, found cpu"):
        update([torch.zeros(8), *(make() for make in arrays)], STEP)
