"""Sharded parameters whose state is on disk: each rank has a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dos import DOSAdam
from dos.sharding.local import local
from tests.support.devices import Pinning
from tests.support.disk import TWO_WINDOWS, bytes_on_disk, files
from tests.support.ranks import on_pair
from tests.support.sharded import assert_equal, dos_adam, load, mesh_of, model, save, shard, train, values

WIDTH = 60


def build(disk: Path | None, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, DOSAdam]:
    """Some 15,000 parameters on each of two ranks."""
    divided = shard(model(WIDTH, dtype=dtype), mesh_of())
    place = {} if disk is None else {"disk": disk, "host_memory": TWO_WINDOWS}
    return divided, dos_adam(divided.parameters(), **{"policy": "cpu", "subgroup_size": 2048, **place, **settings})


@on_pair
def test_homes_leave_for_disk_where_gradients_of_what_joins_need_their_room(tmp_path: Path) -> None:
    """In the step: nothing is pinned in backward, which may wait for collectives, and so for other ranks."""
    ends = []
    for disk in (None, tmp_path):
        divided, device = shard(model(WIDTH), mesh_of()), Pinning()
        first, *rest = (list(part.parameters()) for part in divided)
        numel = sum(local(p).numel() for p in divided.parameters())
        place = {} if disk is None else {"disk": disk, "host_memory": TWO_WINDOWS + 4 * numel}
        settings = {"policy": "cpu", "subgroup_size": 2048, "device": device, "offload_gradients": True, **place}
        optimizer = dos_adam(first, **settings)
        train(divided, optimizer)
        divided.zero_grad()
        optimizer.add_param_group({"params": [p for part in rest for p in part]})
        before, pinned = len(device.pinned), list[int]()
        train(divided, optimizer, steps=range(3, 5), before_step=lambda step: pinned.append(len(device.pinned)))  # noqa: B023
        assert pinned[0] == before < pinned[1], (disk, before, pinned)
        ends.append(values(divided))
        assert disk is None or bytes_on_disk(disk) > 0
        dist.barrier()
    assert_equal(*ends)


@pytest.mark.parametrize(
    ("dtype", "settings", "rich", "attach"),
    [
        (torch.bfloat16, {"policy": "stride:2"}, False, True),
        (torch.float32, {"offload_gradients": True, "host_memory": 220_000, "max_grad_norm": 0.05}, False, False),
        (torch.bfloat16, {}, True, False),
    ],
)
@on_pair
def test_the_bits_of_memory(
    tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any], rich: bool, attach: bool
) -> None:
    """Also where training goes on from a checkpoint. rich: the second rank has all state in memory."""
    disk, checkpoint = tmp_path / "disk", tmp_path / "checkpoint"
    rich = rich and dist.get_rank() == 1
    ours = {**settings, "host_memory": 10**7} if rich else settings
    through, resumed = build(disk, dtype, **ours), build(disk, dtype, **ours)
    in_memory = build(None, dtype, **{key: value for key, value in settings.items() if key != "host_memory"})
    if attach:
        through[1].attach(through[0])
    train(*through, steps=range(2), micro_batches=2)
    save(checkpoint, *through, "save")
    load(checkpoint, *resumed)
    for pair in (through, resumed):
        train(*pair, steps=range(2, 4), micro_batches=2)
        pair[1].synchronize()
    train(*in_memory, steps=range(4), micro_batches=2)
    for module, optimizer in (through, resumed):
        assert_equal(values(module), values(in_memory[0]))
        plan = optimizer.plan()
        assert plan is not None
        assert bool(plan.on_disk) is not rich
    dist.barrier()
    assert len(files(disk)) == 2 * dist.get_world_size()
    assert bytes_on_disk(disk) > 0
    dist.barrier()
