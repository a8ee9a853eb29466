"""Writes to parameters that raise no version counter: through `.data`, NumPy, and what libraries do with these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.blocks import net, start, train
from tests.support.crossings import crossed
from tests.support.training import assert_close_ulp, bits, maker
from tests.support.unseen_writes import run

MODES: dict[str, dict[str, Any]] = {"plain": {}, "attached": {}, "offloaded": {"offload_gradients": True}}


def assert_taken_over(dtype: torch.dtype, place: Any, mode: str, **settings: Any) -> None:
    """Fail unless parameters end as AdamW's, and as where versions count the same writes."""
    make, attach = maker(place, lr=0.01, subgroup_size=1500, **MODES[mode], **settings), mode == "attached"
    ours = run(make, dtype, attach=attach)
    assert all(map(torch.equal, ours, run(make, dtype, attach=attach, counted=True)))
    if dtype is torch.float32 and "state_format" not in settings:
        assert_close_ulp(ours, run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), dtype))


MASTERS = [(torch.float32, {}), (torch.float32, {"state_format": "int8"}), (torch.bfloat16, {"master_weights": False})]
WHERE = [
    *(("host", "plain"), ("resident", "plain"), ("resident", "attached"), (0.0, "offloaded")),
    *(("cpu", "plain"), ("cpu", "attached"), ("cpu", "offloaded"), ("stride:2", "attached"), ("adaptive", "plain")),
]


@pytest.mark.parametrize(("dtype", "settings_", "place", "mode"), crossed(MASTERS, WHERE))
def test_parameters_that_are_their_masters(
    dtype: torch.dtype, settings_: dict[str, Any], place: Any, mode: str
) -> None:
    assert_taken_over(dtype, place, mode, **settings_)


FOLLOWING = [(torch.bfloat16, None), (torch.bfloat16, "float32"), (torch.bfloat16, "int8"), (torch.float16, None)]
ELSEWHERE = [
    *(("host", "plain"), ("cpu", "plain"), ("cpu", "offloaded"), ("resident", "attached"), ("stride:2", "plain"))
]


@pytest.mark.parametrize(("dtype", "state_format", "place", "mode"), crossed(FOLLOWING, ELSEWHERE))
def test_parameters_whose_masters_follow(dtype: torch.dtype, state_format: str | None, place: Any, mode: str) -> None:
    assert_taken_over(dtype, place, mode, state_format=state_format)


STAY, POLICIES = (0, 2, 4, "auto"), ("cpu", "stride:2", "resident")


STREAMED = [
    *((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "float32")),
    *((torch.float16, None), (torch.float16, "int8")),
]


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
@pytest.mark.parametrize(("weights", "dtype", "state_format"), crossed(STAY, STREAMED))
def test_weights_that_stream(weights: Any, dtype: torch.dtype, state_format: str | None, turn: int) -> None:
    """Between all steps; as where versions count the same writes. turn: which policy is where."""

    def halve(model: Any) -> None:
        model.blocks[1].out.weight.data.mul_(0.5)

    def one_element(model: Any) -> None:
        model.blocks[0].both.weight.data[1, 2] = 0.3

    number = STREAMED.index((dtype, state_format))
    policy = POLICIES[(number + STAY.index(weights) + turn) % len(POLICIES)]
    ends = []
    for counted in (False, True):
        model = net(dtype, blocks=4)
        optimizer = start(model, weights, policy=policy, state_format=state_format)
        for step in range(4):
            train(model, optimizer, 1, first=step)
            optimizer.synchronize()
            for way in (halve, one_element):
                way(model)
            if counted:
                torch.autograd.graph.increment_version(list(model.parameters()))
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1], policy


def test_a_write_before_a_model_is_attached_again_counts() -> None:
    """Of weights that stay, which the host has updated."""
    ends = []
    for weights in (1.0, None):
        model = net(torch.float32)
        optimizer = start(model, weights, policy="cpu")
        train(model, optimizer, 2)
        optimizer.synchronize()
        for p in model.blocks.parameters():
            p.data.mul_(0.5)
        if weights is not None:
            optimizer.attach(model, weights=weights)
        train(model, optimizer, 2, first=2)
        optimizer.synchronize()
        ends.append([p.detach() for p in model.parameters()])
    assert_close_ulp(*ends, 0)
