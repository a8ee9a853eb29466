"""What do weights that stream cost here, and does a model train that is larger than the GPU's memory?"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from experiments.check.base import Bench, Size
from experiments.check.calibration import measured_profile
from experiments.check.contenders import NOTHING, Own, Trains, reference
from experiments.check.contest import SUBGROUPS, Clock, Effort, iterate, run_rounds, summaries
from experiments.check.models import HOST_BYTES, MEDIUM, SETTINGS, Batch, Job, emulated_device, fitted, prepare
from experiments.gpt import GPT, GPTConfig
from perfmodel.format import CODED, INT8
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.units import format_bytes, format_count
from perfmodel.planner.whatif import most

MOST = 600e6
"""Parameters of the model whose ways are compared: the host has one for each."""
WAYS: dict[str, Any] = {"weights stay": None, "half of the blocks stay": 0.5, "all blocks stream": 0}
"""By name: `weights` of `DOSAdam.attach`."""
EFFORTS = {
    Size.TINY: Effort(warm_up=1, timed=1, updates=0, rounds=1),
    Size.SMALL: Effort(warm_up=2, timed=2, updates=0, rounds=2),
    Size.FULL: Effort(warm_up=2, timed=3, updates=0, rounds=2),
}
LARGE = {
    Size.TINY: Job(GPTConfig(6, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=1),
    Size.SMALL: Job(GPTConfig(8, 128, 4, context=32, vocabulary=64, checkpointing=True), batch=1),
    Size.FULL: Job(GPTConfig(32, 4096, 32, context=2048, vocabulary=8192, checkpointing=True), batch=4),
}
"""6.5 billion parameters at full size."""
GPU_BYTES = {Size.TINY: 150_000, Size.SMALL: 3_000_000, Size.FULL: 12 << 30}
"""The memory in which it trains: less than its weights take."""
MOST_SEQUENCES = 16
"""Of a batch that the check chooses; of 2,048 tokens at full size."""
SETTLING, TIMED = 6, 4
"""Iterations of the large model."""


def streaming(name: str, model: GPT, emulated: EmulatedDevice | None, weights: Any, **options: Any) -> Trains:
    """DOSAdam on a model of its own, some of whose weights stream. options: of DOSAdam; weights: of `attach`."""
    where = "cuda" if emulated is None else emulated
    optimizer = DOSAdam(model.parameters(), device=where, offload_gradients=True, **SETTINGS, **options)
    optimizer.attach(model, weights=weights)
    return Trains(name, model, optimizer)


def run(bench: Bench) -> None:
    """The ways side by side with state on the host, then a model that the GPU has no memory for."""
    device = prepare(bench)
    compare(bench, device)
    train_large(bench, device)


def compare(bench: Bench, device: torch.device) -> None:
    """Iterations of one model with more and more weights that stream, and without an optimizer."""
    job = fitted(MEDIUM[bench.size], bench, each=len(WAYS) * HOST_BYTES, most=MOST)
    size = -(-job.numel // SUBGROUPS[bench.size])
    emulated = None if bench.cuda else emulated_device(job, size)
    options = {"policy": "cpu", "subgroup_size": size, **profile_of(bench, device)}

    def way(name: str) -> Trains:
        where = device if WAYS[name] is None else torch.device("cpu")
        return streaming(name, job.model(where), emulated, WAYS[name], **options)

    contenders = [*map(way, WAYS), Own(reference(NOTHING, emulated), job, device)]
    bench.note(parameters=job.numel, batch=job.batch)
    scores = run_rounds(
        contenders,
        job.batches(2, device),
        EFFORTS[bench.size],
        Clock(bench.cuda),
        lambda: bench.left() / 2,
        lambda scores: bench.note(contenders=summaries(scores)),
    )
    first, *others = WAYS
    for name in others:
        if (over := scores[name].over(scores[first])) is not None:
            bench.say(f"{name}: {over:.3f} times the iteration with {first}")


def train_large(bench: Bench, device: torch.device) -> None:
    """Train a model in a part of the memory, in int8; and forward and backward alone, with all of it.

    By itself the check chooses a part that is less than the weights take, and the largest batch up to MOST_SEQUENCES
    that fits into it, and without an optimizer into all memory.
    """
    asked, job = bench.settings, LARGE[bench.size]
    most = asked.slice_bytes or GPU_BYTES[bench.size]
    if asked.parameters is not None:
        job = job.sized(asked.parameters)
    if bench.cuda:
        job = fitted(job, bench, each=math.ceil(CODED.held_bytes))
    weight_bytes = 2 * job.numel
    if weight_bytes <= most and asked.slice_bytes is None:
        bench.say(f"memory here is not enough for a model whose weights do not fit into {format_bytes(most)}")
        return
    weights = 0 if weight_bytes > most else "auto"
    job = dataclasses.replace(job, batch=asked.batch or largest_batch(job, device, most, weights))
    (batch,), clock = job.batches(1, device), Clock(bench.cuda)
    batches = itertools.repeat(batch)
    alone = Own(reference(NOTHING, None), job, device)
    alone.open()
    compute_s, _ = iterate(alone, batches, clock, SETTLING)
    del alone
    emulated = None
    if bench.cuda:
        torch.cuda.empty_cache()
    else:
        emulated = EmulatedDevice(HardwareProfile.builtin("h100").scaled(1e-4), capacity=most)
    options = {"state_format": "int8", **profile_of(bench, device)}
    ours = streaming("large", job.on_host(device), emulated, weights, **options)
    ballast = None if emulated else taken(device, most)
    loss = loss_of(ours.model, batch)
    first_s, _ = iterate(ours, batches, clock, SETTLING)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, _ = iterate(ours, batches, clock, TIMED)
    used = torch.cuda.max_memory_reserved() - (0 if ballast is None else ballast.nbytes) if bench.cuda else None
    bench.note(
        large={
            "model": dataclasses.asdict(job.config),
            "parameters": job.numel,
            "batch": job.batch,
            "weight_bytes": weight_bytes,
            "gpu_bytes": most,
            "most_reserved_bytes": used,
            "compute_s": statistics.median(compute_s),
            "first_iterations_s": first_s,
            "iterations_s": seconds,
            "tokens_per_s": job.batch * job.config.context / statistics.median(seconds),
            "loss_before": loss,
            "loss_after": loss_of(ours.model, batch),
            "metrics": ours.metrics(),
        }
    )
    if used is not None and used > most:
        bench.problem(f"{used} bytes were reserved on the GPU, of which it was to have {most}")
    bench.say(
        f"{format_count(job.numel)} parameters, whose weights take {format_bytes(weight_bytes)}, in "
        f"{format_bytes(most)}, {job.batch} sequences: {statistics.median(seconds):.3f} s an iteration, "
        f"{statistics.median(compute_s):.3f} s of forward and backward alone with all weights there"
    )


def largest_batch(job: Job, device: torch.device, slice_bytes: int, weights: Any) -> int:
    """The largest batch up to MOST_SEQUENCES with which the job fits into the slice, and plainly into the GPU."""
    if device.type == "cuda":
        free, reserved = torch.cuda.mem_get_info(device)[0], {}
    else:  # an emulated one keeps no activations
        free, reserved = slice_bytes * 100, {"reserved": 0}
    streams = "auto" if weights == "auto" else "stream"
    sliced = job.question(slice_bytes, weights=streams, offload_gradients=True, state_format=INT8, **reserved)
    whole = job.question(free, accumulation=False, **reserved)
    return max(1, min(most(each, "batch", MOST_SEQUENCES) for each in (sliced, whole)))


@torch.no_grad()
def loss_of(model: GPT, batch: Batch) -> float:
    """The loss of a batch, in nats."""
    return float(model(*batch))


def taken(device: torch.device, left: int) -> Tensor:
    """All of the GPU's memory but so many bytes, which include what this process has there already."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(free + torch.cuda.memory_reserved(device) - left, dtype=torch.uint8, device=device)


def profile_of(bench: Bench, device: torch.device) -> dict[str, HardwareProfile]:
    """The rates that calibration has found in this run, as an option of DOSAdam. An emulated device knows its own."""
    return {"profile": measured_profile(bench.out, device)} if bench.cuda else {}
