"""DOSAdam against torch.optim.AdamW, step by step, on every way of calling it."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode

from dos import DOSAdam, EmulatedDevice
from dos.gradients.scaling import amp_scale
from dos.sharding.meshes import Meshes
from tests.support.training import assert_close_ulp, bits, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

POLICIES = ["cpu", "stride:1", "stride:2", "stride:3", 0.0, 0.4, 1.0]

SETTINGS = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3},
    {"amsgrad": True, "betas": (0.9, 0.5)},
    {"maximize": True, "lr": 1e-4},
    {"weight_decay": 0.0, "betas": (0.0, 0.0)},
    {"lr": torch.tensor(3e-3)},
    {"foreach": True},
    {"fused": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "lr": 1e-4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("accelerated", [False, True], ids=["host", "emulated"])
def test_every_step_agrees_with_adamw(settings: dict, accelerated: bool, device: EmulatedDevice) -> None:
    reference, model = mlp(), mlp()
    ours = {"policy": "stride:2", "subgroup_size": 300, "device": device} if accelerated else {}
    adamw = torch.optim.AdamW(reference.parameters(), **settings)
    optimizer = DOSAdam(model.parameters(), **settings, **ours)
    for step in range(10):
        expected = train(reference, adamw, 1, first_step=step)
        assert train(model, optimizer, 1, first_step=step) == pytest.approx(expected, abs=1e-5)
        assert_close_ulp(model.parameters(), reference.parameters())


def test_l2_agrees_with_adam(device: EmulatedDevice) -> None:
    reference, model = mlp(), mlp()
    train(reference, torch.optim.Adam(reference.parameters(), lr=0.01, weight_decay=0.1), 10)
    train(
        model,
        DOSAdam(model.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=False, device=device),
        10,
    )
    assert_close_ulp(model.parameters(), reference.parameters(), ulps=256)


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


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
        lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    ],
    ids=["cyclic", "onecycle", "cosine", "lambda", "plateau"],
)
def test_schedulers(schedule, device: EmulatedDevice) -> None:
    results = []
    for make in (torch.optim.AdamW, lambda p: DOSAdam(p, policy="stride:2", subgroup_size=300, device=device)):
        model = mlp()
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer)
        for step in range(12):
            train(model, optimizer, 1, first_step=step)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
        results.append((model, [group["lr"] for group in optimizer.param_groups]))
    assert results[0][1] == results[1][1]
    assert_close_ulp(results[1][0].parameters(), results[0][0].parameters())


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
def test_what_grad_scaler_says_is_read_at_once(infinite: float) -> None:
    optimizer = DOSAdam(mlp().parameters())
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(infinite), torch.tensor([4.0])
    with Reads() as reads:
        assert amp_scale(optimizer, Meshes(), offloaded=False)[::2] == (0.25, bool(infinite))
    assert len(reads.seen) == 1
    optimizer.found_inf = 0  # no parameter had a gradient
    assert amp_scale(optimizer, Meshes(), offloaded=False)[::2] == (0.25, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_loaded_after_construction_are_seen(dtype: torch.dtype, device: EmulatedDevice) -> None:
    """Loaded before and after the first step, by every way PyTorch notices, whatever the placement."""
    donor = [mlp(dtype, seed=7).state_dict(), mlp(dtype, seed=8).state_dict()]
    ends = []
    for kind, policy in itertools.product(("host", "emulated"), ("cpu", "stride:1", 0.0)):
        model = mlp(dtype)
        optimizer = DOSAdam(
            model.parameters(), policy=policy, subgroup_size=300, device=device if kind == "emulated" else None
        )
        model.load_state_dict(donor[0])
        train(model, optimizer, 3)
        model.load_state_dict(donor[1])
        loaded = copy.deepcopy(model)
        with torch.no_grad():
            model[2].bias[3] = 5.0
        model[0].bias.data = torch.full_like(model[0].bias, 0.25)
        optimizer.param_groups[0]["lr"] = 1e-6
        train(model, optimizer, 1, first_step=3)
        assert_close_ulp(
            [model[0].weight, model[2].bias[3:4], model[0].bias],
            [loaded[0].weight, torch.tensor([5.0], dtype=dtype), torch.full_like(model[0].bias, 0.25)],
            ulps=1000 if dtype == torch.float32 else 2,
        )
        ends.append(bits(model.parameters()))
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_edit_of_some_elements_keeps_the_precision_of_the_others(dtype: torch.dtype, device: EmulatedDevice) -> None:
    model = mlp(dtype)
    optimizer = DOSAdam(model.parameters(), lr=1e-5, device=device)
    train(model, optimizer, 3)
    weight = model[0].weight
    before = optimizer.adamw_state(weight)["master_param"]
    with torch.no_grad():
        weight[0, 0] = 1.0
    optimizer.param_groups[0].update(lr=0.0)
    train(model, optimizer, 1)
    after = optimizer.adamw_state(weight)["master_param"]
    assert after[0, 0].to(dtype) == 1.0
    before[0, 0] = after[0, 0]
    assert torch.equal(after, before)


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


def test_backward_through_an_updated_parameter_is_refused_as_with_adamw(device: EmulatedDevice) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = DOSAdam([weight], device=device)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
