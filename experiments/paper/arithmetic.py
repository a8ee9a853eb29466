"""Training runs that others published, against the planner's arithmetic and the model of ZeRO-3's loop.

    python -m experiments.arithmetic [--json]

For each run: seconds of a step as measured, and of its forward and backward alone by the planner, which must be fewer
where the planner's share of the peak follows from the run. Of runs by DeepSpeed's ZeRO-3 with parameters and optimizer
state offloaded, whose state is AdamW's in float32, also what the model of its loop gives: layers fetched one ahead of
compute (`perfmodel.planner.overlap`), gradients that are copied blocking, and the update of `experiments.zero3`, on the
built-in desktop with that GPU. Of projects that train from host memory, the planner's tokens per second for the same
job (`experiments.paper.peers`). No fit is made.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.command import Parser, table_of
from experiments.harness import Limit, console_of, finish
from experiments.paper import peers
from experiments.paper.runs import DATA
from experiments.paper.zero3 import Mode, Run, update_seconds
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import GPUS, Gpu
from perfmodel.planner.overlap import Pass, backward_s, forward_s
from perfmodel.planner.transformer import Transformer

TRAINING_RUNS = DATA / "training_runs.csv"
"""Tokens per second of one GPU, with where they were published. Sequences of SlideFormer's runs are padded to 1,024
tokens, from 341 on, which products of weights do not leave out."""
MODELS: Mapping[str, Mapping[str, Any]] = json.loads((DATA / "training_models.json").read_text())
"""Their models' configurations, as far as operations depend on them."""
DESKTOPS = {"RTX 4090": "rtx_4090_desktop"}
"""Built-in machines by GPU; which host the runs had is not published."""
SUBGROUP_SIZE = 10**9
"""Of DeepSpeed, unless it is set."""
VALUE_BYTES = 2
BY_THESE_RUNS = ("H100 80 GB", "RTX 4090")
"""GPUs of which the planner's utilisation follows from the runs of this file."""
STEP = 0.05
"""To whose next multiple it is rounded up, by the fastest run."""
RESIDUAL = 0.15
"""Of the model of ZeRO-3's loop, at most; and of the planner for runs of peers, in the median."""


def row(run: Mapping[str, str]) -> dict[str, Any]:
    """Everything that is compared of a run, a line of the file; None for what there is no model of. Of one GPU.

    utilisation: share of the GPU's peak that the run reached, with whatever else it did.
    measured_s, compute_s: seconds of a step, and of its forward and backward alone by the planner.
    """
    gpu = next(gpu for gpu in GPUS.values() if gpu.name == run["gpu"])
    model = Transformer.from_config(MODELS[run["model"]])
    batch, sequence, micro_batches = (int(run[name]) for name in ("batch", "sequence", "micro_batches"))
    tokens, peak = batch * sequence, gpu.peak("bf16")
    flops = model.flops(tokens, sequence, checkpointing=run["checkpointing"] == "1")
    forward, backward = (of_pass / (gpu.utilisation * peak) for of_pass in flops)
    seconds = tokens * micro_batches / float(run["tokens_per_s"])
    modelled = modelled_s(gpu, model, batch, forward, backward) if run["zero3_offload"] == "1" else None
    return {
        "gpu": gpu.name,
        "model": run["model"],
        "software": run["software"],
        "batch": batch,
        "micro_batches": micro_batches,
        "measured_s": seconds,
        "utilisation": sum(flops) * micro_batches / seconds / peak,
        "planned_utilisation": gpu.utilisation,
        "compute_s": (forward + backward) * micro_batches,
        "modelled_s": modelled,
        "residual": None if modelled is None else modelled / seconds - 1,
    }


def modelled_s(gpu: Gpu, model: Transformer, batch: int, forward: float, backward: float) -> float:
    """Seconds of a step of one micro-batch by the model of ZeRO-3's loop. forward, backward: seconds of compute."""
    profile = HardwareProfile.builtin(DESKTOPS[gpu.name])
    nbytes = VALUE_BYTES * model.numel
    up, down = nbytes / profile.h2d_bandwidth, nbytes / profile.d2h_bandwidth
    whole_forward = forward_s(Pass(forward, up=up), model.layers)
    loop = Run(
        mode=Mode.ZERO3_OFFLOAD,
        params=model.numel,
        model_params=model.numel,
        subgroups=math.ceil(model.numel / SUBGROUP_SIZE),
        cpu_ratio=1.0,
        stride=0,
        ranks_per_host=1,
        micro_batches=1,
        micro_batch_size=batch,
        forward_s=whole_forward,
    )
    return whole_forward + backward_s(Pass(backward + down, up=up), model.layers) + update_seconds(loop, profile)


def read_rows() -> list[dict[str, Any]]:
    """The rows of all runs."""
    with TRAINING_RUNS.open(newline="") as file:
        return list(map(row, csv.DictReader(file)))


def limits(rows: Sequence[Mapping[str, Any]]) -> list[Limit]:
    """Limits of the planner and of the model of the loop, as docs/planning.md has them."""
    found = []
    for row in rows:
        name = f"{row['model']} on {row['gpu']}, batch {row['batch']}"
        if row["gpu"] in BY_THESE_RUNS:
            longer = f"{name}: compute alone takes longer than the run"
            found.append(Limit.at_most(longer, row["compute_s"], row["measured_s"]))
        if row["residual"] is not None:
            off = f"{name}: the model of the loop is off by {row['residual']:+.0%}"
            found.append(Limit.at_most(off, abs(row["residual"]), RESIDUAL))
    for gpu in BY_THESE_RUNS:
        fastest, planned = (
            max(row[key] for row in rows if row["gpu"] == gpu) for key in ("utilisation", "planned_utilisation")
        )
        name = f"{gpu}: {planned:.0%} is not {fastest:.1%} rounded up to the next {STEP:.0%}"
        found.append(
            Limit(name, fastest, f"from {planned - STEP:.0%} to {planned:.0%}", planned - STEP <= fastest < planned)
        )
    return found


def median_residual(rows: Sequence[Mapping[str, Any]]) -> float:
    """The median of how far predictions are off, up or down."""
    return statistics.median(abs(row["residual"]) for row in rows if row["residual"] is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if something is missed."""
    parser = Parser("arithmetic", __doc__)
    options = parser.parse_args(arguments)
    rows, others = read_rows(), peers.read_rows(MODELS)
    console = console_of(options.json)
    console.print(table_of("Published runs, seconds of a step", rows, left=3))
    console.print(table_of("Runs from host memory, tokens per second", others, left=4))
    off = median_residual([*rows, *others])
    console.print(f"Predictions are off by {off:.1%} in the median")
    all_limits = [*limits(rows), Limit.at_most("predictions are off by more in the median", off, RESIDUAL)]
    return finish({"runs": rows, "peers": others}, console, options.json, all_limits)


if __name__ == "__main__":
    sys.exit(main())
