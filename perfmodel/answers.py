"""The best plan for the memory of one iteration: a closed form proposes some, the simulator picks one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from perfmodel.balance import Balance
from perfmodel.compute import memory_freed
from perfmodel.demand import demand
from perfmodel.division import SLOTS_TRIED, Division, divisions, fits
from perfmodel.floor import Floor
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Placement, Plan
from perfmodel.simulate import Scope, Simulator
from perfmodel.workload import SubgroupLoad, Workload

MOST_SIMULATED = 128
"""Subgroups. Of more, a simulation takes too long: a part of them is planned, and the others alike."""
MOST_PLACED = 256
"""The same where there are blocks or saved tensors, whose places matter: of more, the closed form's plan is taken. It
was 16% behind the best for 34 billion parameters in 170 subgroups on an H100."""
PROPOSED = 4
"""Divisions of memory of which a plan is simulated, those that are best by the closed form."""
STRIDES = (1, 2, 3, 4)
"""Of every k-th subgroup that is not resident, which are looked at besides."""
RATIOS = (0.1, 0.25, 0.5)
"""Shares of subgroups on the CPU that are looked at besides where all fit."""
FEW = 12
"""Subgroups up to which all numbers of them on the CPU are looked at: the closed form is about many."""
FIRST_STEP = 2
"""Subgroups by which the plans differ that are simulated after these."""
FEWEST, TASKS = 3, 700
"""Of these neighbours, at least, and as many as have this number of tasks, each of which takes three to five us. Twice
as many found nothing better on 60 drawn workloads of two measured machines."""
FEWEST_BESIDE = 12
"""The same where updates run beside backward: the closed form does not know when each gradient comes."""
NEAR, FAR = 0.06, 0.25
"""Shares of an iteration by which the closed form may be wrong: about the best plans, and about those of policies, or
whose slots only offloaded gradients pass."""
EVEN = 0.03
"""Share of many subgroups by which a stride may differ that takes the place of the best number on the CPU of a part of
them: the next forward waits less for turns in an order that recurs, which a part is too short to tell."""
ALIKE, ALIKE_BESIDE = 0.003, 0.01
"""Shares of an iteration by which plans differ that are about as good: the second where updates run beside backward,
whose host they make later than a model can know."""
WORTHWHILE = 0.01
"""Share of an iteration by which another plan must be shorter where all state could stay on the GPU."""


AT_ONCE = 128
"""Divisions of which the closed form is computed together: with more, its arrays take longer to allocate."""
REMEMBERED = 64
"""Amounts of memory for which the plan is remembered."""
_COST = attrgetter("cost")
AMPLE: dict[str, Any] = {
    "peak_free_bytes": math.inf,
    "shared_free_bytes": math.inf,
    "half_freed_bytes": None,
    "passing_bytes": 0,
    "activation_least_bytes": 0,
    "activation_host_bytes": math.inf,
}
"""Memory of the workload that answers are for; each question has its own."""


Memory = tuple[float, ...]
"""These figures of a question."""


class Choice(NamedTuple):
    """The parts of a plan: a division of memory, how many subgroups the CPU updates, and the order.

    cost: seconds by which it makes the iteration longer. reverse: whether subgroups are updated in the order of their
        gradients, the last first, and not in forward's.
    """

    cost: float
    division: Division
    on_cpu: int
    reverse: bool = False


class Answers:
    """The best plans for one workload on one machine, for any memory.

    workload: that they are for. How much memory there is for it, each question says. Results are remembered by division
        of memory, so that memory that comes and goes finds its answers ready.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile) -> None:
        self.workload = workload
        self.profile = profile
        self._scope = Scope.beside(workload)
        self._compute_s = self._scope.compute_s(workload)
        alone = dataclasses.replace(workload, forward_s=0.0, backward_s=0.0) if workload.in_backward else workload
        self._balance = Balance(alone, profile, self._compute_s if workload.in_backward else 0.0)
        self._alike = ALIKE_BESIDE if workload.in_backward else ALIKE
        self._proposed: dict[Division, np.ndarray] = {}
        self._known: dict[tuple[Division, int, tuple[int, ...], bool], float] = {}
        self._floor = Floor(workload, profile, self._scope)
        self._least: dict[tuple[Division, int], float] = {}
        self._divided: dict[tuple[Division, int], Plan] = {}
        self._busy: dict[tuple[SubgroupLoad, Placement], float] = {}
        self._plans: dict[Memory, tuple[float, Plan]] = {}
        """By memory."""
        self._ranked: tuple[Memory, list[Division], list[Choice]] | None = None
        """Of the last memory: its divisions, and the best plan of each by the closed form, the best first."""
        self._simulator = Simulator(workload, profile)
        self._part: Answers | None = None
        """For a part of so many subgroups that a simulation of all takes too long."""

    def best(self, workload: Workload) -> tuple[float, Plan]:
        """Return the best plan for this memory, all state on the GPU where that is about as good.

        First the seconds of the iteration: of its compute, and by which the optimizer makes that longer.

        It follows from the arguments alone: what was found before is remembered, and changes no answer.
        """
        memory = _memory(workload)
        if memory not in self._plans:
            if len(self._plans) == REMEMBERED:
                self._plans.pop(next(iter(self._plans)))
            best = self._choose(workload)
            plan = self._plan(best.division, best.on_cpu)
            self._plans[memory] = self._compute_s + best.cost, _reversed(plan) if best.reverse else plan
        return self._plans[memory]

    def proposed_s(self, workload: Workload) -> float:
        """Seconds of the iteration of the best plan by the closed form."""
        return self._compute_s + self._rank(workload)[1][0].cost

    def _rank(self, workload: Workload) -> tuple[list[Division], list[Choice]]:
        """Return the divisions of this memory, and the best plan of each by the closed form, the best first."""
        memory = _memory(workload)
        if self._ranked is None or self._ranked[0] != memory:
            some = _comparable(workload)
            self._ranked = memory, some, sorted(self._choices(some), key=_COST)
        return self._ranked[1:]

    def _choose(self, workload: Workload) -> Choice:
        some, choices = self._rank(workload)
        if len(workload.subgroups) > (MOST_PLACED if workload.blocks or workload.activations else MOST_SIMULATED):
            return self._as_a_part(workload, choices)
        best, least_s = self._simulated(workload, choices)
        if fits(workload):
            all_stay = [each for each in some if dataclasses.replace(each, slots=some[0].slots) == some[0]]
            stays = min((Choice(self._seconds(workload, each, 0), each, 0) for each in all_stay), key=_COST)
            about_as_good = self._compute_s + stays.cost <= (1 + WORTHWHILE) * (self._compute_s + least_s)
            best = stays if about_as_good or not self._compute_s else best
        if workload.returns and not workload.in_backward:  # what arrives first may return while others still leave
            other = best._replace(cost=self._seconds(workload, best.division, best.on_cpu, reverse=True), reverse=True)
            best = other if self._as_good(other) < best.cost else best
        return best

    def _as_a_part(self, workload: Workload, choices: Sequence[Choice]) -> Choice:
        """The plan that has as large a share on the CPU as the best of every k-th subgroup has, with as many slots.

        Of blocks and saved tensors, whose places matter, the best plan by the closed form, unless all stay.
        """
        if (workload.blocks or workload.activations) and not fits(workload):
            return choices[0]
        every = -(-len(workload.subgroups) // MOST_SIMULATED)
        part = _every(workload, every)
        if self._part is None:
            self._part = Answers(dataclasses.replace(part, **AMPLE), self.profile)
        found = self._part._choose(part)
        alike = [each for each in choices if each.division.streams is found.division.streams] or choices
        division = min(alike, key=lambda each: abs(each.division.slots - found.division.slots)).division
        few, many = (
            len(work.subgroups) - len(each.residents) for work, each in ((part, found.division), (workload, division))
        )
        on_cpu = round(many * min(1.0, found.on_cpu / max(few, 1))) + max(0, found.on_cpu - few) * every
        even = min((many - many // k for k in STRIDES[1:]), key=lambda each: abs(each - on_cpu))
        on_cpu = even if workload.forward_s and abs(even - on_cpu) <= EVEN * many else on_cpu
        least, most = self._range(division)
        return Choice(found.cost * every, division, min(max(on_cpu, least), most), found.reverse)

    def _simulated(self, workload: Workload, choices: Sequence[Choice]) -> tuple[Choice, float]:
        """The best of some plans that the closed form proposes, of those of fixed policies, and of neighbours.

        Of plans that are about as good, the one that keeps host and links busy for the least time; and the least cost.
        """
        found = list[Choice]()

        def look(division: Division, on_cpu: int) -> Choice:
            # Plans that cannot be as good as the best so far are not simulated.
            if not found or self._least_s(division, on_cpu) <= self._as_good(min(found, key=_COST)):
                found.append(Choice(self._seconds(workload, division, on_cpu), division, on_cpu))
            return min(found, key=_COST)

        first, *proposed = [
            *((each, NEAR if each.division.streams else FAR) for each in _varied(choices)),
            *((each, FAR) for each in self._fixed(choices)),
        ]
        start = best = look(first[0].division, first[0].on_cpu)
        for choice, error in sorted(proposed, key=lambda each: each[0].cost):
            if choice.cost - error * (self._compute_s + choice.cost) < best.cost:
                best = look(choice.division, choice.on_cpu)
        if best is not start:  # the closed form may be right but for the last subgroup, for which all wait
            least, most = self._range(start.division)
            for on_cpu in {max(start.on_cpu - FIRST_STEP, least), min(start.on_cpu + FIRST_STEP, most)}:
                best = look(start.division, on_cpu)
        if len(workload.subgroups) <= FEW:
            for division in dict.fromkeys(choice.division for choice, _ in (first, *proposed)):
                least, most = self._range(division)
                for on_cpu in range(least, most + 1):
                    best = look(division, on_cpu)
        each = len(workload.subgroups) * (2 + (workload.backward_s > 0) + (workload.forward_s > 0))
        left, step = max(FEWEST, TASKS // each), FIRST_STEP
        if workload.in_backward:
            left, step = FEWEST_BESIDE, max(FIRST_STEP, len(workload.subgroups) // 8)
        while step and left > 0:
            before, (least, most) = best, self._range(best.division)
            for on_cpu in sorted({max(before.on_cpu - step, least), min(before.on_cpu + step, most)} - {before.on_cpu}):
                left -= 1
                best = look(before.division, on_cpu)
            step = step if best is not before else step // 2
        limit = self._as_good(best, self._alike)
        good = [choice for choice in found if choice.cost <= limit]
        return min(good, key=lambda choice: self._busy_s(workload, choice)), best.cost

    def _as_good(self, best: Choice, share: float = ALIKE) -> float:
        """The most that a plan costs which is about as good, to this share of the iteration."""
        return best.cost + share * (self._compute_s + best.cost)

    def _least_s(self, division: Division, on_cpu: int) -> float:
        """Seconds by which a plan makes the iteration longer at least, by sums of work."""
        key = division, on_cpu
        if key not in self._least:
            counted = self._floor.counts_suffice
            self._least[key] = (
                self._floor.seconds_of(*key) if counted else self._floor.seconds(self._plan(division, on_cpu))
            )
        return self._least[key]

    def _busy_s(self, workload: Workload, choice: Choice) -> float:
        """Seconds for which a plan keeps the CPU and the links busy."""
        plan, times, blocks = self._plan(choice.division, choice.on_cpu), workload.micro_batches, workload.blocks
        away = sum(block.nbytes for b, block in enumerate(blocks) if b not in plan.blocks_on_device)
        moved = (plan.activation_bytes + away) * 2 * times / self.profile.h2d_bandwidth
        return moved + sum(self._placed_s(load, p) for load, p in zip(workload.subgroups, plan.placements, strict=True))

    def _placed_s(self, load: SubgroupLoad, placement: Placement) -> float:
        key = load, placement
        if key not in self._busy:
            costs = demand(placement, load, self.profile)
            returned = 0 if placement is Placement.CPU else load.returned_bytes
            seconds = sum(cost.seconds for stream, cost in costs.items() if stream is not Stream.GPU)
            self._busy[key] = seconds + returned / self.profile.h2d_bandwidth
        return self._busy[key]

    def _seconds(self, workload: Workload, division: Division, on_cpu: int, *, reverse: bool = False) -> float:
        """Seconds by which a plan makes the iteration longer, simulated once. reverse: as of a choice."""
        plan = self._plan(division, on_cpu)
        # Backward frees memory for slots sooner where more is free beside state.
        key = division, on_cpu, memory_freed(plan, workload, plan.slots) if division.streams else (), reverse
        if key not in self._known:
            simulator = Simulator(workload, self.profile, self._scope, self._simulator)
            self._known[key] = simulator.makespan(_reversed(plan) if reverse else plan) - self._compute_s
        return self._known[key]

    def _plan(self, division: Division, on_cpu: int) -> Plan:
        key = division, on_cpu
        if key not in self._divided:
            self._divided[key] = division.plan(self.workload, on_cpu)
        return self._divided[key]

    def _choices(self, some: Sequence[Division]) -> Iterator[Choice]:
        """For each division the best number of subgroups on the CPU, by the closed form."""
        missing = [division for division in some if division not in self._proposed]
        for begin in range(0, len(missing), AT_ONCE):
            few = missing[begin : begin + AT_ONCE]
            self._proposed |= zip(few, self._balance.exposed(few), strict=True)
        for division in some:
            row = self._proposed[division]
            on_cpu = int(row.argmin())
            yield Choice(float(row[on_cpu]), division, on_cpu)

    def _fixed(self, choices: Sequence[Choice]) -> Iterator[Choice]:
        """The plans of fixed policies: of what is not resident all is on the CPU, or every k-th is streamed."""
        found, most = dict[object, Division](), max(len(choice.division.blocks) for choice in choices)
        many = self.workload.activations or self.workload.blocks  # divisions, and simulations take long
        for division in (each.division for each in choices):
            found.setdefault((division.streams, 0 if many else division.slots), division)
            if most and len(division.blocks) == most:  # such policies keep the weights of all blocks that have room
                found.setdefault((division.streams, division.slots, most), division)
        for division in dict.fromkeys(found.values()):
            n = len(self.workload.subgroups)
            others = n - len(division.residents)
            ratios = (round(n * ratio) for ratio in RATIOS if not others)
            for on_cpu in sorted({others, *(others - -(-others // k) for k in STRIDES), *ratios}):
                if self._range(division)[0] <= on_cpu <= self._range(division)[1]:
                    yield Choice(float(self._proposed[division][on_cpu]), division, on_cpu)

    def _range(self, division: Division) -> tuple[int, int]:
        """The least and the largest number of subgroups on the CPU that a division allows."""
        row = self._proposed[division]
        return int(np.isfinite(row).argmax()), len(row) - 1


def _memory(workload: Workload) -> Memory:
    return tuple(getattr(workload, name) for name in AMPLE)


def _reversed(plan: Plan) -> Plan:
    return dataclasses.replace(plan, order=plan.order[::-1])


def _varied(choices: Sequence[Choice]) -> list[Choice]:
    """The first of these, and the first of those at each end of what else divisions differ in."""
    found = dict.fromkeys(choices[:PROPOSED])
    for amount in (attrgetter("activation_bytes"), lambda division: len(division.blocks), attrgetter("streams")):
        amounts = {amount(each.division) for each in choices}
        for extreme in sorted({min(amounts), max(amounts)}) if len(amounts) > 1 else []:
            found[next(choice for choice in choices if amount(choice.division) == extreme)] = None
    return list(found)


def _comparable(workload: Workload) -> list[Division]:
    """Divisions that can be compared: without compute times, those of which as little leaves as has to."""
    some = divisions(workload)
    if not (workload.forward_s and workload.backward_s):
        some = [d for d in some if d.activation_bytes == some[0].activation_bytes]
        most = max(len(d.blocks) for d in some)
        some = [d for d in some if len(d.blocks) == most]
    return some


def _every(workload: Workload, k: int) -> Workload:
    """Return a workload of every k-th subgroup alone, with its part of memory and time, and all slots that fit.

    Where all fits, weights stay, and few saved tensors move: they are left out.
    """
    slots = workload.slots_within(min(workload.shared_free_bytes, workload.update_free_bytes), SLOTS_TRIED[-1])
    staged = workload.staging_bytes(slots)
    room = min(workload.peak_free_bytes, workload.shared_free_bytes - staged)
    room = math.inf if fits(workload) else room
    return dataclasses.replace(
        workload,
        subgroups=workload.subgroups[k // 2 :: k],
        forward_s=workload.forward_s / k,
        backward_s=workload.backward_s / k,
        ahead_s=workload.ahead_s / k,
        peak_free_bytes=room / k,
        shared_free_bytes=math.inf,
        update_free_bytes=staged,
        host_free_bytes=workload.host_free_bytes / k,
        activations=(),
        blocks=(),
    )
