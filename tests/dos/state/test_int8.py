"""DOSAdam(state_format="int8"): the same bits in any plan, what a state dict holds, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.rules.adamw import LEAST_CODED, can_be_coded
from perfmodel.footprint import HostBytes
from perfmodel.format import BLOCK, format_of, scale_shape
from tests.support.inside import plan_anew
from tests.support.training import FAST, everything, maker

CODED = {"exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"}


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Of weights in codes, and others: too small, no whole blocks, a row of neither."""
    torch.manual_seed(0)
    layers = nn.Linear(128, 96), nn.LayerNorm(96), nn.Linear(96, 128, bias=False), nn.Linear(128, 33)
    return nn.Sequential(*layers).to(dtype)


Pair = tuple[nn.Sequential, DOSAdam]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step)
        model(torch.randn(4, 128, generator=generator).to(dtype)).float().square().mean().backward()
        if isinstance(optimizer, DOSAdam):
            plan_anew(optimizer)
        optimizer.step()
        optimizer.zero_grad()


def built(place: Any = "cpu", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Pair:
    model = network(dtype)
    return model, maker(place, **{"lr": 1e-2, "subgroup_size": 2000, "state_format": "int8", **settings})(
        model.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_which_parameters_have_codes(dtype: torch.dtype) -> None:
    model, optimizer = built(dtype=dtype)
    learn(model, optimizer, range(1))
    names = {name for name, p in model.named_parameters() if optimizer.state[p].keys() >= CODED}
    assert names == {"0.weight", "2.weight", "3.weight"}
    for name, parameter in model.named_parameters():
        entry = optimizer.state[parameter]
        assert ("exp_avg" in entry) == (name not in names)
        assert ("master_rest" in entry) == (dtype is torch.bfloat16)
        if name in names:
            assert (entry["exp_avg_codes"].dtype, entry["exp_avg_sq_codes"].dtype) == (torch.int8, torch.uint8)
            assert entry["exp_avg_codes"].shape == parameter.shape
            assert entry["exp_avg_scales"].shape == scale_shape(parameter.shape)
    assert scale_shape((96, 128)) == (96, 1)
    assert scale_shape((128, 96)) == (96,)
    assert can_be_coded(torch.empty(LEAST_CODED))
    assert not can_be_coded(torch.empty(LEAST_CODED - BLOCK))
    assert not can_be_coded(torch.empty(LEAST_CODED + 1))
    assert not can_be_coded(torch.empty(64, 128).t())


def test_writes_of_user_code_to_codes_count() -> None:
    """Into the codes, and as AdamW has it."""
    pairs = built("resident", torch.float32), built("cpu", torch.float32)
    for model, optimizer in pairs:
        learn(model, optimizer, range(2))
        optimizer.state[model[0].weight]["exp_avg_codes"].zero_()
        learn(model, optimizer, range(2, 3))
    assert everything(*pairs[0]) == everything(*pairs[1])
    for model, optimizer in pairs:
        state = optimizer.adamw_state(model[0].weight)
        optimizer.state[model[0].weight] |= {key: value / 2 for key, value in state.items() if key != "step"}
        learn(model, optimizer, range(3, 4))
        assert optimizer.state[model[0].weight].keys() >= CODED
        assert "exp_avg" not in optimizer.state[model[0].weight]
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("shape", [(), (100,)])
def test_codes_for_a_parameter_that_is_no_blocks(shape: tuple[int, ...]) -> None:
    optimizer = DOSAdam([nn.Parameter(torch.zeros(shape))])
    codes = torch.zeros(shape, dtype=torch.int8)
    entry = {"step": 1.0, "exp_avg_codes": codes, "exp_avg_scales": torch.zeros(0)}
    entry |= {"exp_avg_sq_codes": codes.to(torch.uint8), "exp_avg_sq_scales": torch.zeros(0)}
    with pytest.raises(ValueError, match="is not whole blocks of 128"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entry}})


@pytest.mark.parametrize("state_format", ["int8", None])
def test_one_moment_as_adamw_has_it(state_format: str | None) -> None:
    """Beside the codes of both, of which the other's still count."""
    model, first = built(dtype=torch.float32)
    learn(model, first, range(2))
    state = copy.deepcopy(first.state_dict())
    state["state"][0]["exp_avg"] = torch.full((96, 128), 7.0)
    second = maker("adaptive", state_format=state_format)(model.parameters())
    second.load_state_dict(state)
    squares = first.adamw_state(model[0].weight)["exp_avg_sq"]
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    second.step()
    found = second.adamw_state(model[0].weight)
    assert found["exp_avg"].min().item() == pytest.approx(6.3, rel=1e-3)
    assert found["exp_avg_sq"].mean().item() == pytest.approx(0.999 * squares.mean().item(), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_host_memory_to_the_byte(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.randn(512, 128, dtype=dtype))
    parameter.grad = torch.randn_like(parameter)
    optimizer = DOSAdam([parameter], state_format="int8", policy="cpu", device=EmulatedDevice(FAST, 10**8))
    optimizer.step()
    numel = parameter.numel()
    state = format_of(str(dtype).removeprefix("torch."), state_format="int8")
    footprint = HostBytes.of(numel, state, accelerated=True)
    assert optimizer.metrics()["host_held_bytes"] == footprint.total
    if dtype is torch.bfloat16:
        assert (footprint.total - footprint.gradient_staging) / numel == 6.0625


def test_amsgrad_is_refused() -> None:
    with pytest.raises(ValueError, match=r"amsgrad=True needs .* state_format='int8'"):
        built(amsgrad=True)
    model, optimizer = built()
    learn(model, optimizer, range(1))
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "amsgrad": True})
    theirs = torch.optim.AdamW(network().parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="param group 0 of the state dict: amsgrad=True"):
        optimizer.load_state_dict(theirs.state_dict())
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="param group 0: amsgrad=True"):
        learn(model, optimizer, range(1, 2))
    optimizer.param_groups[0]["amsgrad"] = False
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.pop("exp_avg_scales"), "but no 'exp_avg'; expected the state of AdamW or DOSAdam"),
        (
            lambda entry: entry.update(exp_avg_scales=entry["exp_avg_scales"].half()),
            "'exp_avg_scales' must be torch.float32, found torch.float16",
        ),
        (
            lambda entry: entry.update(exp_avg_scales=torch.zeros(96)),
            r"'exp_avg_scales' must have shape \(96, 1\), found shape \(96,\)",
        ),
        (
            lambda entry: entry.update(exp_avg_codes=entry["exp_avg_codes"].float()),
            "'exp_avg_codes' must be torch.int8, found torch.float32: something has converted the state dict",
        ),
    ],
)
def test_a_state_dict_that_cannot_be_loaded(change: Callable[[dict[str, Any]], object], message: str) -> None:
    model, optimizer = built()
    learn(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    change(state["state"][0])
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert everything(model, optimizer) == before
