"""On a GPU: updates during backward, beside the kernels that still read the parameters and write gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dos import DOSAdam
from tests.support.gpu import DEVICE, NEEDS_GPU
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import RandomPlans
from tests.support.scales import ROOM, OnTwoStreams, Scales, Sines, run, with_policy

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    return run(with_policy("cpu"))


class Chain(Scales):
    """Each layer reads its weight in backward, too, to give the layer before its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * (layer.weight.float() * 0.01).tanh().mean() + layer(x.to(layer.weight.dtype)).tanh()
        return x


def updated_in_backward(optimizer: DOSAdam) -> None:
    """Between the last backward and step(): all but the first step is issued there, and one that measures backward."""
    parts = session_of(optimizer).assembly
    mode, on_device = parts.in_backward, parts.on_device
    assert mode is not None
    assert on_device is not None
    assert mode.issued or not optimizer.plan() or on_device.decisions.pace.holds
    assert on_device.device.owner == on_device.device.caller(), "forward can use the memory again"


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("subgroup_size", [100_000, 10**9])
@pytest.mark.parametrize("policy", ["cpu", 0.0, 0.5, "stride:1", "stride:3", "adaptive"])
def test_same_bits(policy: str | float, subgroup_size: int, offload: bool, expected: list[bytes]) -> None:
    make = with_policy(policy, subgroup_size, offload_gradients=offload)
    assert run(make, attached=True, updates="backward", before=updated_in_backward) == expected


@pytest.mark.parametrize("slots", [1, 3])
def test_plans_that_change_every_step(slots: int, expected: list[bytes]) -> None:
    policy = RandomPlans(slots, slots)
    settings = {"attached": True, "updates": "backward"}
    assert run(with_policy(policy), between=lambda o, _: plan_anew(o), **settings) == expected


@pytest.mark.parametrize("policy", ["cpu", "resident", "stride:2"])
@pytest.mark.parametrize("state_format", ["int8", "float32"])
def test_formats(policy: str, state_format: str) -> None:
    settings = {"state_format": state_format}
    plain = run(with_policy("cpu", **settings), attached=True)
    assert run(with_policy(policy, **settings), attached=True, updates="backward") == plain


@pytest.mark.parametrize(
    ("model", "policy"),
    [(Sines, "stride:2"), *((model, policy) for model in (Chain, OnTwoStreams) for policy in ("cpu", 0.5, "resident"))],
)
def test_what_backward_still_reads(policy: str | float, model: type[Scales]) -> None:
    """Weights that backward reads on several streams, and saved tensors that move meanwhile."""
    settings = {"model_class": model, "layers": 12, "activations": ROOM if model is Sines else None}
    plain = run(with_policy("cpu"), attached=True, **settings)
    settings |= {"attached": True, "updates": "backward"}
    assert run(with_policy(policy), before=updated_in_backward, **settings) == plain


def test_memory_that_is_released_meanwhile(expected: list[bytes]) -> None:
    """Gradients are given away while updates read them: what user code allocates gets their memory."""

    def before(optimizer: DOSAdam) -> None:
        for _ in range(20):
            torch.full((300_000,), 7.0, dtype=torch.bfloat16).to(DEVICE)

    for policy in ("cpu", "resident", "stride:2"):
        assert run(with_policy(policy), attached=True, updates="backward", before=before) == expected
