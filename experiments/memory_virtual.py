"""Adaptive residency beside changing memory, judged in virtual time: no thread, no copy, the same on every machine.

What decides is the real thing: `MemoryMonitor`, its forecast and the adaptive policy; so is the emulated device, which
says what is free and whom it denies memory. Where DOSAdam would sample, the model of an iteration does; a clock that
only this file moves says when. How long an iteration lasts is served by the simulator's lanes: the plan's operations,
and those of state that comes to stay or goes home, in the order in which the engine issues them.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dos.deciding.controller import AdaptivePolicy, Controller
from dos.devices import Script
from dos.memory.monitor import MemoryMonitor
from experiments.memory_runs import Run, Setting, bound_s
from experiments.occupancies import neighbours
from experiments.progress import UPDATE
from experiments.ranks import PublishedRank
from perfmodel import Op, Placement, Plan
from perfmodel.demand import demand
from perfmodel.lanes import Stream, Tasks

SEEDS = 20
MOST_OVER_BOUND = 1.15
"""What an iteration may take over the bound for its memory, in the mean of a run."""
SAMPLE_S = (2e-5, 1e-4)
"""Seconds of one sample, from a quiet machine to a busy one: with it goes how many are taken in an iteration."""
BLOCKS = 4
"""Of the model: so often the training's memory moves on in forward."""


class Clock:
    """Virtual time in seconds. Each look at it takes as long as a sample, so that samples are as rare as they are."""

    def __init__(self, look_s: Callable[[], float]) -> None:
        self.now = 0.0
        self._look_s = look_s

    def __call__(self) -> float:
        self.now += self._look_s()
        return self.now


class Model:
    """A training whose optimizer is adaptive, an iteration at a time. seed: of how long samples take."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        rank = self._rank = setting.rank
        drawn = random.Random(seed)
        self._clock = Clock(lambda: drawn.uniform(*SAMPLE_S))
        self._iteration, self._position = -1, 0.0
        neighbour = Script(setting.neighbour, lambda: self._iteration)
        self._device = rank.device(lambda: self._position, neighbour)
        self._resident: dict[int, Tensor] = {}
        self._slots: list[Tensor] = []
        self._prefetched: list[int] = []
        self._arriving: list[int] = []
        self._memory = MemoryMonitor(self._device, self._held, clock=self._clock)
        self._controller = Controller(AdaptivePolicy(rank.profile))
        self.run = Run(self._device.capacity)

    def iterate(self) -> None:
        """Forward, backward and update."""
        rank, n = self._rank, len(self._rank.loads.subgroups)
        self._iteration += 1
        for block in range(BLOCKS + 1):
            self._at(min(block / BLOCKS, 0.999))
        begin, self._clock.now = self._clock.now, self._clock.now + rank.forward_s
        left: list[int] = []  # subgroups whose gradients leave during backward
        prefetching = None  # the subgroup at whose gradient slots were filled
        plan = None
        for i in reversed(range(n)):
            self._at(1.0 + min((n - i) / n, 0.999))
            self._clock.now = begin + rank.forward_s + (n - i) / n * rank.backward_s
            if i == n - 1:
                self._memory.enter(Op.BACKWARD)
            else:
                self._memory.sample(always=i == 0 and self._iteration > 0)
            if not self._iteration:
                continue  # state is made in the first step: before it nothing travels
            if plan is None:
                plan = self._plan()
                self._settle_early(plan)
            if plan.placements[i] is Placement.CPU and i not in self._resident:
                left.append(i)
            if 2 * (n - i) > n and not self._slots and self._prefetch_early(plan):
                prefetching = i
        self._at(UPDATE)
        self._memory.enter(Op.UPDATE)
        plan = self._plan()
        before = set(self._resident)
        leaving = [i for i in sorted(before) if plan.placements[i] is not Placement.GPU_RESIDENT]
        placements, denied = self._hold(plan)
        if not self._prefetched:
            prefetching = None  # for another plan
        if denied is not None and not leaving:
            self._memory.allocation_failed(denied)
        self._memory.end_iteration()
        seconds = rank.forward_s + self._makespan(placements, before, leaving, left, prefetching)
        self._clock.now = begin + seconds
        self._arriving = []
        self._free_slots()
        for i in leaving:
            self._device.free(self._resident.pop(i))
        self._device.memory()
        self.run.seconds.append(seconds)
        self.run.unmet.append(self._device.unmet_bytes)
        self.run.plans.append(plan)
        self.run.peak_bytes = self._device.peak_bytes

    def _at(self, position: float) -> None:
        """The training's own memory is what it is here, and its neighbour takes what it can get."""
        self._position = position
        self._device.memory()

    def _held(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._resident.values(), *self._slots))

    def _plan(self) -> Plan:
        work = self._memory.workload(self._rank.loads.subgroups, update_overlaps_forward=False)
        return self._controller.plan(replace(work, backward_s=self._rank.backward_s if self._iteration else 0.0))

    def _settle_early(self, plan: Plan) -> None:
        """As `Early.settle`."""
        for i in plan.served(Placement.GPU_RESIDENT):
            if i not in self._resident:
                buffer = self._allocate(self._rank.loads.subgroups[i].state_bytes)
                if buffer is None:
                    return
                self._resident[i] = buffer
                self._arriving.append(i)

    def _prefetch_early(self, plan: Plan) -> bool:
        """As `Early.prefetch`."""
        streamed = [i for i in plan.served(Placement.GPU_STREAMED) if i not in self._resident]
        spare = self._memory.spare_in_backward()
        count = min(plan.slots, len(streamed))
        if not streamed or count * self._rank.loads.slot_bytes > spare:
            return False
        self._get_slots(count)
        self._prefetched = streamed[: len(self._slots)]
        return bool(self._slots)

    def _hold(self, plan: Plan) -> tuple[list[Placement], int | None]:
        """As `Engine._allocate`: what is possible of the plan, and what was held when memory was denied."""
        denied = None
        placements = [Placement.GPU_RESIDENT if i in self._resident else p for i, p in enumerate(plan.placements)]
        for i, placement in enumerate(placements):
            if placement is Placement.GPU_RESIDENT and i not in self._resident:
                buffer = self._allocate(self._rank.loads.subgroups[i].state_bytes)
                if buffer is None:
                    placements[i], denied = Placement.CPU, self._held()
                else:
                    self._resident[i] = buffer
        streamed = [i for i in plan.order if placements[i] is Placement.GPU_STREAMED]
        if self._slots and streamed[: len(self._prefetched)] != self._prefetched:
            self._free_slots()
        if streamed and not self._slots:
            wanted = min(plan.slots, len(streamed))
            self._get_slots(wanted)
            if len(self._slots) < wanted:
                denied = self._held()
        if not self._slots:
            for i in streamed:
                placements[i] = Placement.CPU
        return placements, denied

    def _get_slots(self, count: int) -> None:
        for _ in range(count):
            buffer = self._allocate(self._rank.loads.slot_bytes)
            if buffer is None:
                break
            self._slots.append(buffer)

    def _free_slots(self) -> None:
        for buffer in self._slots:
            self._device.free(buffer)
        self._slots, self._prefetched = [], []

    def _allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self._device.allocate(nbytes)
        except torch.OutOfMemoryError:
            return None

    def _makespan(
        self,
        placements: Sequence[Placement],
        before: set[int],
        leaving: Sequence[int],
        left: Sequence[int],
        prefetching: int | None,
    ) -> float:
        """Seconds of backward and update, issued as the engine does.

        before: subgroups that were on the device at the end of backward. left: whose gradients left during it.
        prefetching: at whose gradient slots were filled; None: after backward.
        """
        rank, n = self._rank, len(placements)
        costs = [
            demand(Placement.CPU, load, rank.profile) | demand(Placement.GPU_STREAMED, load, rank.profile)
            for load in rank.loads.subgroups
        ]
        tasks = Tasks()
        pieces = {i: tasks.add(Stream.COMPUTE, rank.backward_s / n, 0.0) for i in reversed(range(n))}
        backward = [pieces[0]]
        gradients = {i: tasks.add(Stream.GRADIENT, *costs[i][Stream.GRADIENT], [pieces[i]]) for i in left}
        settling = [i for i, p in enumerate(placements) if p is Placement.GPU_RESIDENT and i not in before]
        arrivals = {i: tasks.add(Stream.PREFETCH, *costs[i][Stream.PREFETCH], [pieces[n - 1]]) for i in self._arriving}
        arrivals |= {i: tasks.add(Stream.PREFETCH, *costs[i][Stream.PREFETCH], backward) for i in settling}
        updated = {
            i: tasks.add(Stream.GPU, *costs[i][Stream.GPU], [*backward, *([arrivals[i]] if i in arrivals else [])])
            for i, p in enumerate(placements)
            if p is Placement.GPU_RESIDENT
        }
        for i, placement in enumerate(placements):
            if placement is Placement.CPU:
                if i not in gradients:
                    gradients[i] = tasks.add(Stream.GRADIENT, *costs[i][Stream.GRADIENT], backward)
                update = tasks.add(Stream.CPU, *costs[i][Stream.CPU], [gradients[i], *backward])
                tasks.add(Stream.PARAMETER, *costs[i][Stream.PARAMETER], [update])
        for i in leaving:
            tasks.add(Stream.FLUSH, *costs[i][Stream.FLUSH], [updated[i]])
        first = backward if prefetching is None else [pieces[prefetching]]
        flushes: list[int] = []
        for turn, i in enumerate(i for i, p in enumerate(placements) if p is Placement.GPU_STREAMED):
            vacated = first if turn < len(self._slots) else [flushes[turn - len(self._slots)]]
            prefetch = tasks.add(Stream.PREFETCH, *costs[i][Stream.PREFETCH], vacated)
            update = tasks.add(Stream.GPU, *costs[i][Stream.GPU], [prefetch, *backward])
            flushes.append(tasks.add(Stream.FLUSH, *costs[i][Stream.FLUSH], [update]))
        tasks.serve(rank.profile)
        return max(tasks.end)


@dataclass(frozen=True)
class Verdict:
    """One script over several seeds.

    over_bound: mean seconds of an iteration over the bound's, by seed. exceeded: seeds with which more memory was used
    than there is. waited: mean number of iterations at whose end the neighbour waited for memory.
    """

    script: str
    over_bound: tuple[float, ...]
    exceeded: int
    waited: float

    def missed(self) -> list[str]:
        """What was to hold and does not."""
        found = {
            f"capacity exceeded with {self.exceeded} of {len(self.over_bound)} seeds": self.exceeded > 0,
            f"{max(self.over_bound):.3f} of the bound": max(self.over_bound) > MOST_OVER_BOUND,
        }
        return [f"{self.script}: {what}" for what, missed in found.items() if missed]


def run(setting: Setting, iterations: int, seed: int = 0) -> Run:
    """A whole training beside the setting's neighbour."""
    model = Model(setting, seed)
    for _ in range(iterations):
        model.iterate()
    return model.run


def judge(script: str, alone: Setting, iterations: int, seeds: Iterable[int]) -> Verdict:
    """One of the scripted neighbours. seeds: of the noise, and of how long samples take."""
    over, exceeded, waited = [], 0, []
    for seed in seeds:
        setting = alone.beside(neighbours(alone.rank.free_bytes, iterations, seed)[script])
        found = run(setting, iterations, seed)
        over.append(found.iteration_s(typical=False) / bound_s(setting, iterations))
        exceeded += found.exceeded
        waited.append(found.unmet_iterations)
    return Verdict(script, tuple(over), exceeded, statistics.fmean(waited))


def report(console: Console, iterations: int, seeds: int, *, as_json: bool) -> int:
    """Judge all scripts and print; exit status 1 if something was missed."""
    alone = Setting.of(PublishedRank.read())
    verdicts = [judge(script, alone, iterations, range(seeds)) for script in neighbours(1, iterations)]
    table = Table(title=f"Iteration times in virtual time, {iterations} iterations, {seeds} seeds")
    for heading in ("memory", "over bound, mean", "most", "exceeded", "waited"):
        table.add_column(heading, justify="left" if heading == "memory" else "right")
    for v in verdicts:
        mean, most = statistics.fmean(v.over_bound), max(v.over_bound)
        table.add_row(v.script, f"{mean:.3f}", f"{most:.3f}", f"{v.exceeded} of {seeds}", f"{v.waited:.1f}")
    console.print(table)
    missed = [what for v in verdicts for what in v.missed()]
    console.print(f"missed: {', '.join(missed) or 'nothing'}")
    if as_json:
        print(json.dumps({"verdicts": [asdict(v) for v in verdicts], "missed": missed}))
    return int(bool(missed))
