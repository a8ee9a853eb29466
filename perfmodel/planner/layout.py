"""Which GPUs of a job work together: nodes, shards of the model, replicas of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Group(NamedTuple):
    """Ranks that run collectives together.

    size: ranks. per_node: of them in each node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return self.size // self.per_node


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job are arranged, one GPU each.

    ranks: of the whole job. nodes: with equally many ranks each.
    replicas: copies of the model (HSDP); each is divided over neighbouring ranks, so that a
        replica lies within a node where it can.

    Raises ValueError for what cannot be.
    """

    ranks: int = 1
    nodes: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")
        if self.ranks % self.nodes:
            raise ValueError(
                f"--ranks {self.ranks} cannot be divided equally over {self.nodes} nodes: it counts "
                f"the GPUs of all nodes together; choose a multiple of {self.nodes}"
            )
        if self.ranks % self.replicas:
            raise ValueError(
                f"--ranks {self.ranks} cannot be divided equally over {self.replicas} replicas of the "
                "model; choose --replicas among its divisors"
            )
        if self.shards % self.per_node and self.per_node % self.shards:
            raise ValueError(
                f"a replica on {self.shards} GPUs does not fill nodes of {self.per_node} GPUs, nor "
                "do several fill one; choose --replicas such that each takes whole nodes or an "
                "equal part of one"
            )

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return self.ranks // self.nodes

    @property
    def shards(self) -> int:
        """Ranks over which one replica is divided."""
        return self.ranks // self.replicas

    @property
    def sharding(self) -> Group:
        """The ranks of one replica: all of them if there is one."""
        return Group(self.shards, min(self.shards, self.per_node))

    @property
    def replication(self) -> Group:
        """The ranks that hold the same shard, one of each replica."""
        return Group(self.replicas, max(1, self.per_node // self.shards))
