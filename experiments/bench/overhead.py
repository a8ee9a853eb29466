"""The time of the host that a step takes, per parameter: `python -m experiments.overhead [--json]`, three minutes.

Microseconds per parameter of `step()`, and of the hooks that it has on backward, beside torch's AdamW in the same
process. Contenders take turns, and figures are medians over the rounds. Parameters "on the device" are on a GPU if
there is one, else on an emulated accelerator so fast that only the host's work is left; there all state is resident.

Exit status 1 if a step takes longer than the limits below allow.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, table_of
from experiments.harness import Limit, finish, measuring, medians, take_turns, timed
from experiments.miniature import without_fixed_costs
from perfmodel.hardware import HardwareProfile

SIZES = ((100, 64), (600, 64), (4000, 64), (100, 4096), (600, 4096), (4000, 4096), (100, 1 << 20))
"""Parameters, and elements of each."""
WARM_UP = 3
HOST = 1.05
"""Times as long as AdamW(fused=True), with parameters on the host, that a step may take."""
DEVICE = 1.25
"""Times as long with parameters on the device, besides FIXED_S. With its hooks on backward, no more than
AdamW(foreach=True) besides FIXED_S."""
FIXED_S = 1e-3
"""Seconds that a step on the device may take however few parameters there are, in which it is planned."""
INSTANT = without_fixed_costs(HardwareProfile.builtin("h100")).scaled(1e4)
"""So fast that emulated work takes no time."""


class Give(torch.autograd.Function):
    """A backward of one node, which gives each parameter a gradient that is there already.

    As another tensor of the same memory, which autograd takes: a copy's new memory takes from nothing to half a
    millisecond for a million elements.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *(gradient.detach() for gradient in ctx.gradients)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if something was missed."""
    parser = Parser("overhead", __doc__)
    parser.add_count("rounds", 15, "that figures are medians of")
    parser.add_count("most", None, "leave out rows of more parameters")
    arguments = parser.parse_args(argv)
    sizes = [size for size in SIZES if size[0] <= (arguments.most or size[0])]
    with measuring(arguments.json, emulated=False) as (console, _):
        rows = [measure(*size, where, arguments.rounds) for size in sizes for where in ("host", "device")]
    console.print(table_of("Microseconds of the host", rows, left=0))
    return finish({"rows": rows}, console, arguments.json, [limit for row in rows for limit in limits(row)])


def limits(row: dict[str, Any]) -> list[Limit]:
    """Limits of a row, in microseconds per parameter."""
    step, hooks, fused, foreach = (
        row[f"{name}_us_per_parameter"] for name in ("step", "hooks", "adamw_fused", "adamw_foreach")
    )
    where = f"{row['parameters']} of {row['elements']} on the {row['where']}: step()"
    fixed, fixed_ms = FIXED_S / row["parameters"] * 1e6, f"{FIXED_S * 1e3:.0f} ms"
    both = f"{where} and hooks take more than AdamW(foreach=True) and {fixed_ms}"
    if row["where"] == "host":
        return [
            Limit.at_most(f"{where} takes more than {HOST} times AdamW(fused=True)", step, HOST * fused),
            Limit.at_most(both, step + hooks, foreach),
        ]
    alone = f"{where} takes more than {DEVICE} times AdamW(fused=True) and {fixed_ms}"
    return [Limit.at_most(alone, step, DEVICE * fused + fixed), Limit.at_most(both, step + hooks, foreach + fixed)]


def measure(count: int, elements: int, where: str, rounds: int) -> dict[str, Any]:
    """A row: one number and size of parameters in one place."""
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

    def turn(work: Callable[[], object], _: int) -> float:
        ours.zero_grad()
        seconds = timed(work)
        if on_gpu:
            torch.cuda.synchronize()
        return seconds / count * 1e6

    work = {
        "step": _stepper(ours, mine, gradients),
        "fused": _stepper(torch.optim.AdamW(plain, fused=True), plain, gradients),
        "foreach": _stepper(torch.optim.AdamW(plain, foreach=True), plain, gradients),
        "hooks": _backward(mine, gradients),
        "no hooks": _backward(plain, gradients),
    }
    gc.collect()
    contestants = {name: partial(turn, each) for name, each in work.items()}
    found = take_turns(contestants, range(WARM_UP + rounds), warm_up=WARM_UP)
    us = medians(found)
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


if __name__ == "__main__":
    sys.exit(main())
