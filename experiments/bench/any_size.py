"""The tables of docs/any-size.md: what trains on one GPU, by model, GPU and host memory, as the planner says.

    python -m experiments.any_size              # prints the tables

Nothing is measured. The best batch is searched together with the weights, state and saved tensors that stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.command import Parser, markdown
from experiments.paper.arithmetic import MODELS as SHAPES
from perfmodel.planner.fastest import fastest_batch
from perfmodel.planner.machine import find_machine
from perfmodel.planner.main import command_line, question_of
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer

MODELS = ("Llama 3.1 8B", "Qwen2.5 14B", "Qwen2.5 32B", "Llama 3.1 70B")
GPUS = ("rtx-4090", "rtx-5090", "h100")
HOSTS = (64, 128, 256, 512, 1024)
"""GB, as memory modules are sold."""
SETTINGS = "--checkpointing --offload-gradients --fused-loss --weights auto --offload-activations auto"
DRIVE = "--disk 4TB --disk-read 7GB --disk-write 5GB"
"""Where the host's memory is not enough."""


class Found(NamedTuple):
    """What trains most tokens per second: sequences of the batch, what limits it, and whether state is on disk."""

    tokens_per_s: float
    batch: int
    limit: str
    on_disk: bool

    def __str__(self) -> str:
        cell = f"{self.tokens_per_s:,.0f} ({self.batch}), {self.limit}"
        return f"*{cell}*" if self.on_disk else cell


def asked(model: str, gpu: str, host: int, *more: str) -> Question:
    """The question of one cell, as the command line would ask it. more: further options."""
    line = ["--params", "1e9", "--machine", gpu, "--host", f"{host}GB", *SETTINGS.split(), *more]
    question, _ = question_of(command_line().parse_args(line))
    return question.replace(model=Transformer.from_config(SHAPES[model]))


def find(model: str, gpu: str, host: int) -> Found | None:
    """What trains fastest, with a drive only if it does not fit without; None if nothing fits."""
    for drive in ((), DRIVE.split()):
        if best := fastest_batch(asked(model, gpu, host, *drive)):
            question, outcome = best
            assert outcome.plan is not None, "it fits"
            busy = Situation(question).busy_s(outcome.plan)
            limit = max(busy, key=busy.__getitem__)
            return Found(question.step_tokens / outcome.seconds, question.batch, limit, bool(drive))
    return None


def rows(gpu: str) -> Iterator[list[str]]:
    """The lines of one GPU's table, the first its heading."""
    yield ["host memory", *MODELS]
    for host in HOSTS:
        yield [f"{host} GB", *(str(find(model, gpu, host) or "-") for model in MODELS)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    Parser("any_size", __doc__).parse_args(argv)
    for name in GPUS:
        machine = find_machine(name, None)
        rate, source = machine.flops_rate("bf16", None, None)
        print(f"{name}: {rate / 1e12:.3g} TFLOP/s, {source}\n\n{markdown([*rows(name)])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
