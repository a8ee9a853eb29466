"""State on disk that is saved, loaded, copied, and read and written by users."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dos import DOSAdam
from perfmodel import Plan, Workload
from perfmodel.policies import cpu_only
from tests.support.clock import eventually
from tests.support.disk import SMALL, TWO_WINDOWS, dos_adam, files, wide
from tests.support.training import bits, everything, train

pytestmark = pytest.mark.usefixtures("one_core")

PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "disk, streamed": {"policy": "stride:2"},
    "partly memory": {"host_memory": TWO_WINDOWS + 100_000},
    "partly device": {"policy": 0.5},
}


@pytest.mark.parametrize(
    ("dtype", "before", "after"), [(torch.bfloat16, "disk", "disk"), (torch.float32, "partly memory", "partly device")]
)
def test_going_on_elsewhere(tmp_path: Path, dtype: torch.dtype, before: str, after: str) -> None:
    """By torch.distributed.checkpoint; the random machine has the other ways."""

    def start(where: str, seed: int) -> tuple[nn.Module, DOSAdam]:
        model = wide(dtype, seed)
        return model, dos_adam(model.parameters(), tmp_path / f"disk {seed}", **PLACES[where])

    def state_of(model: nn.Module, optimizer: DOSAdam) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    pair, other = start(before, 0), start(after, 1)
    train(*pair, 3)
    dcp.save(state_of(*pair), checkpoint_id=tmp_path, no_dist=True)
    state = state_of(*other)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(other[0], state["model"])
    set_optimizer_state_dict(*other, state["optimizer"])
    for each in (other, pair):
        train(*each, 3, first_step=3)
    assert after != "disk" or other[1].metrics()["host_held_bytes"] <= TWO_WINDOWS
    assert everything(*pair) == everything(*other)


@pytest.mark.parametrize(("place", "how"), zip(PLACES, ["deepcopy", "pickle"] * 2, strict=True))
def test_copies_have_files_of_their_own(tmp_path: Path, place: str, how: str) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, **PLACES[place])
    train(model, optimizer, 2)
    pair = model, optimizer
    other, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert everything(other, twin) == everything(model, optimizer)
    train(other, twin, 2, first_step=2)
    assert len(files(tmp_path)) == 2
    assert everything(other, twin) != everything(model, optimizer)
    train(model, optimizer, 2, first_step=2)
    assert everything(other, twin) == everything(model, optimizer)
    del optimizer, pair
    assert eventually(lambda: len(files(tmp_path)) == 1), "a thread may refer to its last job a moment longer"
    train(other, twin, 1, first_step=4)


def test_files_go_with_the_optimizer_and_copies_and_views_of_its_state_stay(tmp_path: Path) -> None:
    """Without the garbage collector. Nothing changes the views any more."""
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, policy="stride:2")
    optimizer.attach(model)
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"]
    copied = bits(t for entry in copy.deepcopy(state).values() for t in entry.values())
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        assert eventually(lambda: not files(tmp_path))
    finally:
        gc.enable()
    assert bits(t for entry in state.values() for t in entry.values()) == copied


def test_views_are_up_to_date_once_state_is_read_again(tmp_path: Path) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path)
    train(model, optimizer, 1)
    views = {p: optimizer.state[p]["exp_avg"] for p in model.parameters()}
    before = bits(views.values())
    for step in range(1, 4):
        train(model, optimizer, 1, first_step=step)
        now = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert bits(views.values()) == bits(now) != before
        before = bits(now)


@pytest.mark.filterwarnings("error")
def test_subgroups_are_whole_pages(tmp_path: Path) -> None:
    """However few parameters users ask for, who are not warned of so many."""

    def policy(work: Workload) -> Plan:
        sizes.update(load.numel for load in work.subgroups[:-1])
        return cpu_only(work)

    model, twin, sizes = wide(), wide(), set[int]()
    optimizer = dos_adam(model.parameters(), tmp_path, subgroup_size=1, policy=policy)
    train(model, optimizer, 2)
    assert sizes == {SMALL}
    train(twin, dos_adam(twin.parameters(), None), 2)
    assert bits(model.parameters()) == bits(twin.parameters())
