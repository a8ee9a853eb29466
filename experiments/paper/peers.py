"""Runs of other projects that train from host memory, beside the planner's tokens per second for the same job."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.paper.runs import DATA
from perfmodel.planner.machine import find_machine
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import parse_parameters
from perfmodel.planner.whatif import most

PEERS = DATA / "peers_throughput.csv"
"""Tokens per second of full fine-tuning on one GPU, as their authors published them. gpu_memory_gib is what the run was
given. tokens_per_step is empty where it was not published."""
ASSUMED_TOKENS = 115_000
"""Tokens of such a step: those of ml_dataflow's runs on an RTX 5090, the GPU of most."""


def question_of(run: Mapping[str, str], models: Mapping[str, Mapping[str, Any]]) -> Question:
    """The question of a run: its model, machine and memory of the GPU, with DOSAdam's state in place of its own.

    Host memory counts as enough: their state takes less of it. models: configurations by name; of others the name is
    the number of parameters, and the shape the usual one.
    """
    known, name = models.get(run["model"]), run["model"]
    machine = find_machine(run["machine"], None)
    assert machine.gpu is not None, "all of these are known"
    rate, source = machine.flops_rate("bf16", None, None)
    return Question(
        Transformer.from_config(known) if known else Transformer.of_size(parse_parameters(name)),
        machine.profile,
        min(machine.device_bytes, int(float(run["gpu_memory_gib"]) * 2**30)),
        sequence=int(run["sequence"]),
        flops_rate=rate,
        flops_source=source,
        fused_loss=True,
        offload_gradients=True,
        offload_activations="auto",
        weights="auto",
    )


def steps(question: Question, tokens: int) -> Iterator[Question]:
    """Yield ways to take a step of about so many tokens: batches from the largest that fits down, without gaps."""
    sequences = max(1, round(tokens / question.sequence))
    batch = min(most(question, "batch", sequences), sequences)
    while batch:
        yield question.replace(batch=batch, micro_batches=-(-sequences // batch))
        batch = batch * 3 // 4


def planned(question: Question, tokens: int) -> float:
    """Tokens per second by the planner, at the best batch, with or without checkpointing; 0 if nothing fits."""
    found = 0.0
    for checkpointing in (True, False):
        best = 0.0
        for asked in steps(question.replace(checkpointing=checkpointing), tokens):
            faster = asked.step_tokens / adaptive_outcome(Situation(asked)).seconds
            if best and faster <= best:
                break
            best = faster
        found = max(found, best)
    return found


def row(run: Mapping[str, str], models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is compared of a run, a line of the file. residual: of the planner's tokens per second over the run's."""
    measured, tokens = float(run["tokens_per_s"]), int(run["tokens_per_step"] or ASSUMED_TOKENS)
    found, gpu = planned(question_of(run, models), tokens), find_machine(run["machine"], None).gpu
    return {
        "software": run["software"],
        "gpu": gpu and gpu.name,
        **{name: run[name] for name in ("gpu_memory_gib", "model", "sequence")},
        "tokens_per_step": tokens,
        "measured": measured,
        "planned": round(found),
        "residual": found / measured - 1,
    }


def read_rows(models: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all runs."""
    with PEERS.open(newline="") as file:
        return [row(run, models) for run in csv.DictReader(file)]
