"""The best plans that are known for one workload on one machine, by division of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from perfmodel.balance import Balance
from perfmodel.division import Division, divisions, fits
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Scope, Simulator
from perfmodel.workload import Workload

MOST_SIMULATED = 128
"""Subgroups. Of more, a simulation takes too long, and the closed form is as good."""
LOOKED_AT = 4
"""Divisions of memory of which plans are simulated, those that are best so far."""
NEAR = 0.03
"""Share of an iteration by which the closed form may be wrong; by one subgroup's share more where there are few."""
FIRST_STEP = 2
"""Subgroups by which the first plans that are simulated differ."""
WORTHWHILE = 0.01
"""Share of an iteration by which another plan must shorten it where all state could stay on the GPU."""


class Choice(NamedTuple):
    """The parts of a plan: a division of memory, and how many subgroups the CPU updates.

    cost: seconds by which it makes the iteration longer.
    """

    cost: float
    division: Division
    on_cpu: int


class Answers:
    """Costs by the closed form at once, and by the simulator where that has looked.

    workload: that they are for. How much memory there is for it, each question says. compute_s: seconds of compute in
        an iteration.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile) -> None:
        self.workload = workload
        self.profile = profile
        self._scope = Scope.beside(workload)
        self.compute_s = self._scope.compute_s(workload)
        self._balance = Balance(workload, profile)
        self._known: dict[Division, _Answer] = {}
        self._waits: dict[tuple[frozenset[int], int], float] = {}
        self._asked: Workload | None = None
        self._some: list[Division] = []

    def best(self, workload: Workload) -> Choice:
        """Return the best choice for this memory; all state on the GPU where that is about as good.

        A division that was not simulated must be better by more than the closed form may be wrong.
        """
        best = min(self._choices(self._judged(workload)), key=self._doubted)
        if not fits(workload):
            return best
        simulated = self._known[best.division].simulated
        stays_s = self.compute_s + simulated.get(0, 0.0)
        if workload.backward_s and 0 in simulated and self.compute_s + best.cost <= (1 - WORTHWHILE) * stays_s:
            return best
        return Choice(self.cost(best.division, 0), best.division, 0)

    def was_simulated(self, division: Division) -> bool:
        """Whether the simulator has looked at plans of this division."""
        return bool(self._known[division].simulated)

    def cost(self, division: Division, on_cpu: int) -> float:
        """Seconds by which the choice makes the iteration longer."""
        (answer,) = self._of([division])
        return answer.cost(on_cpu)

    def _doubted(self, choice: Choice) -> float:
        """The cost of a choice, with the error of the closed form where that alone says it."""
        error = 0.0 if self.was_simulated(choice.division) else self._error(choice.cost)
        return choice.cost + error

    def _error(self, cost: float) -> float:
        """Seconds by which the closed form may be wrong about this cost."""
        return (NEAR + 1 / len(self.workload.subgroups)) * (self.compute_s + cost)

    def learn(self, workload: Workload, tasks: int) -> bool:
        """Simulate plans for this memory, one at least, up to this number of tasks. Return whether all are known."""
        if len(workload.subgroups) > MOST_SIMULATED:
            return True
        some, simulator, last = self._judged(workload), Simulator(workload, self.profile, self._scope, self._waits), 0
        # With as little and with as much of the saved tensors on the host as can be, and of the weights, besides: where
        # all others are streamed, the closed form may be wrong by more than its usual error.
        groups = [some]
        for amount in (attrgetter("activation_bytes"), lambda division: len(division.blocks)):
            amounts = {amount(division) for division in some}
            extremes = sorted({min(amounts), max(amounts)}) if len(amounts) > 1 else []
            groups += [[d for d in some if amount(d) == extreme] for extreme in extremes]
        while simulator.tasks + last <= tasks:
            before = simulator.tasks
            found = next(filter(None, map(self._next, groups)), None)
            if found is None:
                return True
            division, on_cpu = found
            seconds = simulator.makespan(division.plan(workload, on_cpu))
            self._known[division].simulated[on_cpu] = seconds - self.compute_s
            last = simulator.tasks - before
        return False

    def _next(self, some: Sequence[Division]) -> tuple[Division, int] | None:
        """The next of these divisions to simulate, with the number on the CPU; None if the best are known."""
        ranked = sorted(self._choices(some), key=attrgetter("cost"))[:LOOKED_AT]
        most = ranked[0].cost + self._error(ranked[0].cost)
        for choice in ranked:
            on_cpu = self._known[choice.division].next() if choice.cost <= most else None
            if on_cpu is not None:
                return choice.division, on_cpu
        return None

    def _choices(self, some: Sequence[Division]) -> list[Choice]:
        answers = zip(some, self._of(some), strict=True)
        return [Choice(each.cost(each.on_cpu), division, each.on_cpu) for division, each in answers]

    def _judged(self, workload: Workload) -> list[Division]:
        """Divisions that can be compared: without compute times, those of which as little leaves as has to."""
        if self._asked is not workload:
            some = divisions(workload)
            if not (workload.forward_s and workload.backward_s):
                some = [d for d in some if d.activation_bytes == some[0].activation_bytes]
                most = max(len(d.blocks) for d in some)
                some = [d for d in some if len(d.blocks) == most]
            self._asked, self._some = workload, some
        return self._some

    def _of(self, some: Sequence[Division]) -> list[_Answer]:
        missing = [division for division in some if division not in self._known]
        if missing:
            rows = zip(missing, self._balance.exposed(missing), strict=True)
            n = len(self.workload.subgroups)
            # Where all state could stay on the GPU, others are compared with that.
            self._known |= {d: _Answer(row, [0] if len(d.residents) == n else []) for d, row in rows}
        return [self._known[division] for division in some]


class _Answer:
    """The best number of subgroups on the CPU for one division of memory.

    simulated: seconds by which an iteration is longer, by that number.
    """

    def __init__(self, balanced: np.ndarray, first: Sequence[int]) -> None:
        """balanced: the same by the closed form, for all numbers. first: to be simulated in any case."""
        self.simulated: dict[int, float] = {}
        self._balanced = balanced
        self._first = first
        self._near, self._step = int(balanced.argmin()), FIRST_STEP
        self._least, self._most = int(np.isfinite(balanced).argmax()), len(balanced) - 1

    @property
    def on_cpu(self) -> int:
        """The best number so far."""
        return min(self.simulated, key=self.simulated.__getitem__, default=self._near)

    def cost(self, on_cpu: int) -> float:
        """Seconds of `simulated`, else those of the closed form."""
        return self.simulated.get(on_cpu, float(self._balanced[on_cpu]))

    def next(self) -> int | None:
        """The next number to simulate: downhill from the closed form's, in ever smaller steps; None at the bottom."""
        while True:
            below, above = self._near - self._step, self._near + self._step
            around = [self._near, max(below, self._least), min(above, self._most)]
            for on_cpu in (*self._first, *around):
                if on_cpu not in self.simulated:
                    return on_cpu
            best = min(around, key=self.simulated.__getitem__)
            if best == self._near and self._step == 1:
                return None
            self._near, self._step = best, self._step if best != self._near else self._step // 2
