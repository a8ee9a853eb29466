"""Trains one way of `experiments.headline`, and notes its tokens per second beside what the planner says of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import resource
import statistics
from typing import Any

import torch

from dos import DOSAdam, EmulatedDevice
from experiments.check.base import Bench, Size, Skipped
from experiments.check.contenders import Broken, Contender, Own, Trains
from experiments.check.contest import Clock, iterate
from experiments.check.models import SETTINGS, Batch, Job, emulated_device, prepare
from experiments.check.streaming import GPU_BYTES, taken
from experiments.check.ways import BACKWARD, DEFAULT, JOBS, TINY, Way, ways
from perfmodel.format import CODED, SPLIT
from perfmodel.planner.machine import UNKNOWN, Machine, find_machine
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import Memory
from perfmodel.planner.whatif import most

TIMED = {Size.TINY: 2, Size.FULL: 6}
LEARNING = {Size.TINY: 2, Size.FULL: 14}
"""Iterations of DOSAdam before those that count; of others SETTLING."""
SETTLING = 2
DOES_NOT_FIT = "does not fit"


class Accumulating(Contender):
    """A contender with several micro-batches in each step."""

    def __init__(self, inner: Contender, micro_batches: int) -> None:
        self.name, self._inner, self._count = inner.name, inner, micro_batches
        self.open, self.close, self.step, self.metrics = inner.open, inner.close, inner.step, inner.metrics  # type: ignore[method-assign]

    def compute(self, batch: Batch) -> None:
        """Forward and backward of each micro-batch."""
        for _ in range(self._count):
            self._inner.compute(batch)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a step is made of.

    tokens: of a step, whose micro-batches are as large as fit; None: `micro_batches` of them. batch: sequences of a
    micro-batch; None: the job's, and with `tokens` any number. slice_bytes: of GPU memory, for ways that are sliced.
    """

    micro_batches: int = 1
    batch: int | None = None
    tokens: int | None = None
    slice_bytes: int = 24 << 30


def train(model: str, name: str, steps: Steps, bench: Bench) -> None:
    """Train one way, and note its figures."""
    way = {each.name: each for each in ways(model)}[name]
    known = this_machine() if bench.cuda else find_machine("h100", None)
    whole, micro_batches = divided(JOBS[model], way, steps, known)
    if micro_batches > 1 and way.kind is not None and way.kind.package == "deepspeed":
        raise Skipped("its engine counts micro-batches itself, by another configuration")
    job, device = whole if bench.cuda else TINY[model], prepare(bench)
    if not bench.cuda and (steps.tokens or steps.batch):
        job = dataclasses.replace(job, batch=whole.batch)
    size = -(-job.numel // 8)
    emulated = None if bench.cuda else emulated_device(job, size)
    if emulated is not None and way.sliced:
        emulated = EmulatedDevice(emulated.profile, capacity=GPU_BYTES[Size.TINY])
    ballast = taken(device, steps.slice_bytes) if bench.cuda and way.sliced else None
    contender = made(way, job, device, emulated, None if bench.cuda else size)
    if measure(contender, job, micro_batches, bench, device, learns=way.kind is None):
        bench.note(host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if bench.cuda:
            gpu_bytes = torch.cuda.max_memory_reserved() - (0 if ballast is None else ballast.nbytes)
            bench.note(
                gpu_bytes=gpu_bytes, predicted_tokens_per_s=predicted(job, micro_batches, way, steps.slice_bytes)
            )


def measure(
    contender: Contender, job: Job, micro_batches: int, bench: Bench, device: torch.device, *, learns: bool
) -> bool:
    """Iterate, and note the figures, or why there are none; return whether there are."""
    batches, clock = itertools.cycle(job.batches(2, device)), Clock(bench.cuda)
    tokens = micro_batches * job.batch * job.config.context
    bench.note(parameters=job.numel, batch=job.batch, tokens_per_step=tokens)
    try:
        contender.open()
        running = Accumulating(contender, micro_batches)
        iterate(running, batches, clock, LEARNING[bench.size] if learns else SETTLING)
        seconds, _ = iterate(running, batches, clock, TIMED[bench.size])
    except torch.OutOfMemoryError:
        bench.note(note=DOES_NOT_FIT)
        return False
    except Broken as error:
        bench.note(note=str(error))
        return False
    bench.note(
        iteration_s=statistics.median(seconds),
        tokens_per_s=tokens / statistics.median(seconds),
        spread=f"{tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f}",
        metrics=contender.metrics() if learns else {},
    )
    return True


def made(way: Way, job: Job, device: torch.device, emulated: Any, size: int | None) -> Contender:
    """The contender of a way, with a model of its own. Raises Skipped if its package is not installed."""
    if way.kind is not None:
        if importlib.util.find_spec(way.kind.package) is None:
            raise Skipped(f"{way.kind.package} is not installed")
        return Own(way.kind, job, device)
    model, options = job.on_host(device) if way.streams else job.model(device), {**way.options, **SETTINGS}
    if way.share is not None:
        state = CODED if "state_format" in way.options else SPLIT
        room = int(way.share * state.state_bytes * job.numel)
        options["memory_budget"] = lambda: room
    if emulated is None and way.streams:
        emulated = device
    optimizer = DOSAdam(model.parameters(), device=emulated, subgroup_size=size, **options)
    if way.attach is not None:
        optimizer.attach(model, **way.attach)
    return Trains(way.name, model, optimizer)


def this_machine() -> Machine:
    """This GPU's machine; if the planner does not know it, any with its memory."""
    try:
        return find_machine(torch.cuda.get_device_name(), None)
    except ValueError:
        return find_machine(UNKNOWN, Memory("", torch.cuda.get_device_properties(0).total_memory, False))


def predicted(
    job: Job, micro_batches: int, way: Way = DEFAULT, slice_bytes: int = 0, known: Machine | None = None
) -> float | None:
    """Tokens per second as the planner says of DOSAdam on a machine; None if it knows the machine or the way not.

    known: the machine; None for this GPU's.
    """
    if way not in (DEFAULT, BACKWARD) and not way.streams:
        return None
    try:
        known = known or find_machine(torch.cuda.get_device_name(), None)
    except ValueError:
        return None
    question = question_of(job, micro_batches, way, known, slice_bytes)
    return question.step_tokens / adaptive_outcome(Situation(question)).seconds


def question_of(job: Job, micro_batches: int, way: Way, known: Machine, slice_bytes: int) -> Question:
    """What the planner is asked about a way. known: the machine."""
    rate, source = known.flops_rate("bf16", None, None)
    return job.question(
        slice_bytes if way.sliced else known.device_bytes,
        profile=known.profile,
        micro_batches=micro_batches,
        accumulation=micro_batches > 1,
        weights="auto" if way.streams else "stay",
        updates=(way.attach or {}).get("updates", "step"),
        offload_gradients=way.streams,
        state_format=way.options.get("state_format"),
        flops_rate=rate,
        flops_source=source,
    )


def divided(job: Job, way: Way, steps: Steps, known: Machine) -> tuple[Job, int]:
    """The job with the batch of a micro-batch, and how many micro-batches a step has."""
    if steps.tokens is None:
        return dataclasses.replace(job, batch=steps.batch or job.batch), steps.micro_batches
    sequences = steps.tokens // job.config.context
    fits = most(question_of(job, 2, way, known, steps.slice_bytes), "batch", min(sequences, steps.batch or sequences))
    batch = max(n for n in range(1, max(1, fits) + 1) if sequences % n == 0)
    return dataclasses.replace(job, batch=batch), sequences // batch
