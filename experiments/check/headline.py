"""Tokens per second of each optimizer where AdamW does not fit: 6.6 billion parameters on one GPU of 80 GB.

    python -m experiments.headline [--micro-batches N] [--contender NAME] [--json]

All parameters are trained, in bfloat16 with float32 masters where nothing else is said; a micro-batch has 8,192 tokens.
Each contender runs in a process of its own. "No optimizer" is the ceiling. Beside DOSAdam's figures is what the planner
(`python -m perfmodel`) says of them. Without a GPU the accelerator is emulated and the model tiny: that shows that
everything runs, and no figure means anything.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import itertools
import os
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dos import DOSAdam
from experiments.check import environment
from experiments.check.base import Bench, Check, Record, Settings, Size, Skipped, Status, run_isolated
from experiments.check.contenders import (
    NOTHING,
    PEERS,
    PLAIN,
    Broken,
    Contender,
    Kind,
    Own,
    Trains,
    reference,
)
from experiments.check.contest import Clock, iterate
from experiments.check.gpu_check import RESULTS, find_gpu, slug
from experiments.check.models import SETTINGS, Batch, Job, emulated_device, prepare
from experiments.command import Parser, table_of
from experiments.gpt import GPTConfig
from experiments.harness import finish, measuring
from perfmodel.planner.machine import find_machine
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer

JOBS = {
    Size.TINY: Job(GPTConfig(2, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2),
    Size.FULL: Job(GPTConfig(32, 4096, 32, context=2048, vocabulary=32000, checkpointing=True), batch=4),
}
TIMED = {Size.TINY: 2, Size.FULL: 6}
LEARNING = {Size.TINY: 2, Size.FULL: 14}
"""Iterations of DOSAdam before those that count; of others SETTLING."""
SETTLING = 2
SECONDS = 150.0
"""That a contender may take."""
DOES_NOT_FIT = "does not fit"
COLUMNS = ("contender", "tokens_per_s", "spread", "predicted_tokens_per_s", "gpu_bytes", "host_bytes", "note")


@dataclass(frozen=True)
class Way:
    """One way to train. options: of DOSAdam. attach: options of `DOSAdam.attach`. kind: another optimizer's."""

    name: str
    options: Mapping[str, Any] | None = None
    attach: Mapping[str, Any] | None = None
    kind: Kind | None = None


OURS = (
    Way("DOSAdam", {}, {}),
    Way("DOSAdam, clipping", {"max_grad_norm": 1.0}, {}),
    Way("DOSAdam, updates in backward", {}, {"updates": "backward"}),
)


def ways() -> list[Way]:
    """All of them, the ceiling first."""
    references = [Way(name, kind=reference(name, None)) for name in (NOTHING, PLAIN)]
    peers = [Way(kind.name, kind=kind) for kind in (*PEERS, FSDP2)]
    return [references[0], *OURS, references[1], *peers]


def fsdp2(model: Any, job: Job) -> Any:
    """Parameters, gradients and float32 state on the host, updated there by fused AdamW."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    model.cpu().float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=mixed, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))
    return torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


FSDP2 = Kind("FSDP2 CPUOffloadPolicy, fused AdamW", "torch", "float32 parameters on the host", fsdp2)


class Accumulating(Contender):
    """A contender with several micro-batches in each step."""

    def __init__(self, inner: Contender, micro_batches: int) -> None:
        self.name, self._inner, self._count = inner.name, inner, micro_batches
        self.open, self.close, self.step, self.metrics = inner.open, inner.close, inner.step, inner.metrics  # type: ignore[method-assign]

    def compute(self, batch: Batch) -> None:
        """Forward and backward of each micro-batch."""
        for _ in range(self._count):
            self._inner.compute(batch)


def train(name: str, micro_batches: int, bench: Bench) -> None:
    """Train one way, and note its figures."""
    way = {each.name: each for each in ways()}[name]
    if micro_batches > 1 and way.kind is not None and way.kind.package == "deepspeed":
        raise Skipped("its engine counts micro-batches itself, by another configuration")
    job, device = JOBS[bench.size], prepare(bench)
    size = -(-job.numel // 8)
    emulated = None if bench.cuda else emulated_device(job, size)
    contender = made(way, job, device, emulated, None if bench.cuda else size)
    batches, clock = itertools.cycle(job.batches(2, device)), Clock(bench.cuda)
    tokens = micro_batches * job.batch * job.config.context
    bench.note(parameters=job.numel, tokens_per_step=tokens)
    try:
        contender.open()
        running = Accumulating(contender, micro_batches)
        iterate(running, batches, clock, LEARNING[bench.size] if way.kind is None else SETTLING)
        seconds, _ = iterate(running, batches, clock, TIMED[bench.size])
    except torch.OutOfMemoryError:
        bench.note(note=DOES_NOT_FIT)
        return
    except Broken as error:
        bench.note(note=str(error))
        return
    bench.note(
        iteration_s=statistics.median(seconds),
        tokens_per_s=tokens / statistics.median(seconds),
        spread=f"{tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f}",
        gpu_bytes=torch.cuda.max_memory_reserved() if bench.cuda else None,
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        predicted_tokens_per_s=predicted(job, micro_batches) if bench.cuda and way.name == OURS[0].name else None,
        metrics=contender.metrics() if way.kind is None else {},
    )


def made(way: Way, job: Job, device: torch.device, emulated: Any, size: int | None) -> Contender:
    """The contender of a way, with a model of its own. Raises Skipped if its package is not installed."""
    if way.kind is not None:
        if importlib.util.find_spec(way.kind.package) is None:
            raise Skipped(f"{way.kind.package} is not installed")
        return Own(way.kind, job, device)
    model = job.model(device)
    optimizer = DOSAdam(model.parameters(), device=emulated, subgroup_size=size, **SETTINGS, **(way.options or {}))
    optimizer.attach(model, **(way.attach or {}))
    return Trains(way.name, model, optimizer)


def predicted(job: Job, micro_batches: int) -> float | None:
    """Tokens per second as the planner says of DOSAdam on this GPU; None if it does not know it."""
    name = torch.cuda.get_device_name().lower()
    short = next((known for known in ("h100", "h200", "rtx-4090", "rtx-5090") if known.split("-")[-1] in name), None)
    if short is None:
        return None
    machine, c = find_machine(short, None), job.config
    rate, source = machine.flops_rate("bf16", None, None)
    sizes = {"n_embd": c.width, "n_layer": c.layers, "n_head": c.heads, "n_positions": c.context}
    question = Question(
        Transformer.from_config({**sizes, "vocab_size": c.vocabulary}),
        machine.profile,
        machine.device_bytes,
        batch=job.batch,
        sequence=c.context,
        checkpointing=True,
        micro_batches=micro_batches,
        accumulation=micro_batches > 1,
        flops_rate=rate,
        flops_source=source,
    )
    return question.step_tokens / adaptive_outcome(Situation(question)).seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the contenders one after the other, and print; the last line is one JSON object with --json."""
    known = [way.name for way in ways()]
    parser = Parser("headline", __doc__)
    parser.add_json()
    parser.add_count("micro-batches", 1, "of a step")
    parser.add_out(None, "folder for the results (experiments/results/GPU-DATE-headline)")
    parser.add_argument("--contender", action="append", choices=known, help="one of them (all); may be given again")
    arguments = parser.parse_args(argv)
    names = arguments.contender or known
    gpu, _ = find_gpu()
    date = datetime.date.today().isoformat()
    out: Path = arguments.out or RESULTS / f"{slug(gpu or 'emulated')}-{date}-headline"
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(Size.TINY if gpu is None else Size.FULL, cuda=gpu is not None, out=out)
    rows = []
    with measuring(arguments.json, emulated=gpu is None) as (console, progress):
        for name in names:
            progress(name)
            work = functools.partial(train, name, arguments.micro_batches)
            rows.append(row_of(name, run_isolated(Check(slug(name), name, work, 1.0), settings, SECONDS)))
    console.print(table_of(f"{gpu or 'Emulated'}: tokens per second", rows, *COLUMNS))
    head = {"gpu": gpu, "date": date, **environment.commit(), "micro_batches": arguments.micro_batches}
    return finish({**head, "rows": rows}, console, arguments.json)


def row_of(name: str, record: Record) -> dict[str, Any]:
    """The figures of a contender, or why there are none."""
    ended = record.status is Status.PASSED
    return {"contender": name, "note": "" if ended else record.reason, **record.figures, "seconds": record.seconds}


if __name__ == "__main__":
    sys.exit(main())
