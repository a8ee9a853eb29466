"""Adaptive residency while device memory changes: recorded traces and scripted neighbours, against the clock.

    python -m experiments.memory [--json]          # about ten minutes on two cores
    python -m experiments.memory --only half,none  # a minute: memory for half of the state, and for nothing
    python -m experiments.memory --simulate        # the published 20B run on the H100 profile; nothing is trained

A small GPT trains on the emulated accelerator with the proportions of a published rank: memory, compute and update.
The training's own memory follows the trace of that rank by phase of the iteration. Another process may want memory,
too: it takes what is free and waits for the rest. Adaptive runs are compared with everything on the CPU, with the fixed
stride and ratio that would have been best for the memory of the whole run, and with the bound for the memory of each
iteration. Some rows offload gradients. Times are the mean per iteration where memory changes, the median where it does
not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dos import DOSAdam
from dos.devices import Script
from dos.planning.policies import Policy
from experiments.bench.neighbours import Points, neighbours
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import Dropped, Limit, Progress, finish, measuring, take_turns, timed
from experiments.miniature import equal_subgroups
from experiments.paper import memory_h100
from experiments.paper.ranks import PublishedRank, Recording
from experiments.paper.runs import TRACES
from experiments.training import Position, Run, model_of
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.bounds import lower_bound
from perfmodel.policies import stride
from perfmodel.simulate import Phase, Scope, makespan

CONFIG = GPTConfig(layers=4, width=96, heads=4, context=16)
DTYPE = torch.bfloat16
SUBGROUPS = 40
UPDATE_S = 0.6
"""Seconds of the update on the CPU, of the published run 2.2. Real work takes 10 to 25 ms of an iteration."""
SCOPE = Scope(Phase.OVERLAPPED, Phase.ABSENT)
"""Gradients are copied during backward; the next forward waits for the update."""
TRAVEL = (Op.PREFETCH, Op.FLUSH, Op.GRADIENT, Op.PARAMETER)

Batch = tuple[Tensor, Tensor]
NOBODY: Points = ((0.0, 0),)
ITERATIONS = 20
"""Of a run with a neighbour; runs in which nothing changes have half as many."""
BATCH = 4
CANDIDATES = 2
"""Of the fixed policies, those that run for real: the best by simulation."""
CERTAIN = ("ample", "none")
"""Scripts in which no fixed policy runs: all stays on the device, or all on the CPU."""
NOISE = 0.02
"""Times that differ by less are equal."""
MOST_OVER_BOUND, ANY_OVER_BOUND = 1.17, 1.2
"""Times the bound that an adaptive iteration may take where memory leaks or is noisy, and in other scripts."""
A_THIRD = 1 / 3
SPEEDUP = 1.5
"""Over everything on the CPU, expected where a third of the state fits."""


SHOWN = (
    *("script", "best_fixed", "bits_equal", "fits_share"),
    *("cpu_only_s", "best_fixed_s", "adaptive_s", "bound_s", "unmet_iterations"),
)


def limits(row: dict[str, Any]) -> list[Limit]:
    """Limits of a script's row, by what is wrong if they are missed."""
    script, adaptive_s, cpu_only_s = (row[key] for key in ("script", "adaptive_s", "cpu_only_s"))
    over = MOST_OVER_BOUND if script in ("leak", "noise") else ANY_OVER_BOUND
    other_traffic = not row["same_traffic"] or abs(adaptive_s / cpu_only_s - 1) > NOISE
    most = [
        ("capacity exceeded", row["capacity_exceeded"], 0),
        ("errors", row["errors"], 0),
        ("other bits than on the CPU alone", not row["bits_equal"], 0),
        ("slower than the best fixed", adaptive_s, (1 + NOISE) * (row["best_fixed_s"] or math.inf)),
        (f"more than {over} times the bound", adaptive_s, over * row["bound_s"]),
    ]
    if row["fits_share"] >= A_THIRD:
        most.append((f"less than {SPEEDUP} times as fast as the CPU alone", adaptive_s, cpu_only_s / SPEEDUP))
    if script == "ample":
        most.append(("transfers although all fits", row["moved_after_first"], 0))
    if script == "none":
        most.append(("other traffic or time than the CPU alone", other_traffic, 0))
    return [Limit.at_most(f"{script}: {wrong}", measured, allowed) for wrong, measured, allowed in most]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if something was missed."""
    parser = Parser("memory", __doc__)
    parser.add_argument("--simulate", action="store_true", help="the published 20B run on an H100 node, simulated")
    parser.add_out(None, "with --simulate: file for its picture, a PNG")
    parser.add_count("steps", ITERATIONS, "of each run with a neighbour")
    parser.add_argument("--only", metavar="NAMES", help="these rows alone, separated by commas")
    arguments = parser.parse_args(argv)
    if arguments.simulate:
        return memory_h100.report(arguments.out, as_json=arguments.json)
    with measuring(arguments.json) as (console, progress):
        try:
            rows = measure(arguments.steps, progress, arguments.only and arguments.only.split(","))
        except ValueError as error:
            parser.error(str(error))
    console.print(table_of("Seconds per iteration on the emulated accelerator", rows, *SHOWN, left=3))
    console.print(
        "fits share: mean share of the state for which there was memory at the peak; unmet iterations: at whose end "
        "the neighbour waited for memory"
    )
    return finish({"rows": rows}, console, arguments.json, [limit for row in rows for limit in limits(row)])


def measure(iterations: int, on_progress: Progress, only: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All scripts, or those of `only`. iterations: of a run with a neighbour.

    Raises ValueError for a script that there is not.
    """
    found = settings(iterations)
    unknown = set(only or ()) - set(found)
    if unknown:
        raise ValueError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    batches = Corpus(standard_library(), CONFIG.context).batches(iterations, BATCH, seed=0)
    some = batches[: max(2, iterations // 2)]
    rows = []
    for name in found if only is None else only:
        on_progress(name)
        candidates = 0 if name in CERTAIN else CANDIDATES
        rows.append(row(name, found[name], batches if found[name].changes else some, candidates))
    return rows


def settings(iterations: int) -> dict[str, Setting]:
    """All scripts by name: recorded ranks alone, the first beside each neighbour, and with memory that stays free.

    Those that offload gradients are of memory that stays free for half of the state, and for most of it, and of noise.
    """
    ranks = {trace: Setting.of(PublishedRank.read(trace)) for trace in TRACES}
    first = next(iter(ranks.values()))
    beside = {
        name: Setting(first.rank, points) for name, points in neighbours(first.rank.free_bytes, iterations).items()
    }
    state = first.rank.loads.state_bytes
    free = {"ample": 2 * state, "half": state // 2, "none": 0}
    found = ranks | beside | {name: first.with_free(nbytes) for name, nbytes in free.items()}
    offloading = {"half": found["half"], "four fifths": first.with_free(4 * state // 5)}
    offloading |= {name: each for name, each in beside.items() if name == "noise"}
    return found | {f"{name} offloaded": dataclasses.replace(each, offloads=True) for name, each in offloading.items()}


def row(script: str, setting: Setting, batches: Sequence[Batch], candidates: int) -> dict[str, Any]:
    """One script. candidates: of the fixed policies, how many run for real. Times are seconds per iteration.

    fits_share: mean share of the state for which there was memory at the peak. best_fixed: None if none was looked for.
    unmet_iterations: at the end of which the neighbour was waiting for memory.
    moved_after_first: transfers after the first iteration, of any kind. same_traffic: as everything on the CPU has.
    """
    n = len(batches)
    fixed = fixed_policies(setting, n)[:candidates]
    adaptive, on_cpu, *others = train(setting, ["adaptive", "cpu", *(policy for _, policy in fixed)], batches)
    times = sorted((run.iteration_s, name) for run, (name, _) in zip(others, fixed, strict=True))
    best_s, best = times[0] if times else (None, None)
    return {
        "script": script,
        "iterations": n,
        "capacity_exceeded": adaptive.exceeded,
        "errors": len(adaptive.errors),
        "bits_equal": not (adaptive.errors or on_cpu.errors) and adaptive.equals(on_cpu),
        "adaptive_s": adaptive.iteration_s,
        "cpu_only_s": on_cpu.iteration_s,
        "best_fixed_s": best_s,
        "bound_s": bound_s(setting, n),
        "best_fixed": best,
        "fits_share": share_that_fits(setting, n),
        "unmet_iterations": adaptive.unmet_iterations,
        "moved_after_first": adaptive.transfers(first=1).total(),
        "same_traffic": adaptive.transfers() == on_cpu.transfers(),
    }


@dataclass(frozen=True)
class Setting:
    """A model's rank, and the neighbour it has: points of (iteration, bytes). offloads: whether gradients are."""

    rank: PublishedRank
    neighbour: Points = NOBODY
    offloads: bool = False

    @property
    def changes(self) -> bool:
        """Whether the neighbour ever wants more or less."""
        return len({nbytes for _, nbytes in self.neighbour}) > 1

    @classmethod
    def of(cls, published: PublishedRank) -> Setting:
        """The model of these experiments as such a rank, alone on its device."""
        numel = GPT(CONFIG).numel
        loads = equal_subgroups(numel, -(-numel // SUBGROUPS))
        return cls(published.miniature(loads, UPDATE_S))

    def workload(self, iteration: int) -> Workload:
        """The iteration with the memory that there was for it."""
        work = self.rank.workload(Script(self.neighbour, lambda: iteration)())
        if not self.offloads:
            return work
        loads = tuple(dataclasses.replace(load, returned_bytes=load.gradient_bytes) for load in work.subgroups)
        return dataclasses.replace(work, subgroups=loads, passing_bytes=max(load.returned_bytes for load in loads))

    def with_free(self, nbytes: int) -> Setting:
        """The setting on a device that always has `nbytes` for optimizer state."""
        peak = self.rank.recording.peak
        flat = Recording((peak,), (peak,), peak)
        return dataclasses.replace(
            self, rank=dataclasses.replace(self.rank, memory_bytes=peak + nbytes, recording=flat)
        )


class MemoryRun(Run):
    """The model from its start, with one policy on a device of its own; an error that reaches the user ends it.

    seconds: of each iteration. timelines: of each update. unmet_iterations: at the end of which the neighbour was
    waiting for memory.
    """

    def __init__(self, setting: Setting, policy: str | Policy) -> None:
        model, rank, self.changes = model_of(CONFIG, DTYPE), setting.rank, setting.changes
        progress = Position(model, rank.forward_s, rank.backward_s, moved=lambda: self.device.memory())
        device = rank.device(lambda: progress.position, neighbour=Script(setting.neighbour, lambda: progress.iteration))
        optimizer = DOSAdam(
            model.parameters(),
            policy=policy,
            subgroup_size=rank.loads.subgroups[0].numel,
            device=device,
            offload_gradients=setting.offloads,
            state_format="float32",  # as in the published rank, whose memory is scaled down
            lr=1e-3,
        )
        super().__init__(model, optimizer, device)
        progress.follow(optimizer)
        self.seconds: list[float] = []
        self.timelines: list[Timeline] = []
        self.unmet_iterations = 0
        self.errors: list[str] = []

    def iterate(self, batch: Batch) -> None:
        """One iteration. Raises Dropped after an error."""
        try:
            self.seconds.append(timed(lambda: self.train(batch)))
        except Exception as error:  # an error that a user would see is counted here
            self.errors.append(f"{type(error).__name__}: {error}")
            raise Dropped from error
        self.device.memory()  # the neighbour takes memory that is free now
        self.unmet_iterations += self.device.unmet_bytes > 0
        self.timelines.append(self.optimizer.timeline())

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration over the whole run or, for runs in which nothing changes, of the typical iteration."""
        return statistics.fmean(self.seconds) if self.changes else statistics.median(self.seconds)

    def transfers(self, first: int = 0) -> Counter[Op]:
        """How many there were of each kind in the iterations from `first` on."""
        return Counter(s.op for timeline in self.timelines[first:] for s in timeline.spans if s.op in TRAVEL)


def train(setting: Setting, policies: Sequence[str | Policy], batches: Sequence[Batch]) -> list[MemoryRun]:
    """One run for each policy, one iteration for each batch, in turns."""
    runs = [MemoryRun(setting, policy) for policy in policies]
    take_turns({str(i): run.iterate for i, run in enumerate(runs)}, batches)
    return runs


def bound_s(setting: Setting, iterations: int) -> float:
    """Mean seconds per iteration that no plan could beat with the memory that there was for each."""
    rank = setting.rank
    bound = functools.cache(lambda work: lower_bound(work, rank.profile, SCOPE).seconds)
    update_s = statistics.fmean(bound(setting.workload(i)) for i in range(iterations))
    return rank.forward_s + rank.backward_s + update_s


def share_that_fits(setting: Setting, iterations: int) -> float:
    """Mean share of the state for which there was memory at the peak."""
    state = setting.rank.loads.state_bytes
    return statistics.fmean(min(1.0, setting.workload(i).peak_free_bytes / state) for i in range(iterations))


def fixed_policies(setting: Setting, iterations: int) -> list[tuple[str, Policy]]:
    """All strides and ratios that keep no memory from anybody, the best by simulation first.

    Ratios in steps of 0.1 and strides of 1 to 6, or none. What such a policy makes resident stays so; it has to fit at
    every peak, or the training would run out of memory or the neighbour wait until its end.
    """
    works = [setting.workload(i) for i in range(iterations)]
    least = min(work.peak_free_bytes for work in works)
    found = []
    for tenths in range(11):
        for k in (None, *range(1, 7)):
            policy = functools.partial(stride, k=k, ratio=tenths / 10)
            if _held(policy(works[0]), works[0]) <= least:
                name = f"ratio {tenths / 10}" + ("" if k is None else f", stride {k}")
                found.append((simulated_s(setting, iterations, policy), name, policy))
    return [(name, policy) for _, name, policy in sorted(found, key=lambda entry: entry[:2])]


def simulated_s(setting: Setting, iterations: int, policy: Policy) -> float:
    """Mean seconds per iteration with a fixed policy, by the simulator.

    There are fewer slots in iterations where fewer fit, and without any what would stream is updated on the CPU.
    """
    works = [setting.workload(i) for i in range(iterations)]
    plan = policy(works[0])

    @functools.cache
    def seconds(slots: int) -> float:
        fallen = {} if slots else {Placement.GPU_STREAMED: Placement.CPU}
        placements = tuple(fallen.get(placement, placement) for placement in plan.placements)
        there = dataclasses.replace(plan, placements=placements, slots=slots)
        return makespan(there, works[0], setting.rank.profile, SCOPE)

    fitting = (work.slots_within(work.shared_free_bytes - _held(plan, work), plan.slots) for work in works)
    return setting.rank.forward_s + statistics.fmean(seconds(n) for n in fitting)


def _held(plan: Plan, work: Workload) -> int:
    return work.state_bytes_of(plan.served(Placement.GPU_RESIDENT))


if __name__ == "__main__":
    sys.exit(main())
