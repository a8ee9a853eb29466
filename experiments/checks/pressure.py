"""Memory: is a budget kept, and does training go on as if nothing were when a neighbour takes memory and frees it?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from experiments.checks.base import Bench, Size, Target
from experiments.checks.calibration import measured_profile
from experiments.checks.neighbour import Neighbour
from experiments.checks.plans import same
from experiments.checks.training import (
    PRESSED,
    SETTINGS,
    Batch,
    Job,
    deterministic,
    fitted,
    free_memory,
    prepare,
)
from experiments.checks.vitals import vitals
from experiments.gpt import GPT
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile

ITERATIONS = {Size.TINY: 6, Size.SMALL: 36, Size.FULL: 36}
"""A third alone, a third beside the neighbour, a third after it has gone."""
SUBGROUPS = 12


class Pressure(Protocol):
    """Somebody else on the device."""

    def want(self, nbytes: int) -> None:
        """Hold so many bytes from now on, as far as there are."""

    def held(self) -> int:
        """Bytes that it holds."""

    def close(self) -> None:
        """Go away."""


class EmulatedNeighbour:
    """On an emulated device with room for the state and half of it again."""

    def __init__(self, state_bytes: int) -> None:
        self.wanted = 0
        profile = HardwareProfile.builtin("h100").scaled(1 / 50)
        self.device = EmulatedDevice(profile, capacity=3 * state_bytes // 2, neighbour=lambda: self.wanted)

    def want(self, nbytes: int) -> None:
        self.wanted = nbytes

    def held(self) -> int:
        self.device.memory()
        return self.wanted - self.device.unmet_bytes

    def close(self) -> None:
        self.wanted = 0


def run(bench: Bench) -> None:
    """The same training on the host alone, with a budget, and beside a neighbour: the same bits."""
    with deterministic():
        device = prepare(bench)
        job = fitted(PRESSED[bench.size], bench.settings)
        state_bytes = int(SPLIT.state_bytes) * job.numel
        batches = job.batches(ITERATIONS[bench.size], device)
        profile = measured_profile(bench.out, device) if bench.cuda else None
        bench.note(parameters=job.numel, state_bytes=state_bytes, iterations=len(batches))
        emulated = None if bench.cuda else EmulatedNeighbour(state_bytes)

        expected = trained(job, batches, device, emulated, policy="cpu")
        budget = state_bytes // 2
        capped = Run(job, device, emulated, policy="adaptive", profile=profile, memory_budget=budget)
        held = [capped.iterate(batch)["memory_held_bytes"] for batch in batches]
        bench.note(budget={"bytes": budget, "most_held_bytes": max(held), "held_bytes": held})
        if max(held) > budget:
            bench.problem(f"with memory_budget={budget} optimizer state held {max(held):.0f} bytes")
        if not same(expected, capped.parameters()):
            bench.problem("parameters have other bits with memory_budget= than on the host")
        bench.note(**vitals(capped.optimizer, bench.cuda))
        del capped
        free_memory(bench.cuda)
        beside(bench, job, batches, device, emulated, profile, expected)


def beside(
    bench: Bench,
    job: Job,
    batches: Sequence[Batch],
    device: torch.device,
    emulated: EmulatedNeighbour | None,
    profile: HardwareProfile | None,
    expected: Sequence[Tensor],
) -> None:
    """Train with a neighbour that comes and goes."""
    neighbour: Pressure = emulated or Neighbour()
    try:
        run = Run(job, device, emulated, policy="adaptive", profile=profile)
        third = len(batches) // 3
        rows = []
        for i, batch in enumerate(batches):
            if i == third:
                # All that is free, and half of what optimizer state may have taken.
                neighbour.want(run.free_bytes() + int(SPLIT.state_bytes) * job.numel // 2)
                neighbour.held()  # it has what is free before the iterations begin that are judged
            if i == 2 * third:
                neighbour.want(0)
                neighbour.held()
            start = time.perf_counter()
            metrics = run.iterate(batch)
            rows.append(
                {
                    "seconds": time.perf_counter() - start,
                    "resident_share": metrics["share_gpu_resident"],
                    "held_bytes": metrics["memory_held_bytes"],
                    "free_bytes": metrics["memory_free_bytes"],
                    "neighbour_bytes": neighbour.held(),
                }
            )
            bench.note(beside_a_neighbour=rows)
        if not same(expected, run.parameters()):
            bench.problem("parameters have other bits beside a neighbour than on the host")
    finally:
        neighbour.close()
    bench.target(Target.at_most("iterations that ran out of the model's own memory", run.repeated, 0))
    alone, pressed, after = (rows[end - 1]["resident_share"] for end in (third, 2 * third, len(rows)))
    bench.target(
        Target(
            "state makes room for a neighbour and returns",
            pressed,
            "less on the device beside it than before and after",
            pressed < min(alone, after),
            f"shares resident: before {alone:.0%}, beside it {pressed:.0%}, after {after:.0%}",
        )
    )


class Run:
    """A model and its optimizer. repeated: forwards and backwards for which the device had no memory."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        emulated: EmulatedNeighbour | None,
        *,
        policy: str,
        profile: HardwareProfile | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.repeated = 0
        self._emulated = emulated
        self._model: GPT = job.model(device)
        self.optimizer = DOSAdam(
            self._model.parameters(),
            policy=policy,
            profile=profile,
            subgroup_size=job.numel // SUBGROUPS + 1,
            memory_budget=memory_budget,
            device=None if emulated is None else emulated.device,
            **SETTINGS,
        )

    def iterate(self, batch: Batch) -> dict[str, float]:
        """One iteration; the optimizer's metrics of it.

        If a neighbour has taken what the model itself needs, state goes home and forward and backward run once more.
        """
        try:
            self.optimizer.zero_grad()
            self._model(*batch).backward()
        except torch.OutOfMemoryError:
            self.repeated += 1
            self.optimizer.zero_grad()
            self.optimizer.release_memory()
            self._model(*batch).backward()
        self.optimizer.step()
        return self.optimizer.metrics()

    def free_bytes(self) -> int:
        """Of the device, for others."""
        return torch.cuda.mem_get_info()[0] if self._emulated is None else self._emulated.device.memory().free

    def parameters(self) -> list[Tensor]:
        self.optimizer.synchronize()
        return [p.detach() for p in self._model.parameters()]


def trained(
    job: Job, batches: Sequence[Batch], device: torch.device, emulated: EmulatedNeighbour | None, *, policy: str
) -> list[Tensor]:
    """The parameters after training under a policy; nothing else is kept."""
    run = Run(job, device, emulated, policy=policy)
    for batch in batches:
        run.iterate(batch)
    found = [p.clone() for p in run.parameters()]
    del run
    free_memory(emulated is None)
    return found
