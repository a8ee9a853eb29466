"""Weights that stream beside weights that stay, batch by batch, in equal memory.

    python -m experiments.weights [--json]

Trains a small GPT on the emulated accelerator with the proportions of an RTX 4090 desktop: the weights take nine tenths
of the device, as those of 11B parameters do of 24 GB. "stay" is the default policy with all weights on the device,
"stream" has no block's weights there but while it computes, and may update in backward, "auto" as many as the plan
says; saved tensors move as planned in all. Each matrix multiplication of a block takes its share of the time that the
batch asks for, in forward and twice that in backward; who waits for transfers waits besides. Batches grow until no row
fits any more.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import Job
from experiments.bench.activations import grouped, saved_sizes
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import Limit, Progress, finish, measuring, take_turns, timed
from experiments.miniature import equal_subgroups, least_iteration_s, slowed
from experiments.training import Run, common_limits, model_of
from perfmodel import SubgroupLoad, Workload
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.workload import BlockLoad

CONFIG = GPTConfig(layers=12, width=128, heads=4, context=16)
DTYPE = torch.bfloat16
SUBGROUP = 25_000
"""Parameters of a subgroup; a block has eight."""
BATCHES = (2, 6, 12)
"""Sequences: of more than six what forward needs does not fit beside all blocks, of more than twelve not beside two."""
FORWARD_S = 0.21
"""Seconds of forward for a sequence; backward takes twice as long."""
UPDATE_S = 3.0
"""Seconds of an update of everything on the CPU. A tenth of a second in which Python works is then a few per cent."""
WEIGHTS_SHARE = 0.9
"""Of the device, that all weights take. Chosen by what fits and by simulation, before anything was measured."""
BLOCK = 4
"""Iterations of one run before the next has its turn; the first does not count."""
WARM_UP = 3
"""Turns that do not count: plans settle."""
IN_BACKWARD = "stream, updates in backward"
WAYS: dict[str, dict[str, Any]] = {
    "stay": {"weights": None},
    "stream": {"weights": 0},
    "auto": {"weights": "auto"},
    IN_BACKWARD: {"weights": 0, "updates": "backward"},
}
"""By the name of the row: arguments of `DOSAdam.attach`."""
MOST_OF_BEST, MOST_OF_BOUND, LEAST_OF_BOUND, LEAST_GAIN = 1.03, 1.10, 0.98, 1.3


class Waiting(EmulatedDevice):
    """Counts for how long the caller has waited for transfers, and paces what it computes beside them."""

    waited_s = 0.0
    _computed_at = 0.0

    def join(self, job: Job) -> None:
        self.waited_s += timed(lambda: super(Waiting, self).join(job))

    def clock_s(self) -> float:
        """Return the time, which stands still while the caller waits for transfers."""
        return time.perf_counter() - self.waited_s

    def begin(self) -> None:
        """A block begins to compute, when the one before it has ended."""
        self._computed_at = max(self._computed_at, self.clock_s())

    def compute(self, seconds: float) -> None:
        """Sleep until a part of the block that begins where the last one ended has taken so long."""
        self._computed_at += seconds
        time.sleep(max(0.0, self._computed_at - self.clock_s()))


class Paced(nn.Module):
    """A layer that computes for so many seconds in forward, and twice that in backward, beside waits for transfers."""

    def __init__(self, layer: nn.Module, device: Waiting, seconds: float) -> None:
        super().__init__()
        self.layer = layer
        self.seconds = seconds
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if x.requires_grad:
            x.register_hook(self._passed)
        self._device.compute(self.seconds)
        return out

    def _passed(self, _: Tensor) -> None:
        self._device.compute(2 * self.seconds)


def pace(blocks: nn.ModuleList, device: Waiting, forward_s: float) -> None:
    """Let the matrix multiplications of the blocks take so many seconds of forward, each by its size.

    The rest of a block runs beside that, as a host runs ahead of its device.
    """
    total = sum(each.weight.numel() for each in blocks.modules() if isinstance(each, nn.Linear))
    for block in blocks:
        for name, each in list(block.named_children()):
            if isinstance(each, nn.Linear):
                setattr(block, name, Paced(each, device, forward_s * each.weight.numel() / total))
        block.register_forward_pre_hook(lambda *_: device.begin())
        block.register_forward_hook(lambda *found: _begin_backward_at(found[-1], device))


def _begin_backward_at(out: Tensor, device: Waiting) -> None:
    if out.requires_grad:
        out.register_hook(lambda _: device.begin())


def started(profile: HardwareProfile, capacity: int, way: str, batch: int) -> Run:
    """Start training batches of this size in one way."""
    model, how = model_of(CONFIG), WAYS[way]
    occupied = sum(p.nbytes for p in model.parameters()) if how["weights"] is None else 0
    device = Waiting(profile, capacity, occupied)
    pace(model.blocks, device, batch * FORWARD_S)
    optimizer = DOSAdam(model.parameters(), subgroup_size=SUBGROUP, device=device, offload_gradients=True)
    optimizer.attach(model, activations="auto", **how)
    return Run(model, optimizer, device)


def workload(capacity: int, way: str, batch: int) -> Workload:
    """The optimizer's work and the compute beside it, with all the memory that weights and saved tensors leave."""
    model = GPT(CONFIG, dtype=DTYPE)
    parts = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    outer = model.numel - sum(parts)
    loads, blocks = [_load(outer)], []
    for numel in parts:
        sizes = [min(SUBGROUP, numel - first) for first in range(0, numel, SUBGROUP)]
        blocks.append(BlockLoad(numel * DTYPE.itemsize, len(loads), len(loads) + len(sizes)))
        loads += map(_load, sizes)
    saved = saved_sizes(model, _batches(batch, 1)[0])
    free = capacity - outer * DTYPE.itemsize - sum(saved)
    return Workload(
        tuple(loads),
        forward_s=FORWARD_S * batch,
        backward_s=2 * FORWARD_S * batch,
        peak_free_bytes=max(0, free),
        shared_free_bytes=max(0, free),
        activations=grouped(saved),
        activation_least_bytes=max(0, -free),
        blocks=tuple(blocks),
        blocks_least={"stay": len(blocks)}.get(way, 0),
        blocks_most=0 if WAYS[way]["weights"] == 0 else len(blocks),
        in_backward=way == IN_BACKWARD,
    )


def bound_s(work: Workload, profile: HardwareProfile) -> float:
    """Seconds of an iteration that no plan could beat.

    Sums of work leave out an order: where the last block streams, all updates come before its fetch, because blocks are
    fetched in the order of forward, and its forward comes behind that. Neither hides behind an update. Of updates that
    begin in backward the sums alone are known.
    """
    if work.blocks_most or work.in_backward:
        return least_iteration_s(work, profile)
    *others, last = work.blocks
    share = sum(load.numel for load in work.subgroups[last.start :]) / work.numel
    before = dataclasses.replace(
        work, forward_s=(1 - share) * work.forward_s, blocks=(*others, last._replace(nbytes=0))
    )
    return least_iteration_s(before, profile) + last.nbytes / profile.h2d_bandwidth + share * work.forward_s


def _load(numel: int) -> SubgroupLoad:
    load = SubgroupLoad.of(numel, SPLIT)
    return dataclasses.replace(load, returned_bytes=load.gradient_bytes)


def _batches(batch: int, turns: int) -> Sequence[Sequence[Tensor]]:
    return Corpus(standard_library(), CONFIG.context).batches(BLOCK * turns, batch, seed=0)


def measure(rounds: int, batches: Sequence[int], on_progress: Progress) -> list[dict[str, Any]]:
    """All rows that fit. In each round the ways take turns, a few iterations each."""
    numel = GPT(CONFIG, dtype=DTYPE).numel
    profile = slowed(
        HardwareProfile.builtin("rtx_4090_desktop"), equal_subgroups(numel, numel // 48, state=SPLIT), UPDATE_S
    )
    capacity = int(numel * DTYPE.itemsize / WEIGHTS_SHARE)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        runs = {way: started(profile, capacity, way, batch) for way in WAYS}
        on_progress(f"batch {batch}")
        data = _batches(batch, WARM_UP + rounds)
        turns = [data[first : first + BLOCK] for first in range(0, len(data), BLOCK)]
        seconds = take_turns({way: run.turn for way, run in runs.items()}, turns, warm_up=WARM_UP)
        ended = {way: run for way, run in runs.items() if len(seconds[way]) == rounds}
        for way, run in ended.items():
            found = run.optimizer.metrics()
            iteration = statistics.median(seconds[way])
            rows.append(
                {
                    "weights": way,
                    "batch": batch,
                    **run.common(next(iter(ended.values())), iteration),
                    "tokens_per_s": batch * CONFIG.context / iteration,
                    "predicted_s": 3 * FORWARD_S * batch + found["predicted_s"],
                    "bound_s": bound_s(workload(capacity, way, batch), profile),
                    "blocks_on_device": found.get("blocks_on_device"),
                }
            )
    return rows


def limits(rows: Sequence[dict[str, Any]]) -> list[Limit]:
    """What the rows have to show."""
    found = []
    best: dict[str, float] = {}
    for row in rows:
        way, batch = row["weights"], row["batch"]
        best[way] = max(best.get(way, 0.0), row["tokens_per_s"])
        found += common_limits(f"{way} at {batch}", row)
        others = [r["iteration_s"] for r in rows if r["batch"] == batch and r["weights"] in ("stay", "stream")]
        if way == "auto" and others:
            over = row["iteration_s"] / min(others)
            found.append(Limit.at_most(f"auto at {batch}: slower than the best", over, MOST_OF_BEST))
        over = row["iteration_s"] / row["bound_s"]
        found.append(Limit.at_least(f"{way} at {batch}: below its bound", over, LEAST_OF_BOUND))
        if way == "stream":
            found.append(Limit.at_most(f"stream at {batch}: above its bound", over, MOST_OF_BOUND))
        if way == IN_BACKWARD and others:
            over = row["iteration_s"] / min(others)
            found.append(Limit.at_most(f"{way} at {batch}: slower than in step", over, 1.0))
    if {"stay", "stream"} <= best.keys():
        found.append(Limit.at_least("stream gains too little", best["stream"] / best["stay"], LEAST_GAIN))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser("weights", __doc__)
    parser.add_count("rounds", 3, "of all ways in turn")
    parser.add_count("largest", BATCHES[-1], "batch, in sequences")
    arguments = parser.parse_args(argv)
    with measuring(arguments.json) as (console, progress):
        rows = measure(arguments.rounds, [b for b in BATCHES if b <= arguments.largest], progress)
    console.print(table_of("Seconds of an iteration on the emulated accelerator", rows, left=1))
    return finish({"rows": rows}, console, arguments.json, limits(rows))


if __name__ == "__main__":
    sys.exit(main())
