"""Which ranks work together: nodes, shards, replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planner.layout import Group, Layout


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 48))
def test_groups_are_those_of_a_mesh(nodes: int, per_node: int, replicas: int) -> None:
    """Against ranks written out: a mesh (replicas, shards) of neighbours, as init_device_mesh lays it out."""
    ranks = nodes * per_node
    try:
        layout = Layout(ranks, nodes, replicas)
    except ValueError:
        shards = ranks / replicas
        assert shards % 1 or (shards % per_node and per_node % shards)
        return
    mesh = [[replica * layout.shards + i for i in range(layout.shards)] for replica in range(replicas)]
    for replica in mesh:
        assert layout.sharding == as_group(replica, per_node)
    for shard in zip(*mesh, strict=True):
        assert layout.replication == as_group(shard, per_node)


def as_group(ranks: object, per_node: int) -> Group:
    members = list(ranks)  # type: ignore[call-overload]
    nodes = [rank // per_node for rank in members]
    found = Group(len(members), nodes.count(nodes[0]))
    assert found.nodes == len(set(nodes)), "equally many in each node"
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "ranks must be 1 or more, found 0"),
        ((8, 0, 1), "nodes must be 1 or more, found 0"),
        ((8, 2, -1), "replicas must be 1 or more, found -1"),
        ((8, 3, 1), "--ranks 8 cannot be divided equally over 3 nodes: .*choose a multiple of 3"),
        ((8, 2, 3), "--ranks 8 cannot be divided equally over 3 replicas"),
        ((12, 3, 2), "a replica on 6 GPUs does not fill nodes of 4 GPUs"),
    ],
)
def test_layouts_that_cannot_be(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)
