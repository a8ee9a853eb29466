"""DOSAdam against torch.optim.AdamW, step by step, on every way of calling it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dos import DOSAdam, EmulatedDevice
from dos.gradients.scaling import amp_scale
from dos.sharding.meshes import Meshes
from tests.support.training import assert_close_ulp, maker, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

SETTINGS = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3, "foreach": True},
    {"amsgrad": True, "betas": (0.9, 0.5), "fused": True},
    {"weight_decay": 0.0, "betas": (0.0, 0.0), "lr": torch.tensor(3e-3)},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "lr": 1e-4},
]


@pytest.mark.parametrize(
    "settings", [*SETTINGS, {"decoupled_weight_decay": False, "weight_decay": 0.1, "lr": 0.01}], ids=str
)
@pytest.mark.parametrize("place", ["host", "stride:2"])
def test_every_step_agrees_with_adamw(settings: dict, place: str) -> None:
    reference, model = mlp(), mlp()
    theirs = {key: value for key, value in settings.items() if key != "decoupled_weight_decay"}
    adam = (torch.optim.AdamW if settings == theirs else torch.optim.Adam)(reference.parameters(), **theirs)
    optimizer = maker(place, **settings)(model.parameters())
    for step in range(10):
        expected = train(reference, adam, 1, first_step=step)
        assert train(model, optimizer, 1, first_step=step) == pytest.approx(expected, abs=1e-5)
        assert_close_ulp(model.parameters(), reference.parameters(), ulps=64 if settings == theirs else 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_a_master_in_float32(dtype: torch.dtype, device: EmulatedDevice) -> None:
    """The same gradients into AdamW on float32 copies, rounded at each step, give the same bits but for last places."""
    model = mlp(dtype)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    adamw = torch.optim.AdamW(masters, lr=1e-3)

    def give_gradients(step: int) -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        adamw.step()

    optimizer = DOSAdam(model.parameters(), lr=1e-3, policy="stride:2", subgroup_size=300, device=device)
    train(model, optimizer, 10, before_step=give_gradients)
    assert_close_ulp([optimizer.adamw_state(p)["master_param"] for p in model.parameters()], masters)
    assert_close_ulp(model.parameters(), [m.to(dtype) for m in masters], ulps=2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("after", ["a step", "a step that was skipped", "zeroing"])
def test_a_clip_is_for_one_step(after: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = DOSAdam([weight])
    weight.grad = torch.ones(4)
    optimizer.clip_grad_norm_(0.5)
    if after == "zeroing":
        optimizer.zero_grad(set_to_none=False)
        weight.grad += 1
    elif after == "a step that was skipped":
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(1.0)
    optimizer.step()
    assert optimizer.grad_norm() == 2, "and nothing was said of a clip that was lost"


def test_step_hooks_run_and_step_counts(device: EmulatedDevice) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device)
    log = []
    optimizer.register_step_pre_hook(lambda *_: log.append("pre"))
    optimizer.register_step_post_hook(lambda *_: log.append("post"))
    train(model, optimizer, 2)
    assert log == ["pre", "post", "pre", "post"]
    assert {optimizer.state[p]["step"].item() for p in model.parameters()} == {2.0}


class Reads(TorchFunctionMode):
    """Notes what reads values, for which the host waits if they are on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("infinite", [0.0, 1.0])
def test_scale_and_overflow_are_read_with_one_wait(infinite: float) -> None:
    scale = torch.tensor([4.0])
    with Reads() as reads:
        assert amp_scale(torch.tensor(infinite), scale, Meshes(), offloaded=False)[::2] == (0.25, bool(infinite))
    assert len(reads.seen) == 1
    no_gradient = 0
    assert amp_scale(no_gradient, scale, Meshes(), offloaded=False)[::2] == (0.25, False)


def test_named_parameters_and_repr() -> None:
    model = mlp()
    optimizer = DOSAdam(model.named_parameters(), lr=0.5)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    assert "lr: 0.5" in repr(optimizer)


def test_step_without_any_gradient_says_so_once() -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters())
    with pytest.warns(UserWarning, match="replaced after the optimizer was built"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
