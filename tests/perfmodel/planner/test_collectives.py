"""The collectives of an iteration: their volume against FSDP2's own, their time against a ring written out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.collectives import Collective, Kind, Part, collectives
from perfmodel.planner.fabric import EFFICIENCY, FABRICS, PCIE, Fabric, Routes
from perfmodel.planner.layout import Group, Layout
from tests.support.fake_ranks import fake_ranks
from tests.support.ranks import needs_fsdp2

H100 = HardwareProfile.builtin("h100")
GB = 1e9


@given(st.integers(2, 9), st.integers(1, 50))
def test_a_ring_written_out(size: int, chunk: int) -> None:
    """Every rank passes on what it got last until all have all; links count what each of them sends."""
    held = [{rank} for rank in range(size)]
    sent, last = 0, list(range(size))
    while any(len(chunks) < size for chunks in held):
        last = [last[rank - 1] for rank in range(size)]
        for chunks, got in zip(held, last, strict=True):
            chunks.add(got)
        sent += chunk
    each = Collective(Kind.GATHER, Part.FORWARD, size * chunk, Group(size, size))
    assert each.moved == pytest.approx(sent)


def test_a_rank_alone_moves_nothing() -> None:
    assert Collective(Kind.GATHER, Part.FORWARD, 1e9, Group(1, 1)).moved == 0


def volumes(stage: int, layout: Layout) -> float:
    """What each rank sends in an iteration, over the model's size."""
    return sum(each.moved for each in collectives(1.0, 1.0, stage, layout.sharding, layout.replication))


def test_volumes_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, section 7: 2, and 3 with stage 3, for many ranks."""
    many = Layout(1024, 128)
    assert [volumes(stage, many) for stage in range(4)] == pytest.approx([2, 2, 2, 3], rel=2e-3)


class _Watch(TorchDispatchMode):
    """Elements of whole tensors by collective, of all process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            self.elements[func.__name__.split(".")[0]] += max(t.numel() for t in tensors)
        return func(*args, **(kwargs or {}))


@needs_fsdp2
@pytest.mark.parametrize("replicas", [1, 2])
def test_volumes_are_fsdp2_s_own(replicas: int) -> None:
    """Blocks exactly. What the root keeps gathered is gathered once and counted twice, to be cautious."""
    shape, names = ((4,), None) if replicas == 1 else ((2, 2), ("replicate", "shard"))
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = nn.Sequential(nn.Embedding(32, 8), *(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 32))
        numel = sum(p.numel() for p in model.parameters())
        root = numel - 3 * 64
        for block in model[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with _Watch() as watch:
            model(torch.arange(4)).sum().backward()

    layout = Layout(4, replicas=replicas)
    ours: Counter[Kind] = Counter()
    for each in collectives(numel, numel, 3, layout.sharding, layout.replication):
        if each.group.size > 1:
            ours[each.kind] += int(each.nbytes)
    theirs = watch.elements
    assert theirs["_allgather_base_"] == ours[Kind.GATHER] - root
    assert theirs["_reduce_scatter_base_"] == ours[Kind.SCATTER] == numel
    assert theirs["allreduce_"] == ours[Kind.REPLICATE] == (numel // 2 if replicas > 1 else 0)


def test_the_slowest_link_of_the_ring_counts() -> None:
    fabric = Fabric(interconnect=400 * GB, network=100 * GB)
    routes = Routes.of(fabric, H100, Layout(8, 2, 2))
    whole, node, pairs = Group(8, 4), Group(4, 4), Group(2, 1)
    assert routes.bandwidth(node) == EFFICIENCY * 400 * GB
    assert routes.bandwidth(whole) == EFFICIENCY * 100 * GB, "all adapters of the node serve the one ring"
    assert routes.bandwidth(pairs) == EFFICIENCY * 100 * GB / 4, "four rings share them"
    assert routes.bandwidth(Group(1, 1)) == math.inf
    fast = Routes.of(Fabric(400 * GB, 10_000 * GB), H100, Layout(8, 2, 2))
    assert fast.bandwidth(pairs) == H100.h2d_bandwidth_duplex, "a GPU reaches the network through its PCIe link"


def test_what_each_link_is_busy_with() -> None:
    layout = Layout(8, 2)
    each = Collective(Kind.GATHER, Part.FORWARD, 80 * GB, layout.sharding)
    nvlink = Routes.of(Fabric(400 * GB, 100 * GB), H100, layout)
    assert each.moved == 70 * GB
    assert each.seconds(nvlink) == each.network_s(nvlink) == pytest.approx(70 / 80)
    assert each.interconnect_s(nvlink) == pytest.approx(70 / 320)
    assert each.pcie_s(nvlink) == pytest.approx(70 / 4 / (H100.h2d_bandwidth_duplex / GB)), "its part of what leaves"
    pcie = Routes.of(Fabric(None, 100 * GB), H100, layout)
    assert each.pcie_s(pcie) == each.interconnect_s(pcie) == pytest.approx(70 / (H100.h2d_bandwidth_duplex / GB))
    at_home = Collective(Kind.GATHER, Part.FORWARD, 80 * GB, Group(4, 4))
    assert at_home.network_s(nvlink) == at_home.pcie_s(nvlink) == 0


def test_every_built_in_gpu_with_a_network_has_its_source() -> None:
    assert all(fabric.between and fabric.network for fabric in FABRICS.values())
    assert PCIE.network is None
