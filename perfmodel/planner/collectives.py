"""The collectives of one iteration: what they move, over which links, and how long that takes."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.planner.fabric import Routes
from perfmodel.planner.layout import Group


class Part(enum.Enum):
    """When in an iteration a collective runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AFTER_UPDATE = "after the update"


class Kind(enum.Enum):
    """What a collective does, for people."""

    GATHER = "all-gather of weights"
    SCATTER = "reduce-scatter of gradients"
    REDUCE = "all-reduce of gradients"
    REPLICATE = "all-reduce between replicas"


@dataclass(frozen=True)
class Collective:
    """One kind of collective, summed over all layers of an iteration.

    nbytes: of the whole tensors: gathered, before they are scattered, or reduced.
    rounds: of the ring; an all-reduce is a reduce-scatter and an all-gather.
    """

    kind: Kind
    part: Part
    nbytes: float
    group: Group
    rounds: int = 1

    @property
    def moved(self) -> float:
        """Bytes that each rank sends, and as many that it receives: rounds (n - 1) / n of all.

        Ring collectives (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"): for all-gather and
        reduce-scatter (n - 1) / n of the bytes pass every link, for all-reduce twice that.
        """
        return self.rounds * (self.group.size - 1) / self.group.size * self.nbytes

    def seconds(self, routes: Routes) -> float:
        """Of its own, nothing else on its links; the latency of each step is not counted."""
        return self.moved / routes.bandwidth(self.group)

    def interconnect_s(self, routes: Routes) -> float:
        """For which it keeps each GPU's link within the node busy."""
        return self.moved / routes.within(self.group)

    def network_s(self, routes: Routes) -> float:
        """For which it keeps the node's network adapters busy."""
        return self.moved / routes.between(self.group)

    def pcie_s(self, routes: Routes) -> float:
        """For which it keeps each GPU's PCIe link busy, in both directions.

        Where GPUs are connected by PCIe, all of the ring passes there; else what leaves the node
        does, in equal parts by each of the group's GPUs.
        """
        if routes.over_pcie:
            return self.moved / routes.pcie
        return self.moved / self.group.per_node / routes.pcie if self.group.nodes > 1 else 0.0

    @property
    def over(self) -> str:
        """The links that it uses, for people."""
        if self.group.nodes == 1:
            return "within nodes"
        return "between nodes" if self.group.per_node == 1 else "within and between nodes"


def collectives(
    weights: float, gradients: float, stage: int, sharding: Group, replication: Group
) -> Iterator[Collective]:
    """Those of data-parallel training with ZeRO's stage; 3 is FSDP2, or HSDP with several replicas.

    weights, gradients: bytes of the whole model's.
    Volumes as in Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", section 7: twice the model without ZeRO and with stages 1 and 2, three times
    with stage 3, which gathers weights in forward and again in backward (reshard_after_forward).
    HSDP reduces each shard's gradients between replicas besides.
    """
    if stage >= 3:
        yield Collective(Kind.GATHER, Part.FORWARD, weights, sharding)
        yield Collective(Kind.GATHER, Part.BACKWARD, weights, sharding)
        yield Collective(Kind.SCATTER, Part.BACKWARD, gradients, sharding)
        shard = gradients / sharding.size
        yield Collective(Kind.REPLICATE, Part.BACKWARD, shard, replication, rounds=2)
    elif stage:
        yield Collective(Kind.SCATTER, Part.BACKWARD, gradients, sharding)
        yield Collective(Kind.GATHER, Part.AFTER_UPDATE, weights, sharding)
    else:
        yield Collective(Kind.REDUCE, Part.BACKWARD, gradients, sharding, rounds=2)
