"""How fast is the CPU update? ``python -m experiments.kernel [--json]``.

Every contender works on the same arrays, so page placement is the same for all. They take turns, and a ratio is the
median over the rounds of the ratio within a round, so that a change of load between rounds cancels out.
Ratios above 1 mean that ours is faster. The yardstick is what memory alone allows: a loop that reads and writes the
bytes of an update, with one exclusive-or per element.

``neighbour``: how many times as long another process takes for small work of Python and PyTorch on one core while ours
runs, as what the host does beside the CPU lane. Leave it cores by ``--threads``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dos.calibration.bench import pass_s, small_work
from dos.kernels.update import AdamArrays, AdamBatch, AdamStep, instruction_sets
from dos.machine.host_memory import available_bytes
from experiments.command import Parser, table_of
from experiments.harness import finish, measuring, medians, ratio, take_turns, timed
from perfmodel.format import BLOCK, CODED, MIXED, SPLIT
from perfmodel.planner.units import parse_count

_COMMAND = ("cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o")
_STEP = AdamStep(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
# Per parameter: bfloat16 gradient and copy, rest; float32 gradient, parameter, two moments; codes and their scales.
_BYTES_HELD = 3 * 2 + 4 * 4 + 2 * (1 + 4 / BLOCK)
# Per parameter, read and written.
_BYTES_MOVED = {name: state.update_traffic for name, state in (("mixed", MIXED), ("split", SPLIT), ("int8", CODED))}
_BYTES_MOVED["fp32"] = 28

_NEIGHBOUR_S = 0.05

Contenders = dict[str, Callable[[], None]]


def build_contenders(numel: int, threads: int) -> dict[str, Contenders]:
    """The contenders of each comparison. ``ours`` and ``bandwidth`` are in all of them.

    A second call of a bandwidth loop undoes the first, so the numbers that the others work on stay sane.
    """
    grad_bf16 = torch.randn(numel, dtype=torch.bfloat16)
    grad = grad_bf16.float()
    param = torch.nn.Parameter(torch.randn(numel))
    master = param.detach()
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    out = torch.zeros(numel, dtype=torch.bfloat16)
    state = (master, exp_avg, exp_avg_sq)
    param.grad = grad

    def step_with(optimizer: torch.optim.Optimizer, step: Tensor | int) -> Callable[[], None]:
        optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return lambda: (optimizer.step(), None)[1]

    def with_casts(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            grad.copy_(grad_bf16)
            step()
            out.copy_(master)

        return run

    settings = {"lr": _STEP.lr, "betas": (_STEP.beta1, _STEP.beta2), "eps": _STEP.eps}
    fused = torch.optim.AdamW([param], weight_decay=_STEP.weight_decay, fused=True, **settings)  # type: ignore[arg-type]
    torch_step = step_with(fused, torch.zeros(()))
    full, low = AdamArrays(grad, *state), AdamArrays(grad_bf16, *state, None, out)
    rest = torch.zeros(numel, dtype=torch.int16)
    halves = AdamArrays(grad_bf16, out, exp_avg, exp_avg_sq, rest=rest)
    codes = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
    scales = torch.zeros(numel // BLOCK), torch.zeros(numel // BLOCK)
    coded = AdamArrays(grad_bf16, out, *codes, None, None, rest, *scales)

    def beside(arrays: AdamArrays, *streamed: Any, **others: Callable[[], None]) -> Contenders:
        batch = AdamBatch([arrays])

        def ours(_keep: AdamArrays = arrays) -> None:  # the batch has addresses alone
            batch.update(_STEP, threads=threads)

        return {"ours": ours, "bandwidth": stream(*streamed, threads=threads), **others}

    fp32 = beside(full, grad, state, torch_fused=torch_step)
    mixed = beside(low, grad_bf16, state, [out], torch_path=with_casts(torch_step))
    split = beside(halves, grad_bf16, [out, rest, exp_avg, exp_avg_sq], mixed=mixed["ours"])
    int8 = beside(coded, grad_bf16, [out, rest, *codes], mixed=mixed["ours"])
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        deepspeed_step = step_with(
            DeepSpeedCPUAdam([param], weight_decay=_STEP.weight_decay, adamw_mode=True, **settings), 0
        )
        fp32["deepspeed"] = deepspeed_step
        mixed["deepspeed_path"] = with_casts(deepspeed_step)
    return {"fp32": fp32, "mixed": mixed, "split": split, "int8": int8}


def measure(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round. Every round runs them in one order and then in the other.

    The bandwidth loop is last, so that it undoes what it did before another contender works on those numbers: many
    would be subnormal, which some processors compute several times as slowly.
    """
    names = sorted(contenders, key=lambda name: name == "bandwidth")
    contestants = {name: partial(lambda work, _: timed(work), contenders[name]) for name in names}
    turns = take_turns(contestants, range(1 + rounds), warm_up=1, mirrored=True)
    return {name: list(map(statistics.fmean, zip(s[::2], s[1::2], strict=True))) for name, s in turns.items()}


def summarise(seconds: dict[str, list[float]], numel: int) -> dict[str, float]:
    """Ours in 1e9 parameters per second, and its ratio to each other contender."""
    result = {"gparams_per_s": numel / medians(seconds)["ours"] / 1e9}
    for name in seconds.keys() - {"ours"}:
        result[f"ratio_to_{name}"] = ratio(seconds[name], seconds["ours"]) or math.nan
    return {name: round(value, 4) for name, value in sorted(result.items())}


def be_neighbour() -> None:
    """Print the seconds of a forward and backward of small modules, measured for a moment, for each line of input."""
    torch.set_num_threads(1)
    work = small_work()
    for _ in sys.stdin:
        print(pass_s(work, _NEIGHBOUR_S), flush=True)


def beside(neighbour: subprocess.Popen[str], work: Callable[[], None] | None) -> float:
    """Seconds of a pass of `be_neighbour` while this process repeats its work, or waits."""
    assert neighbour.stdin is not None, "a pipe"
    assert neighbour.stdout is not None, "a pipe"
    print(file=neighbour.stdin, flush=True)
    while work and not select.select([neighbour.stdout], [], [], 0)[0]:
        work()
    return float(neighbour.stdout.readline())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser("kernel", __doc__)
    parser.add_argument(
        "--numel", type=parse_count, default=64 * 2**20, help="parameters, in whole blocks of 128 (default 64Mi)"
    )
    parser.add_count("rounds", 11, "of all in turn")
    parser.add_argument(
        "--threads", type=parse_count, default=torch.get_num_threads(), help="default: as many as torch"
    )
    arguments = parser.parse_args(argv)
    numel, threads = -(-arguments.numel // BLOCK) * BLOCK, arguments.threads
    available = available_bytes()
    if available is not None and numel * _BYTES_HELD > available:
        parser.error(
            f"--numel {numel} needs {numel * _BYTES_HELD / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
        )
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    results = {}
    code, pipe = "from experiments.bench.kernel import be_neighbour; be_neighbour()", subprocess.PIPE
    with (
        measuring(arguments.json, emulated=False) as (console, progress),
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as neighbour,
    ):
        for name, contenders in build_contenders(numel, threads).items():
            progress(name)
            results[name] = summarise(measure(contenders, arguments.rounds), numel)
            works = {"alone": None, "ours": contenders["ours"]}
            turns = {turn: partial(lambda work, _: beside(neighbour, work), work) for turn, work in works.items()}
            passes = take_turns(turns, range(1 + arguments.rounds), warm_up=1)
            results[name]["neighbour"] = round(ratio(passes["ours"], passes["alone"]) or math.nan, 4)
    conditions = {
        "numel": numel,
        "threads": threads,
        "repeats": arguments.rounds,
        "instruction_set": instruction_sets()[0],
        "load_average": round(os.getloadavg()[0], 2),
    }
    rows = [
        {"update": name, **result, "gb_per_s": result["gparams_per_s"] * _BYTES_MOVED[name]}
        for name, result in results.items()
    ]
    console.print(table_of("Rates of ours, and ratios to others; above 1: ours is faster", rows))
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    return finish({**results, **conditions}, console, arguments.json)


def stream(
    read: Tensor, changed: Sequence[Tensor], written: Sequence[Tensor] = (), *, threads: int
) -> Callable[[], None]:
    """The loop over tensors of one length, compiled here. A second call undoes the first, but in what is `written`.

    changed: is read and written. Raises RuntimeError where there is no C compiler that knows OpenMP.
    """
    tensors = (read, *changed, *written)
    types = [f"uint{8 * t.itemsize}_t" for t in tensors]
    arrays = "".join(f"{kind} *restrict a{i} = arrays[{i}]; " for i, kind in enumerate(types))
    body = "".join(f"a{i} [i] {'^=' if i <= len(changed) else '='} x; " for i in range(1, len(tensors)))
    source = (
        f"#include <stdint.h>\nvoid run(int64_t n, int threads, void **arrays) {{ {arrays}\n"
        "#pragma omp parallel for simd num_threads(threads)\n"
        f"for (int64_t i = 0; i < n; ++i) {{ {types[0]} x = a0[i]; {body} }} }}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "loop.so"
        try:
            subprocess.run([*_COMMAND, str(library)], input=source, text=True, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"the loop to compare with needs a C compiler with OpenMP: {error}") from error
        run = ctypes.CDLL(str(library)).run
    addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))

    def loop(_keep: Sequence[Tensor] = tensors) -> None:
        run(ctypes.c_int64(len(read)), threads, addresses)

    return loop


if __name__ == "__main__":
    sys.exit(main())
