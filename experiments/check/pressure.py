"""Memory: is a budget kept, and does training go on as if nothing were when a neighbour takes memory and frees it?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dos import DOSAdam, EmulatedDevice
from experiments.check.base import Bench, Size, Target
from experiments.check.calibration import measured_profile
from experiments.check.models import PRESSED, SETTINGS, Batch, Job, fitted, free_memory, prepare, vitals
from experiments.check.neighbour import Neighbour
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile

ITERATIONS = {Size.TINY: 6, Size.SMALL: 36, Size.FULL: 36}
"""A third alone, a third beside the neighbour, a third after it has gone."""
SUBGROUPS = 12


class EmulatedNeighbour:
    """As `Neighbour`, on an emulated device with room for the state and half of it again."""

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
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # see torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Torch would fill new memory, which hides a read of memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = prepare(bench)
    job = fitted(PRESSED[bench.size], bench)
    state_bytes = int(SPLIT.state_bytes) * job.numel
    batches = job.batches(ITERATIONS[bench.size], device)
    profile = measured_profile(bench.out, device) if bench.cuda else None
    emulated = None if bench.cuda else EmulatedNeighbour(state_bytes)
    bench.note(parameters=job.numel, state_bytes=state_bytes, iterations=len(batches))

    def training(policy: str, memory_budget: int | None = None) -> Training:
        free_memory(bench.cuda)
        return Training(job, device, emulated, policy, profile, memory_budget)

    with sdpa_kernel(SDPBackend.MATH):
        on_host = training("cpu")
        for batch in batches:
            on_host.iterate(batch)
        expected = [p.clone() for p in on_host.parameters()]
        del on_host
        budget = state_bytes // 2
        capped = training("adaptive", budget)
        most = max(capped.iterate(batch)["memory_held_bytes"] for batch in batches)
        bench.note(budget={"bytes": budget, "most_held_bytes": most}, **vitals(capped.optimizer, bench.cuda))
        if most > budget:
            bench.problem(f"with memory_budget={budget} optimizer state held {most:.0f} bytes")
        if not capped.equals(expected):
            bench.problem("parameters have other bits with memory_budget= than on the host")
        del capped
        pressed = training("adaptive")
        beside(bench, pressed, batches, emulated or Neighbour(), state_bytes)
        if not pressed.equals(expected):
            bench.problem("parameters have other bits beside a neighbour than on the host")


def beside(
    bench: Bench,
    training: Training,
    batches: Sequence[Batch],
    neighbour: Neighbour | EmulatedNeighbour,
    state_bytes: int,
) -> None:
    """Train with a neighbour that comes and goes."""
    rows = []
    third = len(batches) // 3
    try:
        for i, batch in enumerate(batches):
            if i == third:
                # All that is free, and half of what optimizer state may have taken.
                neighbour.want(training.free_bytes() + state_bytes // 2)
                neighbour.held()  # it has what is free before the iterations begin that are judged
            if i == 2 * third:
                neighbour.want(0)
                neighbour.held()
            start = time.perf_counter()
            metrics = training.iterate(batch)
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
    finally:
        neighbour.close()
    bench.target(Target.at_most("iterations that ran out of the model's own memory", training.repeated, 0))
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


class Training:
    """A model and its optimizer. repeated: forwards and backwards for which the device had no memory."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        emulated: EmulatedNeighbour | None,
        policy: str,
        profile: HardwareProfile | None,
        memory_budget: int | None,
    ) -> None:
        self.repeated = 0
        self._emulated = emulated
        self._model = job.model(device)
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

    def equals(self, expected: Sequence[Tensor]) -> bool:
        """Whether the parameters have these bits."""
        pairs = zip(self.parameters(), expected, strict=True)
        return all(torch.equal(ours.view(torch.uint8), other.view(torch.uint8)) for ours, other in pairs)
