"""Checkpoints of sharded optimizers: torch.distributed.checkpoint in all its ways, other numbers of ranks, AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dos import DOSAdam
from tests.support.disk import TWO_WINDOWS, bytes_on_disk, files
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import (
    adamw,
    assert_close,
    assert_equal,
    dos_adam,
    load,
    mesh_of,
    model,
    on_host,
    save,
    shard,
    train,
    values,
)

CODED = {"state_format": "int8", "subgroup_size": 5000}
Pair = tuple[nn.Module, Any]


def build(size: int | None, dtype: torch.dtype, kind: str = "dos", **settings: Any) -> Pair:
    """kind: of optimizer, or else where its parameters are."""
    shape = {"width": 128, "blocks": 1} if "state_format" in settings else {}
    if kind == "on host":
        divided = on_host(size, dtype=dtype, **shape)
        return divided, DOSAdam(divided.parameters(), lr=1e-2, **settings)
    divided = shard(model(**shape, dtype=dtype), mesh_of(size))
    return divided, adamw(divided.parameters()) if kind == "adamw" else dos_adam(divided.parameters(), **settings)


def go_on(through: Pair, *others: Pair) -> None:
    """All train on, and agree in the end."""
    for pair in (through, *others):
        train(*pair, steps=range(2, 4))
    for module, _ in others:
        assert_equal(values(module), values(through[0]))


def resume(
    folder: str,
    before: int | None,
    after: int | None,
    dtype: torch.dtype,
    how: str,
    settings: dict[str, Any],
    later: dict[str, Any],
) -> None:
    through = build(before, dtype, **settings)
    train(*through, steps=range(2))
    save(folder, *through, how)  # where ranks have several meshes those of the first one save
    resumed = build(after, dtype, **later)
    load(folder, *resumed)
    go_on(through, resumed)


@pytest.mark.parametrize(
    ("before", "after", "how", "settings", "later", "dtype"),
    [
        (None, None, "async", {"policy": "adaptive"}, {"policy": "adaptive"}, torch.float32),
        (None, None, "save", {"kind": "on host"}, {"kind": "on host"}, torch.bfloat16),
        (4, 2, "save", {"policy": "resident"}, {"policy": "cpu"}, torch.bfloat16),
        (2, 4, "save", {"policy": "resident", **CODED}, {"policy": "cpu", **CODED}, torch.bfloat16),
    ],
)
def test_resume(
    pair: Ranks,
    ranks: Ranks,
    tmp_path: Path,
    before: int | None,
    after: int | None,
    how: str,
    settings: dict[str, Any],
    later: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """On as many ranks, or on another number of them."""
    (pair if before is None else ranks).run(resume, str(tmp_path), before, after, dtype, how, settings, later)


@on_pair
def test_loaded_state_is_not_there_twice(tmp_path: Path) -> None:
    through, resumed = (build(None, torch.bfloat16, policy="cpu") for _ in range(2))
    train(*through, steps=range(2))
    save(tmp_path, *through, "save")
    state = get_optimizer_state_dict(*resumed)
    places = [v.to_local().data_ptr() for e in state["state"].values() for v in e.values() if isinstance(v, DTensor)]
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*resumed, state)
    resumed[0].load_state_dict(through[0].state_dict())
    train(*resumed, steps=[2])
    entries = resumed[1].state.values()
    assert places == [v.to_local().data_ptr() for e in entries for v in e.values() if isinstance(v, DTensor)]
    assert all(entry["step"] == 3 for entry in entries)


@on_pair
def test_writes_to_a_state_dict_count() -> None:
    ends = []
    for through in (build(None, torch.float32, "adamw"), build(None, torch.float32, policy="resident")):
        train(*through, steps=range(2))
        averages = [entry["exp_avg"] for entry in through[1].state_dict()["state"].values()]
        torch._foreach_mul_(averages[::2], -30.0)
        for average in averages[1::2]:
            average.mul_(-30.0)
        train(*through, steps=range(2, 4))
        ends.append(values(through[0]))
    assert_close(*ends)


def full_state_into_divided_blocks(alone: list[dict[str, Tensor]]) -> None:
    """Of parameters that have codes alone, and none where ranks divide their blocks."""
    for shape, entry in zip(SHAPES, alone, strict=True):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh_of(4), [Shard(0)]))
        optimizer = dos_adam([parameter], state_format="int8")
        parameter.grad = distribute_tensor(torch.zeros(shape), mesh_of(4), [Shard(0)])
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {0: entry["codes"]}})
        optimizer.step()
        found = optimizer.adamw_state(parameter)["exp_avg"]
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), 0.9 * entry["exp_avg"], rtol=2e-2, atol=2e-2)


SHAPES = (96, 200), (4480,), (67, 128)  # the last is divided between blocks


def test_full_state_loads_where_ranks_divide_blocks(ranks: Ranks, one_kernel_thread: None) -> None:
    alone = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer = dos_adam([parameter], state_format="int8")
        optimizer.step()
        codes = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
        assert "exp_avg_codes" in codes
        alone.append({"codes": codes, "exp_avg": optimizer.adamw_state(parameter)["exp_avg"]})
    ranks.run(full_state_into_divided_blocks, alone)


# State on disk: each rank has a file of its own.

WIDE = 60


def build_on_disk(disk: Path | None, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, DOSAdam]:
    """Some 15,000 parameters on each of two ranks."""
    divided = shard(model(WIDE, dtype=dtype), mesh_of())
    place = {} if disk is None else {"disk": disk, "host_memory": TWO_WINDOWS}
    return divided, dos_adam(divided.parameters(), **{"policy": "cpu", "subgroup_size": 2048, **place, **settings})


@pytest.mark.parametrize(
    ("dtype", "settings", "rich", "attach"),
    [
        (torch.bfloat16, {"policy": "stride:2"}, False, True),
        (torch.float32, {"offload_gradients": True, "host_memory": 220_000, "max_grad_norm": 0.05}, False, False),
        (torch.bfloat16, {}, True, False),
    ],
)
@on_pair
def test_state_on_disk_has_the_bits_of_memory_and_of_a_resumed_run(
    tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any], rich: bool, attach: bool
) -> None:
    """Also where training goes on from a checkpoint. rich: the second rank has all state in memory."""
    disk, checkpoint = tmp_path / "disk", tmp_path / "checkpoint"
    rich = rich and dist.get_rank() == 1
    ours = {**settings, "host_memory": 10**7} if rich else settings
    through, resumed = build_on_disk(disk, dtype, **ours), build_on_disk(disk, dtype, **ours)
    in_memory = build_on_disk(None, dtype, **{key: value for key, value in settings.items() if key != "host_memory"})
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
        assert bool(plan.on_disk) is not rich
    dist.barrier()
    assert len(files(disk)) == 2 * dist.get_world_size()
    assert bytes_on_disk(disk) > 0
    dist.barrier()
