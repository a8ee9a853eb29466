"""The time that one plan takes at least: sums of its work by lane, at a fraction of the cost of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.bounds import least_speeds, prices
from perfmodel.demand import demands, operation_demand, speed_beside_updates
from perfmodel.division import Division
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, H2D, Stream
from perfmodel.plan import Placement, Plan
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.workload import NO_TIMES, WEIGHT_WINDOW, SubgroupLoad, Workload

_Sums = tuple[float, ...]
"""Seconds of CPU, H2D, D2H and GPU alone; of D2H for gradients that may leave beside backward; of a turn of a slot."""


class Floor:
    """A lower bound of the simulated time of each plan of a workload.

    Lanes are busy with their own work at the speeds that they have beside each other. What the links can do beside
    backward is taken off, and what the CPU can once the step is issued. Disks, and weights that updates move, are left
    out.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile, scope: Scope) -> None:
        self._workload, self._profile = workload, profile
        self._hidden_s = 0.0
        if scope.backward is Phase.UPDATED:
            self._hidden_s, scope = scope.compute_s(workload), UPDATE_ALONE
        self._backward_s = workload.backward_s if scope.backward is Phase.OVERLAPPED else 0.0
        self._forward_s = workload.forward_s if scope.forward is Phase.OVERLAPPED else 0.0
        self._leave = bool(self._backward_s)
        self._ahead_s = min(workload.ahead_s, self._backward_s)
        self._host = NO_TIMES if self._hidden_s else workload.host
        self._kept = 0.0 if self._hidden_s else speed_beside_updates(workload, profile)
        members: dict[SubgroupLoad, list[int]] = {}
        for i, load in enumerate(workload.subgroups):
            members.setdefault(load, []).append(i)
        self._kinds = [(each, {p: self._sums(load, p) for p in Placement}) for load, each in members.items()]
        each = [demands(load, profile) for load in members]
        link = operation_demand(Stream.SAVE, workload.slot_bytes, workload.subgroups[0], profile)
        speeds = least_speeds(
            {
                CPU: [d[Stream.CPU] for d in each],
                H2D: [d[s] for d in each for s in (Stream.PARAMETER, Stream.PREFETCH)],
                D2H: [d[s] for d in each for s in (Stream.GRADIENT, Stream.FLUSH)] + [link],
            },
            profile,
        )
        worth = prices(speeds)
        most = (speeds[speeds[:, 0] == 0] @ worth.T).max(axis=0)  # in a second of backward, while the CPU is idle
        self._prices = np.column_stack([worth, most]).tolist()
        self._fill_s = max(d[Stream.PREFETCH].seconds for d in each)

    @property
    def counts_suffice(self) -> bool:
        """Whether all subgroups are alike, so that a plan's bound follows from its counts."""
        return len(self._kinds) == 1

    def seconds(self, plan: Plan) -> float:
        """Seconds by which the plan makes the iteration longer, at least."""
        counts = [_counted(plan, members) for members, _ in self._kinds]
        return self._seconds(counts, plan.slots, plan.activation_bytes, plan.blocks_on_device)

    def seconds_of(self, division: Division, on_cpu: int) -> float:
        """The same for the plan of a division where `counts_suffice`."""
        counts = division.counts(len(self._workload.subgroups), on_cpu)
        return self._seconds([counts], division.slots, division.activation_bytes, division.blocks)

    def _seconds(
        self, counts: Sequence[dict[Placement, int]], slots: int, activation_bytes: int, blocks: frozenset[int]
    ) -> float:
        """counts: subgroups by placement, for each kind."""
        work, profile = self._workload, self._profile
        cpu = up = down = gpu = early = turns = streamed = 0.0
        for of_kind, (_, sums) in zip(counts, self._kinds, strict=True):
            streamed += of_kind.get(Placement.GPU_STREAMED, 0)
            for placement, count in of_kind.items():
                a, b, c, d, e, f = sums[placement]
                cpu, up, down, gpu = cpu + count * a, up + count * b, down + count * c, gpu + count * d
                early, turns = early + count * e, turns + count * f
        before, called = self._backward_s, self._ahead_s
        slots = min(slots, round(streamed)) if not work.returns else slots
        filled = 0.0 if work.returns or not before else slots * self._fill_s
        found = before + self._forward_s + gpu
        on_cpu = sum(each.get(Placement.CPU, 0) for each in counts)
        host_s = self._host.seconds(on_cpu, streamed, slots)
        beside = min(max(cpu - host_s, 0.0), self._forward_s / self._kept) if self._kept else 0.0
        found = max(found, before - called + host_s + self._forward_s + (1 - self._kept) * beside)
        if turns and slots:
            found = max(found, before + (turns - filled) / slots)
        if self._forward_s:
            if activation_bytes:
                down += sum(saved.nbytes for saved in work.moved(activation_bytes)) / profile.d2h_bandwidth
            if work.blocks:
                away = sorted(block.nbytes for b, block in enumerate(work.blocks) if b not in blocks)
                up += sum(away[:-WEIGHT_WINDOW]) / profile.h2d_bandwidth
        for of_cpu, of_up, of_down, most in self._prices:
            ahead = filled * of_up + early * of_down + min(cpu, called) * of_cpu
            ahead = min(ahead, (before - called) * most + called)
            found = max(found, before + cpu * of_cpu + up * of_up + down * of_down - ahead)
        return found - before - self._forward_s - self._hidden_s

    def _sums(self, load: SubgroupLoad, placement: Placement) -> _Sums:
        def alone(stream: Stream, size: int) -> float:
            return operation_demand(stream, size, load, self._profile).seconds

        returned = load.returned_bytes
        # Offloaded gradients leave whatever updates them.
        leaves = alone(Stream.GRADIENT, load.gradient_bytes) if self._leave or not returned else 0.0
        early = leaves if self._leave else 0.0
        if placement is Placement.CPU:
            goes_up = 0.0 if self._workload.blocks else alone(Stream.PARAMETER, load.parameter_bytes)
            return alone(Stream.CPU, load.numel), goes_up, leaves, 0.0, early, 0.0
        offloaded = early if returned else 0.0
        gpu = alone(Stream.GPU, load.numel)
        if placement is Placement.GPU_RESIDENT:  # one launch updates all
            comes = alone(Stream.PREFETCH, returned) if returned else 0.0
            return 0.0, comes, offloaded, max(0.0, gpu - self._profile.launch_latency_s), offloaded, 0.0
        up, down = alone(Stream.PREFETCH, load.state_bytes + returned), alone(Stream.FLUSH, load.state_bytes)
        return 0.0, up, down + offloaded, gpu, offloaded, up + gpu + down


def _counted(plan: Plan, members: Sequence[int]) -> dict[Placement, int]:
    placements = plan.placements
    among = placements if len(members) == len(placements) else [placements[i] for i in members]
    return {placement: count for placement in Placement if (count := among.count(placement))}
