"""What the ranks of a job do beside the optimizer: compute, collectives, copies of parameters."""

from __future__ import annotations

from collections import Counter

from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, Stream
from perfmodel.plan import Placement, Plan
from perfmodel.planner.collectives import Collective, Kind, Part, collectives
from perfmodel.planner.disk import Traffic
from perfmodel.planner.fabric import Routes
from perfmodel.planner.overlap import Pass, backward_s, forward_s
from perfmodel.planner.question import Question
from perfmodel.timeline import Lane
from perfmodel.workload import Workload


class Job:
    """One iteration of one rank, all others doing the same.

    routes: what collectives get of the links. collectives: of more than one rank.
    copied, returned: bytes of parameters on the host that a pass copies up, and of gradients that come down.
    compute_s: seconds of forward's and backward's arithmetic; None if not known.
    """

    def __init__(self, question: Question, profile: HardwareProfile) -> None:
        """profile: with the question's ranks on each host."""
        layout, values = question.layout, question.value_bytes
        whole, trained = float(question.model.numel * values), float(question.trained * values)
        stage = 3 if question.sharded else min(question.stage, 2)
        self.routes = Routes.of(question.fabric, profile, layout)
        self.collectives: tuple[Collective, ...] = tuple(
            each
            for each in collectives(whole, trained, stage, layout.sharding, layout.replication)
            if each.group.size > 1
        )
        self.copied = question.share(question.model.numel, 1) * values if question.offload_parameters else 0
        self.returned = question.state_numel * values if question.offload_parameters else 0
        self.compute_s: tuple[float, float] | None = None
        if question.flops_rate is not None:
            forward, backward = question.model.flops(
                question.tokens, checkpointing=question.checkpointing, trainable=question.trainable
            )
            self.compute_s = forward / question.flops_rate, backward / question.flops_rate
        self._layers = question.model.layers
        self._micro_batches = question.micro_batches
        self._profile = profile

    @property
    def has_communication(self) -> bool:
        """Whether there is anything beside compute."""
        return bool(self.collectives) or self.copied > 0

    def forward_s(self, updated: float = 0.0) -> float:
        """Seconds of forward; 0 if compute is not known. updated: as for `overlap.forward_s`."""
        if self.compute_s is None:
            return 0.0
        if not self.has_communication:
            return self.compute_s[0]
        copied = self.copied / self._profile.h2d_bandwidth
        whole = self._pass(self.compute_s[0], copied, gather=self._seconds(Part.FORWARD, Kind.GATHER))
        return forward_s(whole, self._layers, updated)

    @property
    def backward_s(self) -> float:
        """Seconds of backward; 0 if compute is not known."""
        if self.compute_s is None:
            return 0.0
        if not self.has_communication:
            return self.compute_s[1]
        whole = self._pass(
            self.compute_s[1],
            self.copied / self._profile.h2d_bandwidth_duplex,
            gather=self._seconds(Part.BACKWARD, Kind.GATHER),
            reduce=self._seconds(Part.BACKWARD, Kind.SCATTER, Kind.REDUCE),
            replicate=self._seconds(Part.BACKWARD, Kind.REPLICATE),
            down=self.returned / self._profile.d2h_bandwidth_duplex,
        )
        return backward_s(whole, self._layers)

    def _pass(self, compute: float, copied: float, **beside: float) -> Pass:
        """With `copied` seconds of copying up, which one rank alone does not hide.

        Where nothing has to be gathered FSDP2 copies on the stream on which it computes (torch 2.13,
        `FSDPParamGroup.unshard` and `wait_for_unshard` with a world of one rank).
        """
        if self.routes.layout.shards == 1:
            return Pass(compute + copied, **beside)
        return Pass(compute, up=copied, **beside)

    @property
    def after_update_s(self) -> float:
        """Seconds between the update and the next forward."""
        return self._seconds(Part.AFTER_UPDATE, Kind.GATHER)

    def busy_s(self, plan: Plan, work: Workload) -> dict[str, float]:
        """Seconds for which each resource works in a step; empty if compute is not known.

        No iteration is shorter than the longest of them, however well everything overlaps. Links
        count at the rates of one direction alone, the optimizer's transfers as the plan has them.
        """
        if self.compute_s is None:
            return {}
        profile, routes = self._profile, self.routes
        seconds, traffic = dict.fromkeys(Lane, 0.0), 0.0
        for placement, load in zip(plan.placements, work.subgroups, strict=True):
            for stream, cost in demand(placement, load, profile).items():
                if not self.copied or stream is Stream.CPU:
                    seconds[LANE_OF_STREAM[stream]] += cost.seconds
                    traffic += cost.traffic
        disk = Traffic.of(plan, work, profile)
        together = Counter(
            load.format for load, p in zip(work.subgroups, plan.placements, strict=True) if p is Placement.GPU_RESIDENT
        )
        seconds[Lane.GPU] -= (together.total() - len(together)) * profile.launch_latency_s  # one launch for a format
        times = self._micro_batches
        pcie = sum(each.pcie_s(routes) for each in self.collectives) * times
        within = 0.0 if routes.over_pcie else sum(each.interconnect_s(routes) for each in self.collectives)
        copied = (2 * self.copied + self.returned) * times
        saved = plan.activation_bytes * times
        busy = {
            "compute": sum(self.compute_s) * times + seconds[Lane.GPU],
            "interconnect": within * times,
            "network": sum(each.network_s(routes) for each in self.collectives) * times,
            "PCIe to the GPU": pcie + seconds[Lane.H2D] + (2 * self.copied * times + saved) / profile.h2d_bandwidth,
            "PCIe to the host": pcie + seconds[Lane.D2H] + (self.returned * times + saved) / profile.d2h_bandwidth,
            "CPU": seconds[Lane.CPU],
            "disk": disk.busy_s,
            "host DRAM": (traffic + copied + 2 * saved + 2 * disk.moved_bytes) / profile.host_bandwidth_per_rank,
        }
        return {resource: busy_s for resource, busy_s in busy.items() if busy_s > 0}

    def _seconds(self, part: Part, *kinds: Kind) -> float:
        """Of the collectives of these kinds in a part of the iteration."""
        return sum(each.seconds(self.routes) for each in self.collectives if each.part is part and each.kind in kinds)
