"""Training runs that others published, against the planner's arithmetic and the model of ZeRO-3's loop.

    python -m experiments.arithmetic [--json]

For each run: seconds of a step as measured, and of its forward and backward alone by the planner, which must be fewer.
Of runs by DeepSpeed's ZeRO-3 with parameters and optimizer state offloaded, whose state is AdamW's in float32, also
what the model of its loop gives: layers fetched one ahead of compute (`perfmodel.planner.overlap`), gradients
that are copied blocking, and the update of `experiments.zero3`, on the built-in desktop with that GPU. No fit is made.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.command import Parser, table_of
from experiments.harness import Limit, finish
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
STEP = 0.05
"""To whose next multiple the planner's utilisation is rounded up, by the fastest run."""
RESIDUAL = 0.15
"""Of the model of ZeRO-3's loop, at most."""


@dataclass(frozen=True)
class TrainingRun:
    """A published run, of one GPU. seconds: of a step. zero3_offload: whether the model of ZeRO-3's loop is of it."""

    gpu: Gpu
    name: str
    model: Transformer
    sequence: int
    batch: int
    micro_batches: int
    checkpointing: bool
    zero3_offload: bool
    seconds: float
    software: str

    @property
    def flops(self) -> tuple[float, float]:
        """Operations of forward and backward of a micro-batch."""
        return self.model.flops(self.batch * self.sequence, self.sequence, checkpointing=self.checkpointing)

    @property
    def utilisation(self) -> float:
        """Share of the GPU's peak that the run reached, with whatever else it did."""
        return sum(self.flops) * self.micro_batches / self.seconds / self.gpu.peak("bf16")

    @property
    def pass_s(self) -> tuple[float, float]:
        """Seconds of forward and backward of a micro-batch, by the planner."""
        forward, backward = (flops / (self.gpu.utilisation * self.gpu.peak("bf16")) for flops in self.flops)
        return forward, backward

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of a step, by the planner."""
        return sum(self.pass_s) * self.micro_batches

    @property
    def modelled_s(self) -> float:
        """Seconds of a step of one micro-batch by the model of ZeRO-3's loop."""
        profile = HardwareProfile.builtin(DESKTOPS[self.gpu.name])
        numel, layers, (forward, backward) = self.model.numel, self.model.layers, self.pass_s
        nbytes = VALUE_BYTES * numel
        passes = (
            forward_s(Pass(forward, up=nbytes / profile.h2d_bandwidth), layers),
            backward_s(Pass(backward + nbytes / profile.d2h_bandwidth, up=nbytes / profile.h2d_bandwidth), layers),
        )
        loop = Run(
            mode=Mode.ZERO3_OFFLOAD,
            params=numel,
            model_params=numel,
            subgroups=math.ceil(numel / SUBGROUP_SIZE),
            cpu_ratio=1.0,
            stride=0,
            ranks_per_host=1,
            micro_batches=1,
            micro_batch_size=self.batch,
            forward_s=passes[0],
        )
        return sum(passes) + update_seconds(loop, profile)

    def row(self) -> dict[str, Any]:
        """Everything about it that is compared, as plain values; None for what there is no model of."""
        modelled_s = self.modelled_s if self.zero3_offload else None
        return {
            "gpu": self.gpu.name,
            "model": self.name,
            "software": self.software,
            "batch": self.batch,
            "micro_batches": self.micro_batches,
            "measured_s": self.seconds,
            "utilisation": self.utilisation,
            "planned_utilisation": self.gpu.utilisation,
            "compute_s": self.compute_s,
            "modelled_s": modelled_s,
            "residual": None if modelled_s is None else modelled_s / self.seconds - 1,
        }


def read_training_runs(path: str | Path = TRAINING_RUNS) -> list[TrainingRun]:
    """The runs of the file."""
    gpus = {gpu.name: gpu for gpu in GPUS.values()}
    runs = []
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            batch, sequence, times = (int(row[name]) for name in ("batch", "sequence", "micro_batches"))
            runs.append(
                TrainingRun(
                    gpus[row["gpu"]],
                    row["model"],
                    Transformer.from_config(MODELS[row["model"]]),
                    sequence,
                    batch,
                    times,
                    row["checkpointing"] == "1",
                    row["zero3_offload"] == "1",
                    batch * sequence * times / float(row["tokens_per_s"]),
                    row["software"],
                )
            )
    return runs


def limits(rows: Sequence[Mapping[str, Any]]) -> list[Limit]:
    """Limits of the planner and of the model of the loop, as docs/planning.md has them."""
    found = []
    for row in rows:
        name = f"{row['model']} on {row['gpu']}, batch {row['batch']}"
        found.append(
            Limit.at_most(f"{name}: compute alone takes longer than the run", row["compute_s"], row["measured_s"])
        )
        if row["residual"] is not None:
            off = f"{name}: the model of the loop is off by {row['residual']:+.0%}"
            found.append(Limit.at_most(off, abs(row["residual"]), RESIDUAL))
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        fastest, planned = (
            max(row[key] for row in rows if row["gpu"] == gpu) for key in ("utilisation", "planned_utilisation")
        )
        name = f"{gpu}: {planned:.0%} is not {fastest:.1%} rounded up to the next {STEP:.0%}"
        found.append(
            Limit(name, fastest, f"from {planned - STEP:.0%} to {planned:.0%}", planned - STEP <= fastest < planned)
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if something is missed."""
    parser = Parser("arithmetic", __doc__)
    parser.add_json()
    options = parser.parse_args(arguments)
    rows = [run.row() for run in read_training_runs()]
    console = Console(stderr=options.json)
    console.print(table_of("Published runs, seconds of a step", rows, left=3))
    missed = limits(rows)
    for limit in missed:
        if limit.missed:
            console.print(f"missed: {limit.name}")
    return finish(rows, console, options.json) or int(any(limit.missed for limit in missed))


if __name__ == "__main__":
    sys.exit(main())
