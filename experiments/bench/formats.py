"""Costs and effects of each format of the state: bytes, speed of the update, and how training goes.

    python -m experiments.formats                          # about half an hour on two cores
    python -m experiments.formats --steps 300 --seeds 2    # a quick look

A small GPT over bytes learns the sources of Python's standard library: in bfloat16 with each format of
DOSAdam; in float32 with AdamW, with moments in int8, and with the 8-bit AdamW of torchao and of
bitsandbytes where they are installed. All see the same batches from the same start; a seed draws both
anew. Then problems on which codes of 8 bits could fail, in float32. Speeds are of the emulated device
with the rates of the published H100 node, slowed down.
Writes formats.json and formats.png.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dos import DOSAdam
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import finish
from experiments.miniature import equal_subgroups, measured_update_s, slowed
from experiments.plots import save_spread
from perfmodel import Plan, Workload
from perfmodel.footprint import HostBytes
from perfmodel.format import format_of
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only, stride

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

FORMATS = {"float32": "float32", "split": None, "int8": "int8"}
"""Of DOSAdam's rows in bfloat16: what is asked for."""
INT8 = "int8 of a float32 model"
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
BATCH = 8
LAST = 100
"""Steps at the end whose mean is the final loss."""
TIMED_NUMEL = 1 << 22
TIMED_S = 1.0
"""Seconds of the timed update on the host in float32, so long that the work of this machine does not count."""
SUBGROUPS = 16
HARD_STEPS = 1000
"""Of each problem on which codes could fail."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("formats", __doc__)
    counts = {"steps": (3000, "of training"), "seeds": (3, "runs of each"), "processes": (2, "that train at a time")}
    of_gpt = {"width": (128, ""), "layers": (3, ""), "heads": (4, ""), "context": (32, ", in bytes")}
    for name, (default, what) in {**counts, **{n: (d, f"of the GPT{w}") for n, (d, w) in of_gpt.items()}}.items():
        parser.add_count(name, default, what)
    parser.add_out("out/formats")
    args = parser.parse_args(argv)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    args.out.mkdir(parents=True, exist_ok=True)

    console = Console(stderr=True)
    config = GPTConfig(args.layers, args.width, args.heads, args.context)
    curves: dict[str, list[list[float]]] = {name: [] for name in contenders()}
    runs = [(name, seed) for seed in range(args.seeds) for name in curves]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"), _begin) as pool:
        found = pool.map(functools.partial(train, config=config, steps=args.steps), *zip(*runs, strict=True))
        for (name, _), losses in zip(runs, track(found, "training", len(runs), console=console), strict=True):
            curves[name].append(losses)
    rows = [row(name, of_seeds) for name, of_seeds in curves.items()]
    with torch.compiler.set_stance("force_eager"):
        hard = hard_problems(console)
    tables = Console()
    tables.print(table_of("Bytes of a parameter, seconds of an update, and how training ended", rows))
    tables.print(table_of("Loss over AdamW's", [{"problem": title, **losses} for title, losses in hard.items()]))
    save_spread(curves, args.out / "formats.png")
    figures = {"rows": rows, "hard": hard, "steps": args.steps, "seeds": args.seeds, "model": asdict(config)}
    (args.out / "formats.json").write_text(json.dumps(figures | {"curves": curves}) + "\n")
    return finish(figures, console, args.json)


def _begin() -> None:
    """In each process: one core, and no compiling. torchao compiles its update for minutes, to the same effect."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")


def contenders() -> dict[str, Make]:
    """All optimizers, by the name of their row."""
    found: dict[str, Make] = {"AdamW": lambda p: AdamW(p, **SETTINGS)}
    for name, state_format in {**FORMATS, INT8: "int8"}.items():
        found[name] = functools.partial(DOSAdam, **SETTINGS, state_format=state_format)
    for name, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        try:
            kind = importlib.import_module(module).AdamW8bit
        except ImportError:
            continue
        found[name] = functools.partial(kind, **SETTINGS)
    return found


def train(name: str, seed: int, config: GPTConfig, steps: int) -> list[float]:
    """The loss of each step. The learning rate rises for a tenth of the steps and falls to 0, in straight lines."""
    torch.manual_seed(seed)
    model = GPT(config, dtype=torch.bfloat16 if name in FORMATS else torch.float32)
    optimizer = contenders()[name](model.parameters())
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / (0.1 * steps), 1 - step / steps))
    losses = []
    batches = Corpus(standard_library(), config.context).batches(steps, BATCH, seed)
    for tokens, targets in batches:
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def row(name: str, curves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A row: bytes of a bfloat16 parameter, seconds of an update, and how training ended."""
    finals = [statistics.fmean(losses[-LAST:]) for losses in curves]
    keys = ("host_bytes_per_parameter", "device_bytes_per_parameter", "link_bytes_each_way")
    bytes_and_speed: dict[str, Any] = dict.fromkeys((*keys, "update_s_cpu", "update_s_streamed"))
    if name in FORMATS:
        state = format_of("bfloat16", state_format=FORMATS[name])
        host = HostBytes.of(1 << 20, state, accelerated=True)
        bytes_and_speed |= {
            "host_bytes_per_parameter": (host.total - host.gradient_staging) / (1 << 20),
            "device_bytes_per_parameter": state.state_bytes,
            "link_bytes_each_way": state.state_bytes,
            "update_s_cpu": update_s(FORMATS[name], cpu_only),
            "update_s_streamed": update_s(FORMATS[name], lambda work: stride(work, 1, slots=3)),
        }
    final = {"final_loss": statistics.fmean(finals), "loss_spread": max(finals) - min(finals)}
    return {"format": name, **bytes_and_speed, **final}


def update_s(state_format: str | None, policy: Callable[[Workload], Plan]) -> float:
    """Seconds of an update of bfloat16 parameters on the emulated device, with nothing resident: the median of 5."""
    size = TIMED_NUMEL // SUBGROUPS
    slow = slowed(HardwareProfile.builtin("h100"), equal_subgroups(TIMED_NUMEL, size), TIMED_S)
    parameter = nn.Parameter(torch.randn(TIMED_NUMEL, dtype=torch.bfloat16))
    return measured_update_s([parameter], policy, size, slow, 5, state_format)


def hard_problems(console: Console) -> dict[str, dict[str, float]]:
    """The final loss of each contender on problems with badly scaled gradients, relative to AdamW's.

    Gradients differ by six orders of magnitude from row to row, where blocks lie within rows; from column to column,
    where elements that share a scale differ by three orders; rows of an embedding are mostly rarely seen, by Zipf's
    law, and have dense gradients; and in one step of a hundred gradients are a thousand times as large.
    """
    problems: dict[str, Callable[[Make], float]] = {
        "rows over six orders": lambda make: _regression(make, torch.logspace(0, -6, 64)[:, None]),
        "columns over six orders": lambda make: _regression(make, torch.logspace(0, -6, 256)[None, :]),
        "sparse embedding": _sparse_embedding,
        "spikes": lambda make: _regression(make, torch.ones(()), lambda step: 1000.0 if step % 100 == 50 else 1.0),
    }
    found = {}
    for title, problem in problems.items():
        losses = {name: problem(make) for name, make in contenders().items() if name not in FORMATS}
        console.print(f"{title}: {losses}")
        found[title] = {name: loss / losses["AdamW"] for name, loss in losses.items()}
    return found


def _regression(make: Make, scale: Tensor, spike: Callable[[int], float] = lambda step: 1.0) -> float:
    """Each element's loss is weighted, so that gradients are `scale`d."""

    def loss_of(parameter: Tensor, wanted: Tensor, generator: torch.Generator, step: int) -> Tensor:
        noisy = wanted + torch.randn(wanted.shape, generator=generator)
        return spike(step) * (scale * (parameter - noisy).square()).mean()

    return _fitted(make, (64, 256), loss_of)


def _sparse_embedding(make: Make) -> float:
    seen = 1 / torch.arange(1.0, 513.0)

    def loss_of(parameter: Tensor, wanted: Tensor, generator: torch.Generator, step: int) -> Tensor:
        rows = torch.multinomial(seen, 64, replacement=True, generator=generator)
        noisy = wanted[rows] + 0.1 * torch.randn(64, 128, generator=generator)
        return (nn.functional.embedding(rows, parameter) - noisy).square().mean()

    return _fitted(make, (512, 128), loss_of, weight=(seen / seen.mean())[:, None])


def _fitted(make: Make, shape: tuple[int, int], loss_of: Callable[..., Tensor], weight: Tensor | float = 1.0) -> float:
    """How far a matrix is from another in the end, to which it is fitted from noisy samples with a learning rate that
    falls to 0: the mean of squares, in which elements weigh alike or as `weight` says."""
    generator = torch.Generator().manual_seed(0)
    wanted = 0.3 * torch.randn(shape, generator=generator)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = make([parameter])
    optimizer.param_groups[0]["weight_decay"] = 0.0
    schedule = LambdaLR(optimizer, lambda step: 1 - step / HARD_STEPS)
    distance = []
    for step in range(HARD_STEPS):
        distance.append(((parameter.detach() - wanted).square() * weight).mean().item())
        optimizer.zero_grad()
        loss_of(parameter, wanted, generator, step).backward()
        optimizer.step()
        schedule.step()
    return statistics.fmean(distance[-LAST:])


if __name__ == "__main__":
    sys.exit(main())
