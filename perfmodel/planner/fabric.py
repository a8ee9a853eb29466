"""How GPUs reach one another: data sheets of the built-in machines, and what collectives get of it."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.hardware import HardwareProfile
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
NVLINK_3, NVLINK_4 = (300e9, "NVLink 3"), (450e9, "NVLink 4")
"""Data sheets: A100 600 GB/s in both directions together; H100, H200 and GH200 900 GB/s."""


def _fabric(nvlink: tuple[float, str] | None, adapters: int, gbit: int, what: str) -> Fabric:
    """Of nodes with so many network adapters, of so many Gb/s each."""
    network, between = adapters * gbit * 1e9 / 8, f"{adapters} x {gbit} Gb/s {what}"
    return Fabric(None, network, between=between) if nvlink is None else Fabric(nvlink[0], network, nvlink[1], between)


FABRICS = {
    "a100_bound": _fabric(NVLINK_3, 2, 200, "Slingshot 11, as ALCF's Polaris has"),
    "a100_unbound": _fabric(NVLINK_3, 2, 200, "Slingshot 11, as ALCF's Polaris has"),
    "a100_pcie_server": _fabric(None, 1, 200, "ConnectX-6, an assumption"),
    "gh200": _fabric(NVLINK_4, 1, 400, "ConnectX-7, an assumption"),
    "h100": _fabric(NVLINK_4, 4, 400, "ConnectX-7, one per GPU as the DGX H100 has"),
    "h200_node": _fabric(NVLINK_4, 8, 400, "ConnectX-7, as the DGX H200 has"),
    "l40s_server": _fabric(None, 1, 400, "ConnectX-7, an assumption"),
}
"""By the name of the built-in profile; the networks of desktops are not known. Sources: NVIDIA's
data sheets of the GPUs, of ConnectX-6 and of ConnectX-7; NVIDIA DGX H100/H200 User Guide, "Network
Modules": eight ConnectX-7, one per GPU; ALCF User Guides, "Polaris": four A100 with NVLink and two
Slingshot 11 adapters per node."""


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
