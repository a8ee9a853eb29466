"""State on disk that is saved, loaded, copied, and read and written by users."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
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
from tests.support.disk import SMALL, TWO_WINDOWS, dos_adam, files, wide
from tests.support.training import bits, everything, train

pytestmark = pytest.mark.usefixtures("one_core")

PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "disk, streamed": {"policy": "stride:2"},
    "partly memory": {"host_memory": TWO_WINDOWS + 100_000},
    "partly device": {"policy": 0.5},
}
Pair = tuple[nn.Module, DOSAdam]
Transfer = Callable[[Pair, Pair, Path], None]
"""Brings parameters and state of one pair to another, by way of a folder."""


def by_torch_save(pair: Pair, other: Pair, folder: Path) -> None:
    torch.save([each.state_dict() for each in pair], folder / "checkpoint.pt")
    for each, state in zip(other, torch.load(folder / "checkpoint.pt"), strict=True):
        each.load_state_dict(state)


def by_mapping(pair: Pair, other: Pair, folder: Path) -> None:
    """Loaded without reading the file first."""
    torch.save([each.state_dict() for each in pair], folder / "checkpoint.pt")
    for each, state in zip(other, torch.load(folder / "checkpoint.pt", mmap=True), strict=True):
        each.load_state_dict(state)


def by_dcp(pair: Pair, other: Pair, folder: Path) -> None:
    def state_of(model: nn.Module, optimizer: DOSAdam) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    dcp.save(state_of(*pair), checkpoint_id=folder, no_dist=True)
    state = state_of(*other)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(other[0], state["model"])
    set_optimizer_state_dict(*other, state["optimizer"])


def by_views(pair: Pair, other: Pair, folder: Path) -> None:
    """What the other loads are live views of state on disk."""
    other[0].load_state_dict(pair[0].state_dict())
    saved = pair[1].state_dict()
    state = {number: {**entry, "step": entry["step"].clone()} for number, entry in saved["state"].items()}
    other[1].load_state_dict({**saved, "state": state})


def as_adamw(pair: Pair, other: Pair, folder: Path) -> None:
    """One parameter after the other."""
    model, optimizer = pair
    saved = optimizer.state_dict()
    state = {number: optimizer.adamw_state(p) for number, p in enumerate(model.parameters())}
    other[0].load_state_dict(model.state_dict())
    other[1].load_state_dict({**saved, "state": state})


@pytest.mark.parametrize(
    ("transfer", "dtype", "before", "after"),
    [
        (by_torch_save, torch.float32, "memory", "disk"),
        (by_mapping, torch.bfloat16, "partly memory", "partly device"),
        (by_dcp, torch.bfloat16, "disk", "disk"),
        (by_dcp, torch.float32, "partly memory", "partly device"),
        (by_views, torch.float32, "disk", "disk"),
        (as_adamw, torch.bfloat16, "disk", "disk"),
    ],
)
def test_going_on_elsewhere(tmp_path: Path, transfer: Transfer, dtype: torch.dtype, before: str, after: str) -> None:
    def start(where: str, seed: int) -> Pair:
        model = wide(dtype, seed)
        disk = None if where == "memory" else tmp_path / f"disk {seed}"
        return model, dos_adam(model.parameters(), disk, **PLACES.get(where, {}))

    pair, other = start(before, 0), start(after, 1)
    train(*pair, 3)
    transfer(pair, other, tmp_path)
    for each in (other, pair):  # whose state the other may be loading yet
        train(*each, 3, first_step=3)
    assert after != "disk" or other[1].metrics()["host_held_bytes"] <= TWO_WINDOWS
    assert everything(*pair) == everything(*other)
    twin = wide(dtype)
    train(twin, DOSAdam(twin.parameters(), lr=0.01), 6)
    assert bits(twin.parameters()) == bits(other[0].parameters())


@pytest.mark.parametrize(("place", "saved_as"), zip(PLACES, ["float32", "int8", "int8", "float32"], strict=True))
def test_state_of_other_formats_is_loaded(tmp_path: Path, place: str, saved_as: str | None) -> None:
    source = wide(torch.bfloat16)
    donor = DOSAdam(source.parameters(), state_format=saved_as)
    train(source, donor, 2)
    ends = []
    for disk in (None, tmp_path):
        model = wide(torch.bfloat16, seed=1)
        optimizer = dos_adam(model.parameters(), disk, **PLACES[place])
        train(model, optimizer, 1)
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(copy.deepcopy(donor.state_dict()))
        train(model, optimizer, 2, first_step=2)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


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
    assert len(files(tmp_path)) == 1
    train(other, twin, 1, first_step=4)


def test_a_copy_of_the_state_dict_outlives_the_optimizer(tmp_path: Path) -> None:
    """And so do views of the state themselves, which nothing changes any more."""
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path)
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"]
    copied = bits(t for entry in copy.deepcopy(state).values() for t in entry.values())
    del optimizer
    assert not files(tmp_path)
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


def test_state_of_a_fresh_optimizer(tmp_path: Path) -> None:
    model, twin = wide(), wide()
    optimizer, other = dos_adam(model.parameters(), tmp_path), dos_adam(twin.parameters(), None)
    state = get_optimizer_state_dict(model, optimizer)
    assert all(float(entry["step"]) == 0 and not entry["exp_avg"].any() for entry in state["state"].values())
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert everything(model, optimizer) == everything(twin, other)


@pytest.mark.filterwarnings("error")
def test_subgroups_are_whole_pages(tmp_path: Path) -> None:
    """However few parameters users ask for, who are not warned of so many."""
    model, twin = wide(), wide()
    optimizer = dos_adam(model.parameters(), tmp_path, subgroup_size=1)
    train(model, optimizer, 2)
    assert {s.numel % SMALL for s in optimizer._session.registry.accelerated[:-1]} == {0}
    train(twin, dos_adam(twin.parameters(), None), 2)
    assert bits(model.parameters()) == bits(twin.parameters())
