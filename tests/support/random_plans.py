"""Hypothesis strategies for saved tensors, plans that change at every call, and plans of one placement."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from dos.planning.policies import AdaptivePolicy
from perfmodel import Placement, Plan, Workload
from perfmodel.workload import SavedTensors


@st.composite
def saved_tensors(draw: st.DrawFn, nbytes: int) -> tuple[SavedTensors, ...]:
    """Saved tensors of any sizes up to a limit, saved and due at any times."""
    sizes = draw(st.lists(st.integers(1, nbytes), max_size=8))
    shares = st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)).map(sorted)
    return tuple(map(SavedTensors, sizes, draw(shares), reversed(draw(shares))))


class RandomPlans:
    """A policy that answers every workload with another plan; the same sequence for the same seed."""

    def __init__(self, seed: int, slots: int) -> None:
        self.random = random.Random(seed)
        self.slots = slots

    def __call__(self, workload: Workload) -> Plan:
        n = len(workload.subgroups)
        order = list(range(n))
        self.random.shuffle(order)
        left = self.random.randint(0, len(workload.activations)) if workload.activations else 0
        leaving = sum(saved.nbytes for saved in workload.activations[:left])
        return Plan(tuple(self.random.choices(list(Placement), k=n)), tuple(order), self.slots, leaving)


class ChangingPlans(AdaptivePolicy):
    """The same at every call, of which there are two in an iteration: as backward begins, and in the update."""

    def __init__(self, seed: int, slots: int) -> None:
        super().__init__()
        self.plans = RandomPlans(seed, slots)

    def __call__(self, workload: Workload) -> Plan:
        return self.plans(workload)


def all_in(placement: Placement, workload: Workload, slots: int = 0) -> Plan:
    """All subgroups in one place."""
    n = len(workload.subgroups)
    return Plan((placement,) * n, tuple(range(n)), slots)


class Changes(AdaptivePolicy):
    """Another plan at every call, of which there are two in an iteration: as backward begins, and in the update."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def __call__(self, workload: Workload) -> Plan:
        n = len(workload.subgroups)
        placements = tuple(self.random.choices(list(Placement), [1, 1, 2], k=n))
        return Plan(placements, tuple(self.random.sample(range(n), n)), slots=2)


class InTurn(AdaptivePolicy):
    """All subgroups in one place, at each call the next; the last one stays."""

    def __init__(self, *placements: Placement) -> None:
        super().__init__()
        self.placements = list(placements)

    def __call__(self, workload: Workload) -> Plan:
        return all_in(self.placements.pop(0) if len(self.placements) > 1 else self.placements[0], workload, slots=2)
