"""What does a step cost the host? ``python -m experiments.overhead [--json]``, about three minutes.

Microseconds per parameter of `step()`, and of the hooks that it has on backward, beside torch's AdamW in the same
process. Contenders take turns, and figures are medians over the rounds. Parameters "on the device" are on a GPU if
there is one, else on an emulated accelerator so fast that only the host's work is left; there all state is resident.

Exit status 1 if a step takes longer than the limits below allow.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, table
from experiments.miniature import without_fixed_costs
from perfmodel.hardware import HardwareProfile

SIZES = ((100, 64), (600, 64), (4000, 64), (100, 4096), (600, 4096), (4000, 4096), (100, 1 << 20))
"""Parameters, and elements of each."""
WARM_UP = 3
HOST = 1.05
"""Times as long as AdamW(fused=True), with parameters on the host, that a step may take."""
DEVICE = 1.25
"""The same with parameters on the device, besides FIXED_S. With its hooks on backward, no more than AdamW(foreach=True)
besides FIXED_S."""
FIXED_S = 1e-3
"""Seconds that a step on the device may take however few parameters there are, in which it is planned."""
INSTANT = without_fixed_costs(HardwareProfile.builtin("h100")).scaled(1e4)
"""So fast that what it emulates costs nothing."""


class Give(torch.autograd.Function):
    """A backward of one node, which gives each parameter a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if something was missed."""
    parser = Parser(prog="python -m experiments.overhead", description="What a step costs the host, per parameter.")
    parser.add_json()
    parser.add_count("rounds", 15, "that figures are medians of")
    parser.add_count("most", None, "leave out what has more parameters")
    arguments = parser.parse_args(argv)
    console = Console(stderr=arguments.json)
    sizes = [size for size in SIZES if size[0] <= (arguments.most or size[0])]
    with console.status("measuring"):
        rows = [measure(*size, where, arguments.rounds) for size in sizes for where in ("host", "device")]
    console.print(show(rows))
    missed = [what for row in rows for what in misses(row)]
    console.print(f"missed: {', '.join(missed) or 'nothing'}")
    if arguments.json:
        print(json.dumps({"rows": rows, "missed": missed}))
    return int(bool(missed))


def misses(row: dict[str, Any]) -> list[str]:
    """What was to hold and does not."""
    step, hooks, fused, foreach = (
        row[f"{name}_us_per_parameter"] for name in ("step", "hooks", "adamw_fused", "adamw_foreach")
    )
    on_host, fixed = row["where"] == "host", FIXED_S / row["parameters"] * 1e6
    found = {
        f"step() takes more than {HOST} times AdamW(fused=True)": on_host and step > HOST * fused,
        f"step() takes more than {DEVICE} times AdamW(fused=True) and {FIXED_S * 1e3:.0f} ms": not on_host
        and step > DEVICE * fused + fixed,
        f"step() and hooks take more than AdamW(foreach=True) and {FIXED_S * 1e3:.0f} ms": step + hooks
        > foreach + (0.0 if on_host else fixed),
    }
    where = f"{row['parameters']} of {row['elements']} on the {row['where']}"
    return [f"{where}: {what}" for what, missed in found.items() if missed]


def measure(count: int, elements: int, where: str, rounds: int) -> dict[str, Any]:
    """A row: one number and size of parameters in one place. All contenders take turns."""
    on_gpu = where == "device" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(elements, device=device)) for _ in range(count)]

    gradients = [torch.full((elements,), 1e-3, device=device) for _ in range(count)]
    settings: dict[str, Any] = {}
    if where == "device":
        emulated = None if on_gpu else EmulatedDevice(INSTANT, capacity=1 << 50)
        settings = {"policy": 0.0, "device": emulated}
    mine, plain = parameters(), parameters()
    ours = DOSAdam(mine, **settings)
    contenders: dict[str, Callable[[], object]] = {
        "step": _stepper(ours, mine, gradients),
        "fused": _stepper(torch.optim.AdamW(plain, fused=True), plain, gradients),
        "foreach": _stepper(torch.optim.AdamW(plain, foreach=True), plain, gradients),
        "hooks": _backward(mine, gradients),
        "no hooks": _backward(plain, gradients),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    for round_number in range(WARM_UP + rounds):
        for name, work in contenders.items():
            ours.zero_grad()
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            if on_gpu:
                torch.cuda.synchronize()
            if round_number >= WARM_UP:
                found[name].append(seconds / count * 1e6)
    us = {name: statistics.median(values) for name, values in found.items()}
    hooks = statistics.median(a - b for a, b in zip(found["hooks"], found["no hooks"], strict=True))
    return {
        "parameters": count,
        "elements": elements,
        "where": where,
        "step_us_per_parameter": us["step"],
        "hooks_us_per_parameter": max(0.0, hooks),
        "adamw_fused_us_per_parameter": us["fused"],
        "adamw_foreach_us_per_parameter": us["foreach"],
    }


def _stepper(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Callable[[], object]:
    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


def _backward(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Callable[[], object]:
    def backward() -> None:
        for parameter in parameters:
            parameter.grad = None
        Give.apply(gradients, *parameters).backward()

    return backward


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """For people."""
    headings = ("parameters", "elements", "where", "step", "hooks", "AdamW fused", "AdamW foreach")
    cells = ([f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)
    return table("Microseconds of the host per parameter", headings, cells, left=0)


if __name__ == "__main__":
    sys.exit(main())
