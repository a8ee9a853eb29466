"""Runs of a small model on an emulated device whose memory changes, and the fixed policy that would have been best."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dos import DOSAdam
from dos.deciding.policies import Policy
from dos.devices import Script
from experiments.bench.progress import Progress
from experiments.gpt import GPT, GPTConfig
from experiments.miniature import UPDATE_S, all_equal, bits_of, equal_subgroups
from experiments.paper.ranks import PublishedRank, Recording
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.bounds import lower_bound
from perfmodel.policies import stride
from perfmodel.simulate import Phase, Scope, makespan

CONFIG = GPTConfig(layers=4, width=96, heads=4, context=16)
DTYPE = torch.bfloat16
SUBGROUPS = 40
SCOPE = Scope(Phase.OVERLAPPED, Phase.ABSENT)
"""Gradients leave during backward; the next forward waits for the update."""
TRAVEL = (Op.PREFETCH, Op.FLUSH, Op.GRADIENT, Op.PARAMETER)

Batch = tuple[Tensor, Tensor]
Points = Sequence[tuple[float, int]]
NOBODY: Points = ((0.0, 0),)
SEED = 5
"""Of the noise."""


@dataclass(frozen=True)
class Setting:
    """A model's rank, and the neighbour it has: points of (iteration, bytes)."""

    rank: PublishedRank
    neighbour: Points = NOBODY

    @classmethod
    def of(cls, published: PublishedRank) -> Setting:
        """The model of these experiments as such a rank, alone on its device."""
        values = DTYPE.itemsize
        numel = GPT(CONFIG).numel
        size = -(-numel // SUBGROUPS)
        loads = equal_subgroups(numel, size, gradient_bytes=values, parameter_bytes=values)
        return cls(published.miniature(loads, UPDATE_S))

    def workload(self, iteration: int) -> Workload:
        """The iteration with the memory that there was for it."""
        return self.rank.workload(Script(self.neighbour, lambda: iteration)())

    def with_free(self, nbytes: int) -> Setting:
        """The same on a device that always has so many bytes for optimizer state."""
        peak = self.rank.recording.peak
        flat = Recording((peak,), (peak,), peak)
        return dataclasses.replace(
            self, rank=dataclasses.replace(self.rank, memory_bytes=peak + nbytes, recording=flat)
        )


class Run:
    """The model from its start, with one policy on a device of its own; an error that reaches the user ends it.

    seconds: of each iteration. plans, timelines: of each update. unmet: of each iteration, bytes for which the
    neighbour was still waiting at its end.
    """

    def __init__(self, setting: Setting, policy: str | Policy) -> None:
        torch.manual_seed(0)
        self.model = GPT(CONFIG, dtype=DTYPE)
        rank = setting.rank
        progress = Progress(self.model, rank.forward_s, rank.backward_s, moved=lambda: self.device.memory())
        self.device = rank.device(
            lambda: progress.position, neighbour=Script(setting.neighbour, lambda: progress.iteration)
        )
        self.optimizer = DOSAdam(
            self.model.parameters(),
            policy=policy,
            subgroup_size=rank.loads.subgroups[0].numel,
            device=self.device,
            state_format="float32",  # as in the published rank, whose memory is scaled down
            lr=1e-3,
        )
        progress.follow(self.optimizer)
        self.seconds: list[float] = []
        self.plans: list[Plan | None] = []
        self.timelines: list[Timeline] = []
        self.unmet: list[int] = []
        self.errors: list[str] = []

    def iterate(self, batch: Batch) -> None:
        """One iteration."""
        if self.errors:
            return
        try:
            begin = time.perf_counter()
            self.model(*batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seconds.append(time.perf_counter() - begin)
        except Exception as error:  # what a user would see is what is counted here
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        self.device.memory()  # lets the neighbour take what has come free
        self.unmet.append(self.device.unmet_bytes)
        self.plans.append(self.optimizer.plan())
        self.timelines.append(self.optimizer.timeline())

    def iteration_s(self, *, typical: bool) -> float:
        """Seconds per iteration over the whole run or, for runs in which nothing changes, of the typical iteration."""
        return statistics.median(self.seconds) if typical else statistics.fmean(self.seconds)

    @property
    def exceeded(self) -> bool:
        """Whether more memory was used than there is."""
        return self.device.peak_bytes > self.device.capacity

    @property
    def unmet_iterations(self) -> int:
        """Iterations at the end of which the neighbour waited for memory."""
        return sum(nbytes > 0 for nbytes in self.unmet)

    def transfers(self, first: int = 0) -> Counter[Op]:
        """How many there were of each kind in the iterations from `first` on."""
        return Counter(s.op for timeline in self.timelines[first:] for s in timeline.spans if s.op in TRAVEL)

    def equals(self, other: Run) -> bool:
        """Whether both ended without an error, and with the same bits of parameters and state."""
        if self.errors or other.errors:
            return False
        return all_equal(bits_of(self.model, self.optimizer), bits_of(other.model, other.optimizer))


def train(setting: Setting, policies: Sequence[str | Policy], batches: Sequence[Batch]) -> list[Run]:
    """One run for each policy, one iteration for each batch; they take turns, so that noise falls on all alike."""
    runs = [Run(setting, policy) for policy in policies]
    for batch in batches:
        for run in runs:
            run.iterate(batch)
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
            plan = policy(works[0])
            if _held(plan, works[0]) <= least:
                name = f"ratio {tenths / 10}" + ("" if k is None else f", stride {k}")
                seconds = _simulated(setting, plan)
                found.append((statistics.fmean(seconds(work) for work in works), name, policy))
    return [(name, policy) for _, name, policy in sorted(found, key=lambda entry: entry[:2])]


def _held(plan: Plan, work: Workload) -> int:
    return sum(work.subgroups[i].state_bytes for i in plan.served(Placement.GPU_RESIDENT))


def _simulated(setting: Setting, plan: Plan) -> Callable[[Workload], float]:
    """Seconds of an iteration with this plan, by memory: with fewer slots where fewer fit, on the CPU without any."""

    @functools.cache
    def seconds(slots: int) -> float:
        fallen = {} if slots else {Placement.GPU_STREAMED: Placement.CPU}
        placements = tuple(fallen.get(placement, placement) for placement in plan.placements)
        return makespan(
            dataclasses.replace(plan, placements=placements, slots=slots),
            setting.workload(0),
            setting.rank.profile,
            SCOPE,
        )

    def by_memory(work: Workload) -> float:
        fitting = (work.shared_free_bytes - _held(plan, work)) // work.slot_bytes
        return seconds(int(max(0, min(plan.slots, fitting))))

    return by_memory


def neighbours(most: int, iterations: int) -> dict[str, list[tuple[float, int]]]:
    """Scripts of what another process wants, as points of (iteration, bytes), by name.

    most: bytes that there are for it beside the training itself, without optimizer state. iterations: of the run.
    """

    def points(share: Callable[[int], float]) -> list[tuple[float, int]]:
        return [(float(i), int(share(i) * most)) for i in range(iterations)]

    third, period = iterations // 3, max(2, iterations // 3)
    drawn = random.Random(SEED)
    return {
        "step up": points(lambda i: 0.65 if i >= third else 0.0),
        "step down": points(lambda i: 0.65 if i < third else 0.0),
        "sawtooth": points(lambda i: 0.8 * (i % period) / (period - 1)),
        "spike": points(lambda i: 0.65 if i == iterations // 2 else 0.0),
        "leak": points(lambda i: min(1.0, 1.25 * i / (iterations - 1))),
        "noise": points(lambda i: drawn.uniform(0.3, 0.5)),
    }
