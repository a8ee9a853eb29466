"""Ranks of published runs with their recorded memory, and emulated devices in the same proportions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dos import EmulatedDevice
from dos.devices.emulated import Occupancy, Script
from experiments.miniature import slowed, without_fixed_costs
from experiments.paper.runs import TRACES, read_runs, read_trace
from experiments.paper.zero3 import Mode
from perfmodel import Workload
from perfmodel.hardware import HardwareProfile

LEVEL = 0.05
"""Share of the range of use within which it counts as the lowest."""


@dataclass(frozen=True)
class Recording:
    """Device memory that a training process holds in one iteration, by phase.

    forward, backward: bytes, sampled evenly over the phase. update: the most in that phase; what the recorded
        optimizer held in its own staging slots is part of it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: int

    @classmethod
    def read(cls, trace: str) -> Recording:
        """The iteration with the highest peak in a published trace.

        Iterations begin where use rises from its lowest, which it has between them. Backward ends at the iteration's
        peak and begins where, before that, use falls most from what it had reached: what forward alone needed goes.
        """
        used, _ = read_trace(trace)
        lowest = min(used) + LEVEL * (max(used) - min(used))
        starts = [i for i in range(len(used) - 1) if used[i] <= lowest < used[i + 1]]
        whole = max((used[slice(*ends)] for ends in itertools.pairwise(starts)), key=max)
        end = max(i for i, nbytes in enumerate(whole) if nbytes == max(whole)) + 1
        reached = list(itertools.accumulate(whole[:end], max))
        turn = max(range(1, end), key=lambda i: reached[i] - whole[i])
        # The first sample after the peak was taken while memory fell, so it belongs to neither side.
        return cls(tuple(whole[:turn]), tuple(whole[turn:end]), max(whole[end + 1 :]))

    @property
    def peak(self) -> int:
        """Bytes, the most in forward and backward."""
        return max(*self.forward, *self.backward)

    def scaled(self, factor: float) -> Recording:
        """The recording of a smaller or larger model."""
        forward, backward = (tuple(round(n * factor) for n in phase) for phase in (self.forward, self.backward))
        return Recording(forward, backward, round(self.update * factor))

    def script(self) -> list[tuple[float, int]]:
        """Points of (position, bytes) for a `Script`: forward is at 0 to 1, backward at 1 to 2, the update from 2."""
        points = [
            (phase + i / len(samples), nbytes)
            for phase, samples in enumerate((self.forward, self.backward))
            for i, nbytes in enumerate(samples)
        ]
        return [*points, (2.0, self.update)]


@dataclass(frozen=True)
class PublishedRank:
    """One rank of a published run, or a miniature of it: as small and slow as the model at hand needs.

    loads: the subgroups whose optimizer state it holds.
    forward_s, backward_s: of its compute. update_s: of its update, all on the CPU.
    memory_bytes: of its GPU. recording: what its process holds of that.
    profile: of its machine, without fixed costs, which are thousandths.
    """

    loads: Workload
    forward_s: float
    backward_s: float
    update_s: float
    memory_bytes: int
    recording: Recording
    profile: HardwareProfile

    @property
    def update_over_compute(self) -> float:
        """Seconds of the update over those of forward and backward."""
        return self.update_s / (self.forward_s + self.backward_s)

    @property
    def free_bytes(self) -> int:
        """Of its GPU, when least is free."""
        return self.memory_bytes - self.recording.peak

    @classmethod
    def read(cls, trace: str = "h100_20b_interleaved") -> PublishedRank:
        """The rank of one of `TRACES`, from the files in `experiments/data`.

        Runs differ in the share of the state on the CPU, so the update is extrapolated to all of it. Compute is what
        the fastest run needs, the one least held up by transfers.
        """
        machine, _, ranks = TRACES[trace]
        alike = [r for r in read_runs() if (r.machine_class, r.model, r.run.ranks_per_host) == TRACES[trace]]
        runs = [r for r in alike if r.run.mode is Mode.ASYNC_GRAD_ONLY]
        ratios, updates = [r.run.cpu_ratio for r in runs], [r.update_s for r in runs]
        whole = [u for ratio, u in zip(ratios, updates, strict=True) if ratio == 1.0]
        fastest = min(runs, key=lambda r: r.forward_s + r.backward_s)
        profile = HardwareProfile.builtin(machine)
        return cls(
            loads=Workload.of_sizes([round(fastest.run.subgroup_params)] * fastest.run.subgroups),
            forward_s=fastest.forward_s,
            backward_s=fastest.backward_s,
            update_s=float(np.median(whole) if whole else np.polyval(np.polyfit(ratios, updates, 1), 1.0)),
            memory_bytes=read_trace(trace)[1],
            recording=Recording.read(trace),
            profile=dataclasses.replace(without_fixed_costs(profile), ranks_per_host=ranks),
        )

    def miniature(self, loads: Workload, update_s: float) -> PublishedRank:
        """The rank for a smaller model, so slow that its update on the CPU takes `update_s` seconds.

        loads: subgroups of that model. Its state takes the same share of memory, its compute the same share of time.
        """
        share, slower = loads.numel / self.loads.numel, update_s / self.update_s
        return PublishedRank(
            loads=loads,
            forward_s=slower * self.forward_s,
            backward_s=slower * self.backward_s,
            update_s=update_s,
            memory_bytes=round(self.memory_bytes * share),
            recording=self.recording.scaled(share),
            profile=slowed(self.profile, loads, update_s),
        )

    def device(self, position: Callable[[], float], neighbour: Occupancy = 0) -> EmulatedDevice:
        """The device, on which the training holds what was recorded at the same position in the iteration."""
        occupied = Script(self.recording.script(), position)
        return EmulatedDevice(self.profile, self.memory_bytes, occupied, neighbour=neighbour)

    def workload(self, neighbour: float) -> Workload:
        """An iteration with the memory that there was for it beside a neighbour with so many bytes."""
        return dataclasses.replace(
            self.loads,
            backward_s=self.backward_s,
            peak_free_bytes=max(0, self.free_bytes - neighbour),
            shared_free_bytes=max(0, self.memory_bytes - self.recording.update - neighbour),
        )
