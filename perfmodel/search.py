"""The search for the plan with the least exposed time; the simulator alone judges.

As many subgroups are resident as fit: they cost nothing on a scarce lane. Two numbers remain: how many of the others
the CPU updates, and how many staging slots there are where those take their memory from residents. They are found
for a few subgroups of mean size first, then near there for as many as there are, FINE at most. Where saved tensors may
leave, how many do is a third: beginning with none and all, places on both sides of the best are tried, ever nearer.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.policies import cpu_only, resident, spilled
from perfmodel.simulate import Scope, Simulator
from perfmodel.workload import SIZES, SubgroupLoad, Workload, peak_room

MAX_SLOTS = 8
"""Three keep both links busy; more let prefetches go on while the GPU updates resident subgroups."""
SLOTS_TRIED = (2, 1, 4, 0)
"""Where memory for slots is taken from residents, in this order."""
LEVELS = {16: 1.6, 48: 1.12}
"""Subgroups of a sample for first answers, and how many times the least cost is still worth a look in the next."""
FINE = 128
"""Subgroups that are simulated at most."""
MOST_TASKS = 5
"""Of a subgroup in a simulation: three for its update, one of backward and one of forward; and from and to disk two."""
NEAREST = 1 / 16
"""Share of the saved tensors by which the amounts that are tried differ at least."""
MOST_ANSWERS = 4
"""First answers that are worth a look in the next."""
WORTHWHILE = 0.01
"""Share of an iteration by which another plan must shorten it where all state could stay on the GPU."""


class _Memory(NamedTuple):
    """How device memory is divided. free: bytes for residents."""

    slots: int
    activation_bytes: int
    free: float


class Search:
    """The search for one workload. It can stop at any simulation and go on later.

    Each step follows from what was simulated before: to go on is to take all steps again with what is known.

    plan: the best of the last stage that has ended; before that, one for which there is room.
    ended: whether that was the last of all.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile) -> None:
        self.workload, self.profile = workload, profile
        self.ended = False
        self._fits = workload.state_bytes <= min(workload.peak_free_bytes, workload.shared_free_bytes)
        self._leaving = _leaving(workload)
        first = resident(workload) if self._fits else cpu_only(workload)
        self.plan = dataclasses.replace(spilled(first, workload), activation_bytes=self._leaving[0])
        self._most_tasks = MOST_TASKS + 2 * math.isfinite(workload.host_free_bytes)
        self._samples: dict[tuple[_Memory, int], _Sample] = {}
        self._began, self._most = 0, 0.0
        """Tasks simulated before the call of `advance`, and at its end, at most."""

    @property
    def tasks(self) -> int:
        """Simulated so far."""
        return sum(sample.simulator.tasks for sample in self._samples.values())

    def advance(self, tasks: float) -> None:
        """Go on as long as no more tasks than that are simulated, or one simulation's."""
        self._began, self._most = self.tasks, self.tasks + tasks
        try:
            self.plan = self._best_plan()
            self.ended = True
        except _PauseError:
            pass

    def _best_plan(self) -> Plan:
        """The whole search."""
        n = len(self.workload.subgroups)
        size, *finer = [*(level for level in LEVELS if n >= 1.5 * level), min(n, FINE)]
        answers: list[tuple[float, _Sample, int]] = []
        near, step, found = size // 2, size // 4, dict[int, int]()  # by slots: each has a valley of its own
        costs, stride = dict[int, float](), len(self._leaving) - 1
        places = [0, stride] if stride else [0]
        while places:
            for place in places:
                for memory in _divisions(self.workload, self._leaving[place], self._fits):
                    sample = self._sample(memory, size)
                    near, step = self._lowest(sample, found.get(memory.slots, near), step, sample.ends), 1
                    found[memory.slots] = near
                    answers.append((self._cost(sample, near), sample, near))
                    costs[place] = min(costs.get(place, math.inf), answers[-1][0])
                    self.plan = self._judged(*min(answers, key=_cost_of))
            best, stride = min(costs, key=costs.__getitem__), stride // 2
            near_best = {best - stride, best + stride} if stride >= NEAREST * len(self._leaving) else set()
            places = [place for place in near_best if 0 <= place < len(self._leaving) and place not in costs]
        for finer_size in finer:
            answers = self._worth_a_look(answers)
            limit = LEVELS[size] * answers[0][0]
            answers = [self._refined(answer, finer_size, limit) for answer in answers if answer[0] <= limit]
            size = finer_size
        return self._judged(*min(answers, key=_cost_of))

    def _worth_a_look(self, answers: Iterable[tuple[float, _Sample, int]]) -> list[tuple[float, _Sample, int]]:
        """The best in ascending order, and those if none and if all leaves: samples are not that exact."""
        answers, ends = sorted(answers, key=_cost_of), (self._leaving[0], self._leaving[-1])
        at_ends = ([each for each in answers if each[1].memory.activation_bytes == end] for end in ends)
        chosen = dict.fromkeys(answer for some in (answers, *at_ends) for answer in some[:MOST_ANSWERS])
        return sorted(chosen, key=_cost_of)

    def _refined(self, answer: tuple[float, _Sample, int], size: int, limit: float) -> tuple[float, _Sample, int]:
        """The same for more subgroups. limit: what the ends may have cost to be looked at again."""
        _, before, on_cpu = answer
        sample = self._sample(before.memory, size)
        pairs = zip(sample.ends, before.ends, strict=True)
        ends = [end for end, earlier in pairs if self._cost(before, earlier) <= limit]
        on_cpu = self._lowest(sample, before.scaled(on_cpu, sample), max(1, size // before.size // 2), ends)
        return self._cost(sample, on_cpu), sample, on_cpu

    def _judged(self, cost: float, sample: _Sample, on_cpu: int) -> Plan:
        """The plan of an answer; all state on the GPU if it fits and that is about as good."""
        workload = self.workload
        if self._fits:
            compute_s, all_resident_s = sample.compute_s, self._cost(sample, 0)
            if not workload.backward_s or compute_s + cost > (1 - WORTHWHILE) * (compute_s + all_resident_s):
                return dataclasses.replace(resident(workload), activation_bytes=sample.memory.activation_bytes)
        whole = self._sample(sample.memory, len(workload.subgroups))
        if sample is not whole:
            grown = self._grown(sample, on_cpu, whole) if sample.size == FINE else sample.scaled(on_cpu, whole)
            on_cpu = min(max(round(grown), whole.least), whole.size)
        return whole.plan(on_cpu)

    def _grown(self, sample: _Sample, on_cpu: int, whole: _Sample) -> float:
        """An answer for more subgroups than were simulated: on a straight line through those for two sizes."""
        if on_cpu - sample.least <= 1 or on_cpu > sample.others:
            return sample.scaled(on_cpu, whole)
        smaller = self._sample(sample.memory, max(LEVELS))
        before = self._bottom(smaller, self._lowest(smaller, sample.scaled(on_cpu, smaller), 1))
        now = self._bottom(sample, on_cpu)
        slope = (now - before) / max(sample.others - smaller.others, 1)
        return now + min(max(slope, 0.0), 1.0) * (whole.others - sample.others)

    def _lowest(self, sample: _Sample, near: int, step: int, ends: Iterable[int] = ()) -> int:
        """The number on the CPU at the bottom of the valley that `near` is in, or an end that is lower."""
        best = min(max(near, sample.least), sample.size)
        while step:
            tried = (best, max(best - step, sample.least), min(best + step, sample.size))
            better = min(tried, key=lambda on_cpu: self._cost(sample, on_cpu))
            best, step = better, step if better != best else step // 2
        return min((best, *ends), key=lambda on_cpu: self._cost(sample, on_cpu))

    def _bottom(self, sample: _Sample, best: int) -> float:
        """Where the lines through the costs on both sides of the lowest cross, which is between whole numbers."""
        if not sample.least + 2 <= best <= sample.size - 2:
            return best
        far, below, above, beyond = (self._cost(sample, best + offset) for offset in (-2, -1, 1, 2))
        fall, rise = below - far, beyond - above
        if rise - fall <= 1e-9 * above:
            return best
        crossing = best + (below + fall - above + rise) / (rise - fall)
        return min(max(crossing, best - 1.0), best + 1.0)

    def _cost(self, sample: _Sample, on_cpu: int) -> float:
        """Exposed seconds with so many subgroups on the CPU, for as much as the whole has. Raises _PauseError."""
        if on_cpu not in sample.costs:
            leaving = self.workload.leaving(sample.memory.activation_bytes)
            most = self._most - self._most_tasks * sample.size - 4 * len(leaving)
            if self.tasks > max(self._began, most):
                raise _PauseError
            sample.costs[on_cpu] = sample.exposed(on_cpu)
        return sample.costs[on_cpu]

    def _sample(self, memory: _Memory, size: int) -> _Sample:
        if (memory, size) not in self._samples:
            self._samples[memory, size] = _Sample(self.workload, self.profile, memory, size)
        return self._samples[memory, size]


_cost_of = itemgetter(0)
"""Of an answer: the cost, the sample, and the number on the CPU."""


class _PauseError(Exception):
    """Enough was simulated for now."""


class _Sample:
    """A workload in so many subgroups, with a division of memory.

    A smaller one has residents and others in the proportion of the whole; the others are of its mean size. So has it
    subgroups on disk, to the nearest, but those that windows keep from step to step: they count as on the host.

    least: number on the CPU where all others are streamed. others: than those for which there is room to be resident.
    ends: where nearly all others are streamed, which may be better than the valley in between.
    costs: what is known of them, by the number on the CPU.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile, memory: _Memory, size: int) -> None:
        self.memory, self.slots, self.size, self.costs = memory, memory.slots, size, dict[int, float]()
        residents: Sequence[int] = _fitting(workload, memory.free)
        self._activation_bytes = memory.activation_bytes
        self._workload, self._residents, self._share = workload, residents, 1.0
        count, held = len(workload.subgroups), len(residents)
        if size < count:
            mean, some = _mean(workload.subgroups), round(held * size / count)
            some = min(max(some, held > 0), size - min(count - held, size // 2))  # not too few of the others
            self._share = (size - some) / (count - held) if held < count else size / count
            each = _times(mean, held * self._share / some) if some else mean
            peak = workload.peak_free(memory.activation_bytes)
            spare = max(0.0, peak - workload.state_bytes_of(residents))
            left = workload.leaving(memory.activation_bytes)
            left = tuple(saved._replace(nbytes=round(saved.nbytes * self._share)) for saved in left)
            self._activation_bytes = sum(saved.nbytes for saved in left)
            gained = self._share * peak_room(workload.activations, memory.activation_bytes)
            kept = workload.windows * mean.host_bytes * workload.reverses
            self._workload = Workload(
                (each,) * some + (mean,) * (size - some),
                workload.forward_s * self._share,
                workload.backward_s * self._share,
                max(0.0, some * each.state_bytes + spare - gained),
                workload.update_free_bytes,
                activations=left,
                host_free_bytes=(workload.host_free_bytes + kept) * self._share + mean.host_bytes / 2,
                windows=workload.windows,
            )
            self._residents = range(some)
        self.others = size - len(self._residents)
        self.least = 0 if self.slots else self.others
        self.ends = (self.least, min(self.least + 1, size))
        self.scope = Scope.beside(workload)
        self.simulator = Simulator(self._workload, profile, self.scope)

    @property
    def compute_s(self) -> float:
        """Seconds of compute that the whole has."""
        return self.scope.compute_s(self._workload) / self._share

    def exposed(self, on_cpu: int) -> float:
        """Seconds by which the optimizer makes compute longer, for as much as the whole has."""
        return self.simulator.makespan(self.plan(on_cpu)) / self._share - self.compute_s

    def scaled(self, on_cpu: float, other: _Sample) -> int:
        """The same number for a sample of another size."""
        if on_cpu - self.least <= 1:
            return other.least + round(on_cpu) - self.least
        if on_cpu <= self.others:
            return round(on_cpu * other.others / self.others)
        return other.others + round((on_cpu - self.others) * len(other._residents) / len(self._residents))

    def plan(self, on_cpu: int) -> Plan:
        """Residents, as many as there is room for and others; CPU and streamed alternating evenly among the rest.

        So no lane waits, and parameters arrive evenly for the forward.
        """
        loads = self._workload.subgroups
        placements = [Placement.CPU] * self.size
        for i in self._residents[: self.size - on_cpu]:
            placements[i] = Placement.GPU_RESIDENT
        rest = [i for i, placement in enumerate(placements) if placement is Placement.CPU]
        if self.slots and on_cpu < len(rest):
            share = 1 - on_cpu / len(rest)
            # So that the first is streamed and the GPU starts at once.
            owed = (0.5 - share) * sum(loads[i].numel for i in rest) / len(rest)
            for i in rest:
                owed += share * loads[i].numel
                if owed >= (0.5 - 1e-9) * loads[i].numel:
                    placements[i] = Placement.GPU_STREAMED
                    owed -= loads[i].numel
        slots = min(self.slots, placements.count(Placement.GPU_STREAMED))
        return spilled(Plan(tuple(placements), tuple(range(self.size)), slots, self._activation_bytes), self._workload)


def _leaving(workload: Workload) -> list[int]:
    """How many bytes of saved tensors may leave, in ascending order: no more than makes room for all state.

    In between only those that make room for one more resident subgroup.
    """
    sums = accumulate((saved.nbytes for saved in workload.activations), initial=0)
    fitting = [nbytes for nbytes in dict.fromkeys(sums) if nbytes <= workload.activation_host_bytes]
    allowed = [nbytes for nbytes in fitting if nbytes >= workload.activation_least_bytes] or fitting[-1:]
    if not (workload.forward_s and workload.backward_s):
        return allowed[:1]
    taken = list(accumulate(sorted((load.state_bytes for load in workload.subgroups), reverse=True)))
    amounts: dict[int, int] = {}  # by how many can be resident: the least
    for nbytes in allowed:
        amounts.setdefault(bisect(taken, min(workload.peak_free(nbytes), workload.shared_free(nbytes))), nbytes)
    return sorted({*amounts.values()} if len(taken) in amounts else {*amounts.values(), allowed[-1]})


def _divisions(workload: Workload, activation_bytes: int, fits: bool) -> list[_Memory]:
    """Divisions of memory, if so much of the saved tensors leaves; several where residents and slots share theirs."""
    if fits:
        return [_Memory(0, activation_bytes, math.inf)]
    peak = workload.peak_free(activation_bytes)
    shared, slot = workload.shared_free(activation_bytes), max(workload.slot_bytes, 1)
    slots = int(min(MAX_SLOTS, workload.update_free_bytes / slot))
    if math.isinf(shared):
        return [_Memory(slots, activation_bytes, peak)]
    tried = dict.fromkeys(min(slots, most) for most in SLOTS_TRIED if most * slot <= shared)
    return [_Memory(count, activation_bytes, min(peak, shared - count * slot)) for count in tried]


def _mean(loads: Sequence[SubgroupLoad]) -> SubgroupLoad:
    """The mean subgroup, to the nearest byte, in the format that most have."""
    means = (round(sum(getattr(load, size) for load in loads) / len(loads)) for size in SIZES)
    return SubgroupLoad(*means, format=statistics.mode(load.format for load in loads))


def _times(load: SubgroupLoad, factor: float) -> SubgroupLoad:
    """One so many times as large."""
    return SubgroupLoad(*(round(factor * getattr(load, size)) for size in SIZES), format=load.format)


def _fitting(workload: Workload, free: float) -> list[int]:
    """Subgroups whose state fits into so many bytes, larger ones first."""
    loads = workload.subgroups
    found = []
    for i in sorted(range(len(loads)), key=lambda i: -loads[i].state_bytes):
        if loads[i].state_bytes <= free:
            free -= loads[i].state_bytes
            found.append(i)
    return found
