"""Checkpoints of sharded optimizers: torch.distributed.checkpoint in all its ways, other numbers of ranks, AdamW."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.support.ranks import Ranks, on_pair, on_ranks
from tests.support.sharded import (
    assert_close,
    assert_equal,
    dos_adam,
    load,
    mesh_of,
    model,
    save,
    shard,
    train,
    values,
    whole,
)


def build(
    size: int | None, dtype: torch.dtype, kind: str = "dos", **kwargs: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    divided = shard(model(dtype=dtype), mesh_of(size))
    if kind == "adamw":
        return divided, torch.optim.AdamW(divided.parameters(), lr=1e-2)
    return divided, dos_adam(divided.parameters(), **kwargs)


def resume(folder: str, before: int | None, after: int | None, dtype: torch.dtype, how: str, policy: str) -> None:
    through, first = build(before, dtype, policy=policy)
    train(through, first, steps=range(2))
    # Groups of ranks of one mesh: those of the first one save.
    save(folder, through, first, how)
    train(through, first, steps=range(2, 4))
    resumed, second = build(after, dtype, policy=policy)
    load(folder, resumed, second)
    train(resumed, second, steps=range(2, 4))
    assert_equal(values(resumed), values(through))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("policy", "how"), [("cpu", "async"), ("resident", "save"), ("adaptive", "async")])
def test_resume_on_as_many_ranks(pair: Ranks, tmp_path: Path, policy: str, dtype: torch.dtype, how: str) -> None:
    pair.run(resume, str(tmp_path), None, None, dtype, how, policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_resume_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int, dtype: torch.dtype
) -> None:
    ranks.run(resume, str(tmp_path), before, after, dtype, "save", "adaptive")


@pytest.mark.parametrize(
    ("cpu_offload", "broadcast", "dtype"),
    [(False, False, torch.float32), (True, True, torch.bfloat16), (False, True, torch.float32)],
)
@on_ranks
def test_full_state_dicts(cpu_offload: bool, broadcast: bool, dtype: torch.dtype) -> None:
    through, first = build(4, dtype)
    train(through, first, steps=range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    weights = get_model_state_dict(through, options=options)
    state = copy.deepcopy(get_optimizer_state_dict(through, first, options=options))  # its steps are live, as AdamW's
    if not cpu_offload or dist.get_rank() == 0:
        assert not any(isinstance(v, DTensor) for entry in state["state"].values() for v in entry.values())
    if not broadcast and cpu_offload:
        return  # the other ranks have nothing to load from
    load_options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    resumed, second = build(2, dtype, policy="cpu")
    set_model_state_dict(resumed, weights, options=load_options)
    set_optimizer_state_dict(resumed, second, state, options=load_options)
    train(through, first, steps=range(2, 4))
    train(resumed, second, steps=range(2, 4))
    assert_equal(values(resumed), values(through))


@pytest.mark.parametrize(("before", "after"), [("adamw", "dos"), ("dos", "adamw")])
@on_ranks
def test_from_and_to_adamw(tmp_path: Path, before: str, after: str) -> None:
    through, first = build(4, torch.float32, before)
    train(through, first, steps=range(2))
    save(tmp_path, through, first, "save")
    train(through, first, steps=range(2, 4))
    resumed, second = build(2, torch.float32, after)
    load(tmp_path, resumed, second)
    train(resumed, second, steps=range(2, 4))
    assert_close(values(resumed), values(through))


@pytest.mark.parametrize("policy", ["cpu", "resident"])
@on_ranks
def test_plain_state_dicts(policy: str) -> None:
    """As torch.save writes them, each rank its own, and a whole one from a run that was not divided."""
    through, first = build(4, torch.float32, policy=policy)
    train(through, first, steps=range(2))
    state = copy.deepcopy(first.state_dict())
    for entry, parameter in zip(state["state"].values(), through.parameters(), strict=True):
        assert isinstance(entry["exp_avg"], DTensor)
        assert entry["exp_avg"].placements == parameter.placements
    resumed, second = build(4, torch.float32, policy="cpu")
    resumed.load_state_dict(through.state_dict())
    second.load_state_dict(state)
    undivided = {
        "state": {i: {k: whole(v) for k, v in entry.items()} for i, entry in state["state"].items()},
        "param_groups": state["param_groups"],
    }
    again, third = build(2, torch.float32, policy=policy)
    for theirs, mine in zip(again.parameters(), values(through), strict=True):
        theirs.data.copy_(torch.distributed.tensor.distribute_tensor(mine, theirs.device_mesh, theirs.placements))
    third.load_state_dict(undivided)
    for each, optimizer in ((through, first), (resumed, second), (again, third)):
        train(each, optimizer, steps=range(2, 4))
    assert_equal(values(resumed), values(through))
    assert_equal(values(again), values(through))


@pytest.mark.parametrize("policy", ["cpu", "resident"])
@on_pair
def test_reading_the_state_of_a_fresh_optimizer_changes_nothing(policy: str) -> None:
    quiet, first = build(None, torch.float32, policy=policy)
    train(quiet, first)
    read, second = build(None, torch.float32, policy=policy)
    assert all(float(entry["step"]) == 0 for entry in get_optimizer_state_dict(read, second)["state"].values())
    train(read, second)
    assert_equal(values(read), values(quiet))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_pair
def test_loaded_state_is_not_there_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    through, first = build(None, dtype, policy="cpu")
    train(through, first, steps=range(2))
    save(tmp_path, through, first, "save")
    resumed, second = build(None, dtype, policy="cpu")
    state = get_optimizer_state_dict(resumed, second)
    places = [v.to_local().data_ptr() for e in state["state"].values() for v in e.values() if isinstance(v, DTensor)]
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(resumed, second, state)
    resumed.load_state_dict(through.state_dict())
    train(resumed, second, steps=[2])
    entries = second.state.values()
    assert places == [v.to_local().data_ptr() for e in entries for v in e.values() if isinstance(v, DTensor)]
    assert all(entry["step"] == 3 for entry in entries)


@pytest.mark.parametrize(("policy", "how"), [("adaptive", "each"), ("adaptive", "foreach"), ("resident", "each")])
@on_pair
def test_what_is_written_to_a_state_dict_counts(policy: str, how: str) -> None:
    ends = []
    for kind in ("adamw", "dos"):
        through, optimizer = build(None, torch.float32, kind, **({"policy": policy} if kind == "dos" else {}))
        train(through, optimizer, steps=range(2))
        averages = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        if how == "foreach":
            torch._foreach_mul_(averages, -30.0)
        else:
            for average in averages:
                average.mul_(-30.0)
        train(through, optimizer, steps=range(2, 4))
        ends.append(values(through))
    assert_close(*ends)
