"""What state consists of: the formats' figures, and that nothing else has to know which fields there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.rules.adamw import AdamW
from perfmodel import SubgroupLoad
from perfmodel.format import (
    CODED,
    MIXED,
    NEEDED_KEYS,
    SPLIT,
    STATE_KEYS,
    Format,
    float32,
    format_of,
    int8,
    split,
)
from tests.support.training import FAST, mlp, train


@pytest.mark.parametrize(
    ("state", "state_bytes", "held", "traffic"),
    [
        (MIXED, 12, 16, 28),
        (SPLIT, 10, 14, 26),
        (split(amsgrad=True), 14, 18, 34),
        (float32("float32"), 8, 16, 28),
        (float32("float16", amsgrad=True), 16, 20, 36),
        (float32("bfloat16", master_weights=False), 8, 12, 22),
        (int8(float32("float32")), 2.0625, 10.0625, 16.125),
    ],
)
def test_bytes_per_parameter(state: Format, state_bytes: int, held: int, traffic: int) -> None:
    assert (state.state_bytes, state.held_bytes, state.update_traffic) == (state_bytes, held, traffic)
    load = SubgroupLoad.of(7, state)
    assert (load.cpu_traffic, load.host_bytes) == (int(7 * traffic), int(7 * held))


def test_names_in_a_state_dict() -> None:
    codes = {f"{moment}_{what}" for moment in ("exp_avg", "exp_avg_sq") for what in ("codes", "scales")}
    assert set(STATE_KEYS) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param", "master_rest", *codes}
    assert set(NEEDED_KEYS) == {"exp_avg", "exp_avg_sq"}
    assert [field.key for field in SPLIT.fields] == ["exp_avg", "exp_avg_sq", "master_rest"]
    for itself in (float32("float32"), float32("bfloat16", master_weights=False)):
        assert [field.key for field in itself.fields] == ["exp_avg", "exp_avg_sq"], "AdamW's own"


@pytest.mark.parametrize(
    ("values", "settings", "name"),
    [
        ("bfloat16", {}, "split"),
        ("bfloat16", {"state_format": "float32"}, "float32"),
        ("bfloat16", {"master_weights": False}, "float32"),
        ("float16", {}, "float32"),
        ("float32", {}, "float32"),
        ("bfloat16", {"state_format": "int8"}, "int8"),
        ("float32", {"state_format": "int8"}, "int8"),
    ],
)
def test_which_format_parameters_get(values: str, settings: dict[str, Any], name: str) -> None:
    found = format_of(values, **settings)
    assert (found.name, found.values) == (name, values)
    parameter = torch.ones(256, dtype=getattr(torch, values))
    coded = parameter.repeat(16)
    assert AdamW(**settings).format(coded, extra=()) == found
    small = format_of(values, **{k: v for k, v in settings.items() if v != "int8"})
    assert AdamW(**settings).format(parameter, extra=()) == small


@pytest.mark.parametrize(
    ("dtype", "settings", "traffic"),
    [
        (torch.bfloat16, {}, 26),
        (torch.bfloat16, {"state_format": "float32"}, 28),
        (torch.float16, {}, 28),
        (torch.bfloat16, {"master_weights": False}, 22),
        (torch.float32, {"amsgrad": True}, 36),
    ],
)
def test_the_device_is_told_the_traffic_of_an_update(
    dtype: torch.dtype, settings: dict[str, Any], traffic: int
) -> None:
    model, device = mlp(dtype), EmulatedDevice(FAST, capacity=10**8)
    told: list[tuple[int, int, str]] = []
    surround = device.host_update
    device.host_update = lambda *asked: told.append(asked) or surround(*asked)
    train(model, DOSAdam(model.parameters(), policy="cpu", device=device, **settings), steps=1)
    name = format_of(str(dtype).removeprefix("torch."), **settings).name
    assert told == [(numel, traffic * numel, name) for numel, *_ in told]
    assert sum(numel for numel, *_ in told) == sum(p.numel() for p in model.parameters())


def test_moments_in_codes() -> None:
    assert (CODED.state_bytes, CODED.block) == (2 + 2 * (1 + 4 / 128), 128)
    assert [field.name for field in CODED.fields][-1] == "rest"
    load = SubgroupLoad.of(256, CODED)
    assert (load.state_bytes, load.format) == (256 * 4 + 4 * 4, "int8")
    assert load.cpu_traffic == 2 * load.state_bytes + 3 * 512  # gradient, parameter read, parameter written
    with pytest.raises(ValueError, match="amsgrad"):
        int8(split(amsgrad=True))
