"""State that leaves and comes back: AdamW's state dict, both ways; copies, files, DCP; what does not fit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dos import DOSAdam
from perfmodel import Op
from tests.support.training import Make, assert_as_adamw, assert_close_ulp, bits, maker, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")


def dos(model: nn.Module, policy: str | float = "stride:2", **settings: object) -> DOSAdam:
    return maker(policy, **settings)(model.parameters())


def test_keys_are_those_of_adamw() -> None:
    model = mlp()
    adamw, optimizer = torch.optim.AdamW(model.parameters()), dos(model)
    train(model, adamw, 1)
    train(model, optimizer, 1)
    theirs, ours = adamw.state_dict(), optimizer.state_dict()
    # torch 2.6 has no `decoupled_weight_decay`.
    assert ours["param_groups"] == [{**group, "decoupled_weight_decay": True} for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entry in theirs["state"].items():
        assert list(ours["state"][key]) == list(entry)
        for name, value in entry.items():
            assert ours["state"][key][name].shape == value.shape
            assert ours["state"][key][name].dtype == value.dtype


def test_loading_does_not_tie_the_optimizer_to_the_state_dict() -> None:
    """And what others keep there stays."""
    model = mlp()
    optimizer = dos(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    before = bits(t for entry in saved["state"].values() for t in entry.values())
    saved["state"][0]["mine"] = "a note"
    optimizer.load_state_dict(saved)
    train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["mine"] == saved["state"][0].pop("mine") == "a note"
    assert bits(t for entry in saved["state"].values() for t in entry.values()) == before


def test_hooks_on_state_dict_and_on_loading() -> None:
    model = mlp()
    optimizer = dos(model)
    train(model, optimizer, 1)
    log = []
    optimizer.register_state_dict_pre_hook(lambda _: log.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: log.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda _: log.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert log == ["saving", 1, "loaded"]


@pytest.mark.parametrize("adam", [torch.optim.AdamW, torch.optim.Adam])
def test_an_older_state_dict_without_newer_keys(adam: type[torch.optim.Adam]) -> None:
    """Nor is it taken from a checkpoint how to decay."""
    model, reference = mlp(), mlp()
    donor = adam(model.parameters(), weight_decay=0.0)
    train(model, donor, 2)
    old = copy.deepcopy(donor.state_dict())
    if adam is torch.optim.AdamW:
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            old["param_groups"][0].pop(key, None)
    for entry in old["state"].values():
        entry["step"] = int(entry["step"])
    optimizer = dos(model)
    optimizer.load_state_dict(old)
    assert optimizer.param_groups[0]["maximize"] is False
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    train(model, optimizer, 2, first_step=2)
    train(reference, torch.optim.AdamW(reference.parameters(), weight_decay=0.0), 4)
    assert_close_ulp(model.parameters(), reference.parameters())


def test_a_bfloat16_run_may_pass_through_adamw_and_return() -> None:
    """AdamW keeps our master rounded and does not update it; the parameter it did update must win on return."""
    model = mlp(torch.bfloat16)
    optimizer = dos(model)
    train(model, optimizer, 3)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    adamw.load_state_dict(optimizer.state_dict())
    adamw.param_groups[0]["lr"] = 0.1
    train(model, adamw, 3, first_step=3)
    before = [p.detach().clone() for p in model.parameters()]
    back = dos(model)
    back.load_state_dict(adamw.state_dict())
    back.param_groups[0]["lr"] = 0.0
    train(model, back, 1, first_step=6)
    assert bits(model.parameters()) == bits(before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: state.update(torch.optim.SGD(mlp().parameters(), lr=0.1).state_dict()),
            r"param group 0 of the state dict has no 'betas', found .* so it is another optimizer's",
        ),
        (lambda state: state["param_groups"].append(state["param_groups"][0]), "2 param groups, the optimizer has 1"),
        (lambda state: state["param_groups"][0]["params"].pop(), r"4 parameters in the state dict and 5"),
        (
            lambda state: state["state"][2].update(exp_avg=torch.zeros(3, 3)),
            r"parameter '2\.weight': its state 'exp_avg' must have shape \(40,\), found shape \(3, 3\)",
        ),
        (
            lambda state: state["state"].update({1: {"momentum_buffer": torch.zeros(40), "step": None}}),
            r"parameter '0\.bias': its state has \['momentum_buffer'\] but no 'step'",
        ),
        (
            lambda state: state["state"][1].update(step=torch.zeros(2)),
            "its state 'step' must be one number, found tensor",
        ),
        (
            lambda state: state["state"][1].update(step=-1.0),
            r"its state 'step' must be 0 or more and finite, found -1\.0",
        ),
    ],
)
def test_a_state_dict_that_does_not_match_changes_nothing(damage, message: str) -> None:
    model = mlp()
    optimizer = maker("stride:2")(model.named_parameters())
    train(model, optimizer, 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    bad = copy.deepcopy(optimizer.state_dict())
    damage(bad)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    train(model, optimizer, 2, first_step=2)
    train(twin, twin_optimizer, 2, first_step=2)
    assert bits(model.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("policy", ["cpu", "stride:1", 0.0])
def test_states_exchanged_between_parameters_are_exchanged(policy: str | float) -> None:
    def run(make: Make) -> list[Tensor]:
        a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        optimizer = make([a, b])
        for sign in (1.0, None, 0.5):
            if sign is None:
                optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]
                continue
            a.grad, b.grad = torch.full((3,), sign), torch.full((3,), -sign)
            optimizer.step()
        return [t for p in (a, b) for t in (optimizer.state[p]["exp_avg"], p)]

    assert_as_adamw(run, policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_parameters_state_as_adamw_has_it(dtype: torch.dtype) -> None:
    model = mlp(dtype)
    optimizer = dos(model, "resident", amsgrad=True)
    with pytest.raises(KeyError, match="has no state"):
        optimizer.adamw_state(model[0].weight)
    train(model, optimizer, 2)
    copies = {p: optimizer.adamw_state(p) for p in model.parameters()}
    for p, entry in copies.items():
        kept = {"master_rest": "master_param"}
        assert set(entry) == {kept.get(key, key) for key in optimizer.state[p]}
        assert all(value.dtype == torch.float32 for value in entry.values())
        assert bits([entry["exp_avg"]]) == bits([optimizer.state[p]["exp_avg"]])
        entry["exp_avg"].add_(1)
        assert bits([entry["exp_avg"]]) != bits([optimizer.state[p]["exp_avg"]]), "a copy"


def test_asking_whether_there_is_state_moves_nothing() -> None:
    """Reading it does, and it returns in the next step."""
    model = mlp()
    optimizer = dos(model, 0.0)
    assert not optimizer.state
    train(model, optimizer, 2)
    held = optimizer.metrics()["memory_held_bytes"]
    assert optimizer.state
    assert len(optimizer.state) == len(list(model.parameters()))
    assert model[0].weight in optimizer.state
    assert set(optimizer.state) == set(model.parameters())
    train(model, optimizer, 1)
    assert optimizer.metrics()["memory_held_bytes"] == held > 0
    assert not {span.op for span in optimizer.timeline().spans} - {Op.UPDATE}
    assert optimizer.state[model[0].weight]["exp_avg"].any()
    train(model, optimizer, 1)
    assert optimizer.metrics()["memory_held_bytes"] == held
    assert {span.op for span in optimizer.timeline().spans} == {Op.PREFETCH, Op.UPDATE}


@pytest.mark.parametrize("place", ["cpu", 0.0, "resident"])
def test_reading_the_state_of_a_fresh_optimizer_changes_nothing(place: str | float) -> None:
    ends = []
    for read in (False, True):
        model = mlp()
        optimizer = dos(model, place)
        if read:
            state = get_optimizer_state_dict(model, optimizer)
            assert all(entry["step"] == 0 and not entry["exp_avg"].any() for entry in state["state"].values())
            assert optimizer.param_groups[0]["lr"] == 1e-3
        train(model, optimizer, 3)
        ends.append(bits(model.parameters()))
        assert all(entry["step"] == 3 for entry in optimizer.state.values())
    assert ends[0] == ends[1]


def test_a_warm_up_that_begins_with_nothing_counts_as_in_adamw() -> None:
    for make in (torch.optim.AdamW, maker(0.0)):
        model = mlp()
        optimizer = make(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.0
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert all(entry["step"] == 1 for entry in optimizer.state.values())


def test_a_dict_of_the_state_is_up_to_date_and_so_is_what_is_printed() -> None:
    model = mlp()
    optimizer = dos(model, 0.0)
    train(model, optimizer, 3)
    assert repr(optimizer.state).count("tensor(3.)") == len(optimizer.state)
    for found in (dict(optimizer.state), {**optimizer.state}, optimizer.state | {}, {} | optimizer.state):
        assert all(entry["step"] == 3 and entry["exp_avg"].any() for entry in found.values())
    dict(optimizer.state)[model[0].weight]["exp_avg"].zero_()
    assert not optimizer.state[model[0].weight]["exp_avg"].any()
