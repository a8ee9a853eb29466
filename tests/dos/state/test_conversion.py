"""State that is saved in one format and loaded into another: full state dicts and torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from dos import DOSAdam
from dos.checkpoint import LoadPlanner
from tests.support.ranks import Ranks
from tests.support.sharded import assert_equal, mesh_of, values, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS: dict[str, dict[str, Any]] = {
    "split": {"state_format": "split"},
    "float32": {"state_format": "float32"},
    "int8": {"state_format": "int8"},
    "amsgrad": {"amsgrad": True},
    "without masters": {"master_weights": False},
}
EXACT = "split", "float32", "amsgrad"
"""Between these a run goes on with the same bits (amsgrad: as a target, which takes the setting of what it loads)."""
PAIRS = [(a, b) for a, b in itertools.product([*KINDS, "adamw"], KINDS) if (a, b) != ("amsgrad", "int8")]

SHAPES = [
    ((128, 128), torch.bfloat16),
    ((96, 200), torch.bfloat16),  # whole blocks, which ranks divide
    ((7, 11), torch.bfloat16),
    ((67, 128), torch.float32),
    ((4480,), torch.float16),
    ((1,), torch.bfloat16),
    ((5,), torch.bfloat16),
]
BROADCAST = {"broadcast_from_rank0": True}
FROZEN = len(SHAPES) - 1


def weights(size: int | None) -> nn.ParameterList:
    """Divided over so many ranks, some of them only if there are any; None: whole."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in SHAPES]
    if size is not None:
        tensors = [t if i == 2 else distribute_tensor(t, mesh_of(size), [Shard(0)]) for i, t in enumerate(tensors)]
    return nn.ParameterList(nn.Parameter(t, requires_grad=i != FROZEN) for i, t in enumerate(tensors))


def build(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # not 0 in float16
    return DOSAdam(model.parameters(), lr=1e-2, eps=1e-4, subgroup_size=5000, **KINDS[kind])


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if hasattr(parameter, "placements"):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()


def copy_of(model: nn.Module, size: int | None) -> nn.ParameterList:
    found = weights(size)
    for mine, value in zip(found, values(model), strict=True):
        divided = hasattr(mine, "placements")
        mine.data.copy_(distribute_tensor(value, mine.device_mesh, mine.placements) if divided else value)
    return found


def take_weights(model: nn.Module, source: nn.Module, size: int | None) -> None:
    with torch.no_grad():
        for mine, value in zip(model.parameters(), copy_of(source, size).parameters(), strict=True):
            mine.copy_(value)


def goes_on(
    pair: tuple[str, str],
    through: nn.Module,
    first: torch.optim.Optimizer,
    resumed: nn.Module,
    second: torch.optim.Optimizer,
    size: int | None,
) -> None:
    """What was loaded is what a plain state dict of whole tensors gives, and for exact formats the run itself."""
    state = first.state_dict()
    undivided = {i: {k: whole(v) for k, v in entry.items()} for i, entry in state["state"].items()}
    plain = copy_of(through, size)
    third = build(pair[1], plain)
    third.load_state_dict({**copy.deepcopy(state), "state": undivided})
    for one, other in zip(resumed.parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            mine, theirs = second.adamw_state(one), third.adamw_state(other)
            both = [key for key in theirs if key in mine]
            assert {"step", "exp_avg", "exp_avg_sq"} <= set(both), pair
            if pair[1] != "int8":  # where one may be rounded to codes already
                assert_equal([whole(mine[key]) for key in both], [whole(theirs[key]) for key in both])
    runs = [(resumed, second), (plain, third), *[(through, first)] * (pair[0] in EXACT and pair[1] in EXACT)]
    for model, optimizer in runs:
        learn(model, optimizer, range(3, 5))
    for model, _ in runs:
        assert_equal(values(resumed), values(model))


ON_RANKS = [("split", "float32"), ("float32", "split"), ("float32", "int8"), ("int8", "float32"), ("adamw", "split")]


def moves(
    pair: tuple[str, str],
    folder: str | None,
    before: int | None,
    after: int | None,
    trained: bool,
    flatten_optimizer_state_dict: bool = False,
    **options: bool,
) -> None:
    """A run of the first kind goes on as one of the second; by a checkpoint in the folder, or a full state dict."""
    through, resumed = weights(before), weights(after)
    first, second = build(pair[0], through), build(pair[1], resumed)
    learn(through, first, range(3))
    broadcast, full = options.get("broadcast_from_rank0", False), folder is None
    flat = {"flatten_optimizer_state_dict": flatten_optimizer_state_dict}
    saved = StateDictOptions(full_state_dict=full, cpu_offload=broadcast, **flat)
    loaded = StateDictOptions(full_state_dict=full, **options, **({} if full else flat))  # torch sees it when it loads
    state = copy.deepcopy(get_optimizer_state_dict(through, first, options=saved))
    assert not broadcast or dist.get_rank() == 0 or not state
    if trained:
        learn(resumed, second, range(7, 9))
        take_weights(resumed, through, after)
    if folder is not None:
        dcp.save({"optimizer": state}, checkpoint_id=folder)
        state = get_optimizer_state_dict(resumed, second, options=loaded)
        dcp.load(found := {"optimizer": state}, checkpoint_id=folder, planner=LoadPlanner())
        state = found["optimizer"]
    set_optimizer_state_dict(resumed, second, state, options=loaded)
    if not trained:  # in either order
        take_weights(resumed, through, after)
    goes_on(pair, through, first, resumed, second, after)


@pytest.mark.parametrize(
    ("pair", "checkpoint", "trained", "flat"),
    [
        *((pair, number % 2 == 0, number % 2 == 1, False) for number, pair in enumerate(PAIRS)),
        *((pair, False, True, True) for pair in PAIRS[::4]),  # as torchtitan saves it
        *((pair, True, True, True) for pair in ON_RANKS),
    ],
)
def test_state_loads_into_any_format(
    pair: tuple[str, str], checkpoint: bool, trained: bool, flat: bool, tmp_path: Path
) -> None:
    moves(pair, str(tmp_path) if checkpoint else None, None, None, trained, flatten_optimizer_state_dict=flat)


def move_all(folder: str | None, before: int, after: int, trained: bool, options: dict[str, bool]) -> None:
    for pair in [*ON_RANKS, ("amsgrad", "float32")][trained::2]:
        moves(pair, folder and f"{folder}/{pair}", before, after, trained, **options)


@pytest.mark.parametrize(
    ("options", "trained"),
    [({"cpu_offload": True}, True), (BROADCAST, False), (BROADCAST, True)],
)
def test_a_full_state_dict_loads_into_any_format_on_ranks(
    pair: Ranks, one_kernel_thread: None, trained: bool, options: dict[str, bool]
) -> None:
    pair.run(move_all, None, 2, 1 if trained else 2, trained, options)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_a_checkpoint_loads_into_any_format_on_ranks(
    ranks: Ranks, one_kernel_thread: None, tmp_path: Path, before: int, after: int
) -> None:
    ranks.run(move_all, str(tmp_path), before, after, before > after, {})


def test_amsgrad_that_a_checkpoint_switches_on_is_not_without_its_maximum(tmp_path: Path) -> None:
    through, resumed = weights(None), weights(None)
    first, second = build("amsgrad", through), build("split", resumed)
    learn(through, first, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(through, first)}, checkpoint_id=tmp_path)
    state = {"optimizer": get_optimizer_state_dict(resumed, second)}
    dcp.load(state, checkpoint_id=tmp_path)  # by torch's planner, which reads what `second` has
    with pytest.raises(ValueError, match="no 'max_exp_avg_sq'"):
        set_optimizer_state_dict(resumed, second, state["optimizer"])


def test_a_checkpoint_in_codes_loads_into_adamw(tmp_path: Path) -> None:
    through, theirs = weights(None), weights(None)
    first, adamw = build("int8", through), build("adamw", theirs)
    learn(through, first, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(through, first)}, checkpoint_id=tmp_path)
    state = {"optimizer": get_optimizer_state_dict(theirs, adamw)}
    dcp.load(state, checkpoint_id=tmp_path, planner=LoadPlanner())
    set_optimizer_state_dict(theirs, adamw, state["optimizer"])
    for mine, other in zip(through[:FROZEN], theirs[:FROZEN], strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(first.adamw_state(mine)[key].to(adamw.state[other][key].dtype), adamw.state[other][key])


@pytest.mark.parametrize("by", ["state dict", "checkpoint"])
@pytest.mark.parametrize("kind", ["split", "float32"])
def test_a_rest_that_was_cast_says_nothing(kind: str, by: str, tmp_path: Path) -> None:
    """Torch's optimizers cast what they load, and then the bits are others."""
    through, resumed = weights(None), copy_of(weights(None), None)
    first, second = build("split", through), build(kind, resumed)
    learn(through, first, range(3))
    resumed.load_state_dict(through.state_dict())
    if by == "state dict":
        state = copy.deepcopy(first.state_dict())
        state["state"][0]["master_rest"] = state["state"][0]["master_rest"].float()
        second.load_state_dict(state)
    elif kind == "float32":
        saved = copy.deepcopy(get_optimizer_state_dict(through, first))
        saved["state"]["0"]["master_rest"] = saved["state"]["0"]["master_rest"].float()
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
        state = {"optimizer": get_optimizer_state_dict(resumed, second)}
        dcp.load(state, checkpoint_id=tmp_path, planner=LoadPlanner())
        set_optimizer_state_dict(resumed, second, state["optimizer"])
    else:
        return  # of one name, which torch's planner reads
    second.param_groups[0]["lr"] = 0.0
    learn(resumed, second, range(3, 4))
    assert torch.equal(second.adamw_state(resumed[0])["master_param"], resumed[0].float())


def test_a_rest_that_is_a_tie_gives_the_same_master_in_every_format() -> None:
    through = weights(None)
    first = build("split", through)
    learn(through, first, range(1))
    state = first.state_dict()
    state["state"][0]["master_rest"].view(torch.int16).fill_(-0x8000)
    masters = []
    for kind in ("split", "float32"):
        model = copy_of(through, None)
        optimizer = build(kind, model)
        optimizer.load_state_dict(copy.deepcopy(state))
        learn(model, optimizer, range(1, 2))
        masters.append(optimizer.adamw_state(model[0])["master_param"])
    assert torch.equal(*masters)


def test_state_that_a_full_state_dict_does_not_have_stays() -> None:
    through, resumed = weights(None), weights(None)
    first, second = build("int8", through), build("split", resumed)
    for each in ((through, first), (resumed, second)):
        learn(*each, range(3))
    options = StateDictOptions(full_state_dict=True, strict=False)
    state = copy.deepcopy(get_optimizer_state_dict(through, first, options=options))
    del state["state"]["2"]
    kept = second.adamw_state(resumed[2])
    set_optimizer_state_dict(resumed, second, state, options=options)
    assert_equal(list(second.adamw_state(resumed[2]).values()), list(kept.values()))
    assert "exp_avg_codes" in second.state[resumed[0]]
