"""Do all kernels give the same bits? Random values, random bit patterns and special values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dos.kernels.gpu_update import _adam_update_torch, gpu_kernel_name
from dos.kernels.update import AdamArrays, AdamStep, adam_update, instruction_sets
from experiments.checks.base import Bench, Size, Target
from experiments.checks.training import prepare
from perfmodel.format import BLOCK

NUMEL = {Size.TINY: 20_480, Size.SMALL: 2_000_000, Size.FULL: 100_000_000}
"""Elements of each case, whole blocks of those that share a scale."""
CHUNK = 1 << 24
"""Elements at a time."""

GPU_KERNEL = "GPU kernel"

_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SPECIAL = (
    *(0.0, 1.0, 1.5, 1e-8, 1e8, 1e-30, 1e30, 3.4028234663852886e38, 1.1754943508222875e-38),
    *(1.1754942106924411e-38, 1.401298464324817e-45, 2.802596928649634e-45, 65504.0, 6e-8, 5.960464477539063e-08),
    *(9.183549615799121e-41, 1.1663108012064884e-38, float("inf"), float("nan")),
)
"""Zero, ordinary, tiny, huge, largest, smallest normal, largest and smallest denormal, the same of fp16 and
bf16; and negated."""


@dataclass(frozen=True)
class Case:
    """Settings of one update, and the types of what it reads and writes.

    copy: of the parameter, None for none. split: whether the parameter is half of its master. coded: whether the
    moments are in codes.
    """

    name: str
    step: AdamStep
    gradient: torch.dtype
    parameter: torch.dtype = torch.float32
    copy: torch.dtype | None = None
    split: bool = False
    coded: bool = False


CASES = (
    Case(
        "bf16 gradient and parameter, float32 master",
        AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1000),
        torch.bfloat16,
        copy=torch.bfloat16,
    ),
    Case(
        "bf16 gradient and parameter, split master",
        AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1000),
        torch.bfloat16,
        parameter=torch.bfloat16,
        split=True,
    ),
    Case(
        "bf16 gradient and parameter, split master, moments in 8 bits",
        AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1000),
        torch.bfloat16,
        parameter=torch.bfloat16,
        split=True,
        coded=True,
    ),
    Case(
        "fp16 gradient and parameter, amsgrad, loss scale",
        AdamStep(
            lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.0, step=7, amsgrad=True, grad_scale=0.37 / 65536
        ),
        torch.float16,
        copy=torch.float16,
    ),
    Case(
        "float32, L2, maximize, small beta1",
        AdamStep(
            lr=1e-2,
            beta1=0.4,
            beta2=0.9,
            eps=1e-10,
            weight_decay=0.3,
            step=2,
            maximize=True,
            decoupled_weight_decay=False,
        ),
        torch.float32,
    ),
    Case(
        "bf16 without master, first step",
        AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1),
        torch.bfloat16,
        parameter=torch.bfloat16,
    ),
)

Arrays = dict[str, Tensor | None]
Update = Callable[[Arrays, AdamStep], None]


def run(bench: Bench) -> None:
    """Every case, chunk by chunk: the C++ kernel against all others."""
    device = prepare(bench)
    others = contenders(bench.cuda)
    bench.note(instruction_sets=instruction_sets(), compared=list(others), elements_of_each_case=NUMEL[bench.size])
    if not bench.cuda:
        bench.note(gpu_kernel="not run: no GPU; its stand-in in torch operations was compared on the CPU")
    compared = {case.name: 0 for case in CASES}
    differing = dict.fromkeys(others, 0)
    for case, seed, numel in chunks(NUMEL[bench.size]):
        if bench.left() < 0:
            break
        start = drawn(case, numel, device, seed)
        expected = {name: None if t is None else t.to("cpu", copy=True) for name, t in start.items()}
        cpp(expected, case.step)
        for name, (where, update) in others.items():
            if seed and name != GPU_KERNEL:
                continue  # the slow ones see the first chunk of each case alone
            arrays = {key: None if t is None else t.to(where, copy=True) for key, t in start.items()}
            update(arrays, case.step)
            found = differences(arrays, expected)
            if found and not differing[name]:
                bench.problem(f"{name}, {case.name}: {found[0]}")
            differing[name] += len(found)
        compared[case.name] += numel
        bench.note(elements=compared, tensors_that_differ=differing)
    bench.target(Target.at_least("elements of each case compared in bits", min(compared.values()), NUMEL[bench.size]))
    if bench.cuda:
        kernel = gpu_kernel_name()
        bench.note(gpu_kernel=kernel)
        bench.target(Target("the GPU kernel is Triton's", None, "triton", kernel == "triton", f"found {kernel}"))


def contenders(cuda: bool) -> dict[str, tuple[torch.device, Update]]:
    """What is compared with the best C++ kernel, and where it runs."""
    host = torch.device("cpu")

    def with_set(isa: str) -> Update:
        return lambda arrays, step: cpp(arrays, step, isa)

    found: dict[str, tuple[torch.device, Update]] = {
        f"C++ {isa}": (host, with_set(isa)) for isa in instruction_sets()[1:]
    }
    where = torch.device("cuda", torch.cuda.current_device()) if cuda else host
    if cuda:
        found[GPU_KERNEL] = where, cpp  # dispatched by where the tensors are
    found["torch operations"] = where, torch_operations
    return found


def cpp(arrays: Arrays, step: AdamStep, isa: str | None = None) -> None:
    adam_update(adam_arrays(arrays), step=step, isa=isa)


@torch.no_grad()
def torch_operations(arrays: Arrays, step: AdamStep) -> None:
    _adam_update_torch(adam_arrays(arrays), step)


def adam_arrays(arrays: Arrays) -> AdamArrays:
    names = ("gradient", "parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy", "rest", *_SCALES)
    return AdamArrays(*(arrays.get(name) for name in names))  # type: ignore[arg-type]


def chunks(numel: int) -> Iterator[tuple[Case, int, int]]:
    """Case, seed and elements; the cases take turns, so that all have had some when time runs out."""
    for seed, start in enumerate(range(0, numel, CHUNK)):
        for case in CASES:
            yield case, seed, min(CHUNK, numel - start)


def drawn(case: Case, numel: int, device: torch.device, seed: int) -> Arrays:
    """Gradient, parameter and state of a case, drawn independently, so that every kind of value meets every other."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(dtype: torch.dtype) -> Tensor:
        return values(numel, dtype, device, generator)

    found: Arrays = {
        "gradient": draw(case.gradient),
        "parameter": draw(case.parameter),
        "exp_avg": draw(torch.float32),
        "exp_avg_sq": draw(torch.float32),
        "max_exp_avg_sq": draw(torch.float32) if case.step.amsgrad else None,
        "copy": None if case.copy is None else torch.zeros(numel, dtype=case.copy, device=device),
        "rest": draw(torch.bfloat16).view(torch.int16) if case.split else None,
    }
    if case.coded:
        found |= in_codes(draw(case.gradient), numel, device, generator)
    return found


def in_codes(gradient: Tensor, numel: int, device: torch.device, generator: torch.Generator) -> Arrays:
    """Moments in codes, some of them NaN, and the gradient in fewer kinds.

    One value whose square is not finite makes its block NaN, so three blocks of four have none.
    """
    rows = gradient.view(-1, BLOCK)
    block = torch.arange(len(rows), device=device)
    usable = (rows.abs() < 1e18) | (block % 4 == 0)[:, None]
    found: Arrays = {"gradient": rows.masked_fill(~usable, 0.0).view(-1)}
    for name, code, least in (("exp_avg", torch.int8, -127), ("exp_avg_sq", torch.uint8, 0)):
        found[name] = torch.randint(least, least + 255, (numel,), device=device, generator=generator).to(code)
    for every, name in zip((7, 11), _SCALES, strict=True):
        size = torch.empty(len(rows), device=device).uniform_(-18, 0, generator=generator).exp_()
        scale = (size.view(torch.int32) & ~0x7F).view(torch.float32)  # of 17 bits, as updates leave them
        found[name] = scale.masked_fill(block % every == 0, torch.nan)
    return found


def values(numel: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Half ordinary numbers of all sizes, a quarter any bit pattern, a quarter special values. 1-D."""

    def integers(low: int, high: int, kind: torch.dtype) -> Tensor:
        return torch.randint(low, high, (numel,), dtype=kind, device=device, generator=generator)

    size = torch.empty(numel, device=device).uniform_(-18, 6, generator=generator)
    found = torch.empty(numel, device=device).normal_(generator=generator).mul_(size.exp_()).to(dtype)
    limit = 1 << (8 * dtype.itemsize - 1)
    patterns = integers(-limit, limit, _BITS[dtype.itemsize]).view(dtype)
    special = torch.tensor(_SPECIAL, device=device)
    special = torch.cat([special, -special]).to(dtype)[integers(0, 2 * len(_SPECIAL), torch.int64)]
    kind = integers(0, 4, torch.uint8)
    found = torch.where(kind == 2, patterns, found)
    return torch.where(kind == 3, special, found)


def differences(arrays: Arrays, expected: Arrays) -> list[str]:
    """The tensors that are not equal in bits, in words."""
    found = []
    for name, tensor in arrays.items():
        other = expected[name]
        if tensor is None or other is None:
            continue
        ours, theirs = (t.view(_BITS[t.element_size()]) for t in (tensor, other.to(tensor.device)))
        if not torch.equal(ours, theirs):
            where = (ours != theirs).nonzero().flatten()
            i = int(where[0])
            found.append(
                f"{name} differs in {len(where)} of {len(ours)} elements; at {i}: {tensor[i].item()!r} "
                f"({ours[i].item():#x}) instead of {other[i].item()!r} ({theirs[i].item():#x})"
            )
    return found
