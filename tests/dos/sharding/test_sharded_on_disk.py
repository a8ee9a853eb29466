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


@pytest.mark.parametrize(
    ("dtype", "settings", "attach"),
    [
        (torch.bfloat16, {"policy": "stride:2"}, True),
        (torch.float32, {"offload_gradients": True, "host_memory": 260_000, "max_grad_norm": 0.05}, False),
    ],
)
@on_pair
def test_the_bits_of_memory(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype, attach: bool) -> None:
    ends = []
    for disk in (None, tmp_path):
        ours = {key: value for key, value in settings.items() if disk is not None or key != "host_memory"}
        divided, optimizer = build(disk, dtype, **ours)
        if attach:
            optimizer.attach(divided)
        train(divided, optimizer, steps=range(4), micro_batches=2)
        optimizer.synchronize()
        ends.append(values(divided))
        plan = optimizer.plan()
        assert plan is not None
        assert bool(plan.on_disk) is (disk is not None)
        if disk is not None:
            dist.barrier()
            assert len(files(disk)) == dist.get_world_size()
            assert bytes_on_disk(disk) > 0
            dist.barrier()
    assert_equal(*ends)


@on_pair
def test_homes_leave_for_disk_where_gradients_of_what_joins_need_their_room(tmp_path: Path) -> None:
    """In the step: nothing is pinned in backward, which may wait for collectives, and so for other ranks."""
    ends = []
    for disk in (None, tmp_path):
        divided, device = shard(model(WIDTH), mesh_of()), Pinning()
        first, *rest = (list(part.parameters()) for part in divided)
        numel = sum(local(p).numel() for p in divided.parameters())
        place = {} if disk is None else {"disk": disk, "host_memory": TWO_WINDOWS + 8 * numel}
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


@on_pair
def test_checkpoints(tmp_path: Path) -> None:
    """Saved by ranks with state on disk, and loaded there."""
    dtype = torch.bfloat16
    through = build(tmp_path / "disk", dtype)
    train(*through, steps=range(2))
    save(tmp_path / "checkpoint", *through, "save")
    resumed = build(tmp_path / "disk", dtype)
    load(tmp_path / "checkpoint", *resumed)
    for pair in (through, resumed):
        train(*pair, steps=range(2, 4))
    assert_equal(values(resumed[0]), values(through[0]))
    in_memory = build(None, dtype)
    train(*in_memory, steps=range(4))
    assert_equal(values(through[0]), values(in_memory[0]))


@on_pair
def test_budgets_that_differ(tmp_path: Path) -> None:
    """One rank has all state in memory."""
    ends = []
    for disk in (None, tmp_path):
        rich = disk is not None and dist.get_rank() == 1
        divided, optimizer = build(disk, **({"host_memory": 10**7} if rich else {}))
        train(divided, optimizer)
        ends.append(values(divided))
        plan = optimizer.plan()
        assert plan is not None
        assert bool(plan.on_disk) is (disk is not None and not rich)
    assert_equal(*ends)
