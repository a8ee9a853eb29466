"""Training runs that others published, against the planner's arithmetic and the model of ZeRO-3's loop.

    python -m experiments.arithmetic [--json]

For each run: seconds of a step as measured, and of its forward and backward alone by the planner, which must be fewer.
Of runs by DeepSpeed's ZeRO-3 with parameters and optimizer state offloaded, whose state is AdamW's in float32, also
what the model of its loop gives: layers fetched one ahead of compute (`perfmodel.planner.overlap`), gradients that
leave blocking, and the update of `experiments.zero3`, on the built-in desktop with that GPU. Nothing is fitted.
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

from experiments.command import Parser, seconds, table
from experiments.paper.runs import DATA
from experiments.paper.zero3 import Mode, Run, update_seconds
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import GPUS, Gpu
from perfmodel.planner.overlap import Pass, backward_s, forward_s
from perfmodel.planner.transformer import Transformer

TRAINING_RUNS = DATA / "training_runs.csv"
"""Tokens per second of one GPU, with where they were published. Sequences of SlideFormer's runs are padded to 1,024
tokens, from 341 on, which products of weights do not leave out."""
MPT_7B = {"n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 50368, "n_positions": 1024}
LLAMA_31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN_25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_25_14B = QWEN_25_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "MPT 7B": MPT_7B,
    "Llama 3.1 8B": LLAMA_31_8B,
    "Qwen2.5 7B": QWEN_25_7B,
    "Qwen2.5 14B": QWEN_25_14B,
}
"""Their configurations, as far as operations depend on them."""
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
        """The same of a step."""
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


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the planner or the model of the loop is not what docs/planning.md says, a line each."""
    found = []
    for row in rows:
        name = f"{row['model']} on {row['gpu']}, batch {row['batch']}"
        if row["compute_s"] >= row["measured_s"]:
            found.append(f"{name}: compute alone takes longer than the run")
        if row["residual"] is not None and abs(row["residual"]) > RESIDUAL:
            found.append(f"{name}: the model of the loop is off by {row['residual']:+.0%}")
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        fastest, planned = (
            max(row[key] for row in rows if row["gpu"] == gpu) for key in ("utilisation", "planned_utilisation")
        )
        if not planned - STEP <= fastest < planned:
            found.append(f"{gpu}: {planned:.0%} is not {fastest:.1%} rounded up to the next {STEP:.0%}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if something is missed."""
    parser = Parser(prog="python -m experiments.arithmetic", description=__doc__.splitlines()[0])
    parser.add_json()
    options = parser.parse_args(arguments)
    rows = [run.row() for run in read_training_runs()]
    headings = ("GPU", "model", "software", "batch", "measured", "of the peak", "compute alone", "loop", "residual")
    cells = [
        [
            *(row[name] for name in ("gpu", "model", "software")),
            f"{row['batch']}" + (f" x {row['micro_batches']}" if row["micro_batches"] > 1 else ""),
            *seconds(row["measured_s"], digits=2),
            f"{row['utilisation']:.0%}",
            *seconds(row["compute_s"], row["modelled_s"], digits=2),
            "" if row["residual"] is None else f"{row['residual']:+.0%}",
        ]
        for row in rows
    ]
    Console().print(table("Published runs, seconds of a step", headings, cells, left=3))
    missed = misses(rows)
    for line in missed:
        print(f"missed: {line}")
    if options.json:
        print(json.dumps(rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
