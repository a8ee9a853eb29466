"""How GPUs reach one another, by data sheets (`machines.json`), and what collectives get of it."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.datasheets import DATA
from perfmodel.planner.layout import Group, Layout

EFFICIENCY = 0.8
"""Share of NVLink's or the network's nominal bandwidth that NCCL's large collectives reach: on an
H100 all-gather reached 350 and reduce-scatter 360 of 450 GB/s (github.com/NVIDIA/nccl/issues/1281).
Links through the host count at the profile's rates, which are what is reached already."""


@dataclass(frozen=True)
class Fabric:
    """Nominal bandwidth between GPUs, one way, in bytes/s.

    interconnect: of one GPU to the others of its node; None: its PCIe link, at the profile's rates.
    network: of one node to the other nodes, all its adapters together; None: not known.
    within, between: what they are of, for people.
    """

    interconnect: float | None = None
    network: float | None = None
    within: str = "PCIe, as the profile has it"
    between: str = ""


PCIE = Fabric()
"""Of machines of which nothing is known but the profile."""
FABRICS = {name: Fabric(**values["fabric"]) for name, values in DATA["machines"].items() if "fabric" in values}
"""By the name of the built-in profile; the networks of desktops are not known."""


@dataclass(frozen=True)
class Routes:
    """What collectives get: bytes/s, one way, in a job of this layout.

    interconnect: of one GPU within its node. over_pcie: whether that is its PCIe link.
    network: of one node; None if not known. pcie: of one GPU's link, both directions at once.
    """

    interconnect: float
    over_pcie: bool
    network: float | None
    pcie: float
    layout: Layout

    @classmethod
    def of(cls, fabric: Fabric, profile: HardwareProfile, layout: Layout) -> Routes:
        """In a job on machines of this profile."""
        pcie = min(profile.h2d_bandwidth_duplex, profile.d2h_bandwidth_duplex)
        return cls(
            interconnect=pcie if fabric.interconnect is None else EFFICIENCY * fabric.interconnect,
            over_pcie=fabric.interconnect is None,
            network=None if fabric.network is None else EFFICIENCY * fabric.network,
            pcie=pcie,
            layout=layout,
        )

    def within(self, group: Group) -> float:
        """Of the group's ring inside a node; infinite if it has no such part."""
        return self.interconnect if group.per_node > 1 else float("inf")

    def between(self, group: Group) -> float:
        """Of the group's ring from node to node; infinite if it stays in one.

        A ring crosses from node to node once, and NCCL makes as many rings as there are adapters,
        so that a group has the bandwidth of all adapters that are not used by another: of groups
        that run at once in a node, each has an equal part. Every byte also passes the PCIe link of
        one of the group's GPUs (GPUDirect RDMA).
        """
        if group.nodes == 1:
            return float("inf")
        assert self.network is not None, "a question of several nodes has a network"
        share = group.per_node / self.layout.per_node
        return min(self.network * share, self.pcie * group.per_node)

    def bandwidth(self, group: Group) -> float:
        """Of the group's ring: that of its slowest part."""
        return min(self.within(group), self.between(group))
