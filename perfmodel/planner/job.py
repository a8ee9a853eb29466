"""Work of a job's ranks beside the optimizer: compute, collectives, copies of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.overlap import Pass, backward_s, forward_s
from perfmodel.planner.question import Group, Question

EFFICIENCY = 0.8
"""Share of NVLink's or the network's nominal bandwidth that NCCL's large collectives reach: on an
H100 all-gather reached 350 and reduce-scatter 360 of 450 GB/s (github.com/NVIDIA/nccl/issues/1281).
Links through the host count at the profile's rates, which are reached already."""
FORWARD, BACKWARD, AFTER_UPDATE = "forward", "backward", "after the update"
"""Moments of an iteration at which collectives run."""
GATHER = "all-gather of weights", "gather", 1
SCATTER = "reduce-scatter of gradients", "reduce", 1
REDUCE = "all-reduce of gradients", "reduce", 2
REPLICATE = "all-reduce between replicas", "replicate", 2
"""Names of collectives, their lanes of `overlap.Pass`, and rounds of the ring."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective, summed over all layers of an iteration.

    what, part: its name, and the moment of an iteration at which it runs. lane: of `overlap.Pass`. group: of ranks.
    moved: bytes that each rank sends, and as many that it receives.
    interconnect_s, network_s, pcie_s: seconds for which it keeps each GPU's link within the node busy, the node's
        network adapters, and each GPU's PCIe link, in both directions.
    """

    what: str
    part: str
    lane: str
    group: Group
    moved: float
    interconnect_s: float
    network_s: float
    pcie_s: float

    @property
    def seconds(self) -> float:
        """Seconds alone on its links: its ring is as fast as its slowest part. The latency of steps is not counted."""
        return max(self.interconnect_s, self.network_s)

    @property
    def over(self) -> str:
        """The links that it uses, for people."""
        if self.group.nodes == 1:
            return "within nodes"
        return "between nodes" if self.group.per_node == 1 else "within and between nodes"

    def to_json(self) -> dict[str, Any]:
        """Return its name, links, number of ranks, bytes and seconds."""
        size, nbytes, seconds = self.group.size, self.moved, self.seconds
        named = {"what": self.what, "part": self.part, "over": self.over}
        return {**named, "ranks": size, "bytes": nbytes, "seconds": seconds}


class Job:
    """One iteration of one rank, all others doing the same.

    interconnect: bytes/s, one way, that collectives get of one GPU's link within its node. over_pcie: whether that is
        PCIe. network: of a node's adapters; None if not known.
    collectives: of more than one rank.
    copied, returned: bytes of parameters on the host that a pass copies up, and of gradients that come down.
    compute_s: seconds of forward's and backward's arithmetic.
    """

    def __init__(self, question: Question, profile: HardwareProfile) -> None:
        """profile: with the question's ranks on each host."""
        self.question, self._profile, fabric = question, profile, question.fabric
        self._pcie = min(profile.h2d_bandwidth_duplex, profile.d2h_bandwidth_duplex)
        self.over_pcie = fabric.interconnect is None
        self.interconnect = self._pcie if fabric.interconnect is None else EFFICIENCY * fabric.interconnect
        self.network = None if fabric.network is None else EFFICIENCY * fabric.network
        self.collectives = tuple(each for each in self._collectives() if each.group.size > 1)
        self.copied = self.returned = 0
        if question.offload_parameters:
            self.copied = question.share(question.model.numel, 1) * question.value_bytes
            self.returned = question.state_numel * question.value_bytes
        forward, backward = question.flops
        self.compute_s = forward / question.flops_rate, backward / question.flops_rate

    def _collectives(self) -> Iterator[Collective]:
        """Yield the collectives of data-parallel training with ZeRO's stage; 3 is FSDP2, or HSDP with several replicas.

        Volumes as in Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models", section 7: twice the model without ZeRO and with stages 1 and 2, three times
        with stage 3, which gathers weights in forward and again in backward (reshard_after_forward).
        HSDP reduces each shard's gradients between replicas besides.
        """
        question, sharding = self.question, self.question.sharding
        weights, gradients = (float(n * question.value_bytes) for n in (question.model.numel, question.trained))
        if question.sharded:
            yield self._collective(GATHER, FORWARD, weights, sharding)
            yield self._collective(GATHER, BACKWARD, weights, sharding)
            yield self._collective(SCATTER, BACKWARD, gradients, sharding)
            yield self._collective(REPLICATE, BACKWARD, gradients / sharding.size, question.replication)
        elif question.stage:
            yield self._collective(SCATTER, BACKWARD, gradients, sharding)
            yield self._collective(GATHER, AFTER_UPDATE, weights, sharding)
        else:
            yield self._collective(REDUCE, BACKWARD, gradients, sharding)

    def _collective(self, kind: tuple[str, str, int], part: str, nbytes: float, group: Group) -> Collective:
        """Return the collective of `nbytes` of whole tensors.

        In a ring (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth") (n - 1) / n of the bytes pass every link in each
        round. It crosses from node to node once, and NCCL makes as many rings as there are adapters, so that a group
        has the bandwidth of all adapters that are not used by another: of groups that run at once in a node, each has
        an equal part. Every byte also passes the PCIe link of one of the group's GPUs (GPUDirect RDMA).
        """
        what, lane, rounds = kind
        moved = rounds * (group.size - 1) / group.size * nbytes
        interconnect_s = moved / self.interconnect if group.per_node > 1 else 0.0
        network_s = pcie_s = 0.0
        if group.nodes > 1:
            assert self.network is not None, "a question of several nodes has a network"
            share = group.per_node / self.question.per_node
            network_s = moved / min(self.network * share, self._pcie * group.per_node)
            pcie_s = moved / group.per_node / self._pcie
        if self.over_pcie:
            pcie_s = moved / self._pcie
        return Collective(what, part, lane, group, moved, interconnect_s, network_s, pcie_s)

    @property
    def has_communication(self) -> bool:
        """Whether there is anything beside compute."""
        return bool(self.collectives) or self.copied > 0

    def forward_s(self, updated: float = 0.0) -> float:
        """Seconds of forward. updated: as for `overlap.forward_s`."""
        if not self.has_communication:
            return self.compute_s[0]
        whole = self._pass(FORWARD, self.compute_s[0], self.copied / self._profile.h2d_bandwidth)
        return forward_s(whole, self.question.model.layers, updated)

    @property
    def backward_s(self) -> float:
        """Seconds of backward."""
        if not self.has_communication:
            return self.compute_s[1]
        whole = self._pass(BACKWARD, self.compute_s[1], self.copied / self._profile.h2d_bandwidth_duplex)
        down = self.returned / self._profile.d2h_bandwidth_duplex
        return backward_s(whole._replace(down=down), self.question.model.layers)

    def _pass(self, part: str, compute: float, copied: float) -> Pass:
        """Return a pass with `copied` seconds of copying up, which one rank alone does not hide.

        Where nothing has to be gathered FSDP2 copies on the stream on which it computes (torch 2.13,
        `FSDPParamGroup.unshard` and `wait_for_unshard` with a world of one rank).
        """
        beside = {each.lane: each.seconds for each in self.collectives if each.part == part}
        if self.question.shards == 1:
            return Pass(compute + copied, **beside)
        return Pass(compute, up=copied, **beside)

    @property
    def after_update_s(self) -> float:
        """Seconds between the update and the next forward."""
        return sum(each.seconds for each in self.collectives if each.part == AFTER_UPDATE)
