"""Every mistake gets a message that says what was found and what to do, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from perfmodel import Placement, Plan
from tests.support.training import FAST, backward, bits, mlp, on, train


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more and finite, found -1.0"),
        ({"lr": math.nan}, "lr must be 0 or more and finite, found nan"),
        ({"lr": torch.ones(2)}, "a tensor lr must have 1 element"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"betas": (1.0, 0.999)}, r"betas\[0\] must lie in \[0, 1\), found 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] must lie in \[0, 1\), found -0.1"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers, found 0.9"),
        ({"capturable": True}, "capturable=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
        ({"policy": "fastest"}, "policy: expected 'adaptive', 'cpu', 'stride:K'.* found 'fastest'"),
        ({"policy": "stride:0"}, "a stride is 1 or more"),
        ({"policy": "stride:two"}, "a whole number after 'stride:'"),
        ({"policy": 1.5}, r"lies in \[0, 1\], found 1.5"),
        ({"policy": -0.1}, r"lies in \[0, 1\], found -0.1"),
        ({"policy": math.nan}, "found nan"),
        ({"subgroup_size": 0}, "subgroup_size must be a whole number of parameters, 1 or more; found 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"profile": "h100_", "policy": "cpu"}, r"profile 'h100_' is neither a file nor a built-in profile \(.*h100"),
        ({"device": "emulated"}, r"the parameters, or a dos.EmulatedDevice\(profile, capacity\).* found 'emulated'"),
        *(
            ({"state_format": found}, "state_format must be None, 'split', 'float32' or 'int8', found")
            for found in ("int4", "Split", "", 0, torch.float32)
        ),
        ({"policy": "resident", "disk": "state"}, "leave disk= out, or choose 'adaptive'"),
        # As of a setting that was left out: it would be the current folder.
        *(({"disk": found}, "disk must name a folder, found") for found in ("", ["a", ""], "a\0b")),
    ],
    ids=str,
)
def test_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DOSAdam(mlp().parameters(), **settings)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("policy", [True, None]),
        ("eps", ["1e-8"]),
        ("lr", ["1e-3"]),
        ("max_grad_norm", ["1"]),
        ("profile", [5]),
        ("disk", [3, ["a", 3], b"a"]),
    ],
)
def test_settings_of_another_type(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(TypeError, match=name):
            DOSAdam(mlp().parameters(), **{name: value})


def test_attach_refuses_all_but_the_optimizers_model(device: EmulatedDevice) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device)
    with pytest.raises(
        TypeError, match=r"expects the model, an nn.Module, found generator; call optimizer.attach\(model"
    ):
        optimizer.attach(model.parameters())
    with pytest.raises(ValueError, match="Sequential, has none of the optimizer's parameters; attach the model whose"):
        optimizer.attach(mlp())
    optimizer.attach(nn.Sequential(model, nn.Linear(2, 2)))


def test_a_bad_group_is_not_added() -> None:
    model = mlp()
    optimizer = DOSAdam(model[0].parameters())
    with pytest.raises(ValueError, match="param group 1: lr must be"):
        optimizer.add_param_group({"params": model[2].parameters(), "lr": -1.0})
    frozen = nn.Parameter(torch.ones(1, device="meta"), requires_grad=False)
    with pytest.raises(TypeError, match="expected parameters on cpu or cuda, found meta"):
        optimizer.add_param_group({"params": [model[2].weight, frozen]})
    assert model[2].weight._post_accumulate_grad_hooks is None
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 1.0})


@pytest.mark.parametrize("place", ["host", "device", "device with offload"])
def test_sparse_gradients(place: str, device: EmulatedDevice) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    other = nn.Parameter(torch.ones(2))
    where = {} if place == "host" else {"device": device, "offload_gradients": place == "device with offload"}
    optimizer = DOSAdam([*embedding.named_parameters(), ("other", other)], **where)
    optimizer.attach(embedding, activations=1.0)
    embedding(torch.tensor([1, 2])).sum().backward()
    other.grad = torch.ones(2)
    before = bits([embedding.weight, other])
    with pytest.raises(RuntimeError, match="parameter 'weight': DOSAdam does not support sparse gradients"):
        optimizer.step()
    assert bits([embedding.weight, other]) == before
    assert not optimizer.state


@pytest.mark.parametrize(
    ("place", "numel", "steps"),
    [("host", 3, 0), ("host", 20, 1), ("cpu", 20, 0), ("resident", 3, 1)],
)
def test_gradients_of_another_shape(place: str, numel: int, steps: int) -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = DOSAdam([p], **on(place))
    for _ in range(steps):
        p.grad = torch.ones(10)
        optimizer.step()
    before = p.detach().clone()
    p.grad = torch.ones(10)
    p.grad.data = torch.ones(numel)
    with pytest.raises(RuntimeError, match=rf"has a gradient of shape \({numel},\), expected the parameter's"):
        optimizer.step()
    assert torch.equal(p, before)
    p.grad = torch.ones(10)
    optimizer.step()
    assert optimizer.state[p]["step"] == steps + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda o, p: o.state[p].update(exp_avg=torch.zeros(3)),
            r"its state 'exp_avg' must have shape \(40, 24\), found shape \(3,\)",
        ),
        (lambda o, p: o.param_groups[0].update(betas=(1.0, 0.999)), r"betas\[0\] must lie in \[0, 1\)"),
    ],
)
def test_spoilt_state_and_settings_are_refused_and_change_nothing(spoil: Callable[..., None], message: str) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters())
    train(model, optimizer, 1)
    before = bits(model.parameters())
    spoil(optimizer, model[0].weight)
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, 1)
    assert bits(model.parameters()) == before
    assert all(entry["step"] == 1 for entry in optimizer.state.values())


MADE = r"group \d: expected a dict of settings and a list of parameters, as add_param_group\(\) makes it, found "
SHAPE = (
    r"parameter 0 of shape \(40, 24\): its state 'exp_avg' must have shape \(40, 24\), found shape \(40, 24\), torch"
)
CHANGES: list[tuple[Callable[[DOSAdam, nn.Parameter], object], str]] = [
    (lambda o, p: o.param_groups[0].update(params=None), f"{MADE}NoneType"),
    (lambda o, p: o.param_groups[0].update(params=p), f"{MADE}Parameter"),
    (lambda o, p: o.param_groups[0].update(params=[p, None]), f"{MADE}NoneType among them"),
    (lambda o, p: o.param_groups[0].pop("params"), f"{MADE}no 'params'"),
    (lambda o, p: o.param_groups[0].pop("lr"), f"{MADE}no 'lr'"),
    (lambda o, p: o.param_groups.append({"params": [nn.Parameter(torch.ones(1))]}), f"{MADE}no 'amsgrad'"),
    (lambda o, p: o.param_groups.append([p]), f"{MADE}list"),
    (lambda o, p: setattr(o, "param_groups", o.param_groups[0]), f"{MADE}str"),
    (lambda o, p: setattr(o, "param_groups", None), f"{MADE}NoneType"),
    (
        lambda o, p: o.state.update({p: 5}),
        r"of a parameter of shape \(40, 24\) in optimizer.state must be a dict, found int",
    ),
    (lambda o, p: o.state.update({p: torch.ones(3)}), "must be a dict, found Tensor; delete it to begin anew"),
    (lambda o, p: o.state[p].update(step=math.inf), "its state 'step' must be 0 or more and finite, found inf"),
    (lambda o, p: o.state[p].update(step=torch.ones((), device="meta")), "must be one number, found tensor.*meta"),
    (lambda o, p: o.state[p].update(exp_avg=torch.ones(40, 24, dtype=torch.complex64)), f"{SHAPE}.complex64"),
    (lambda o, p: o.state[p].update(exp_avg=torch.ones(40, 24).to_sparse()), f"{SHAPE}.float32, torch.sparse_coo"),
    (lambda o, p: o.state[p].update(exp_avg=torch.ones(40, 24, device="meta")), f"{SHAPE}.*on meta"),
    (lambda o, p: o.edit_gradients(5), r"edit_gradients\(\) expects a function .* found 5"),
]


@pytest.mark.filterwarnings("ignore:DOSAdam.step.. found no gradient")
@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_groups_and_state_unlike_those_of_torch(
    change: Callable[[DOSAdam, nn.Parameter], object], message: str, offload_gradients: bool
) -> None:
    """As user code has changed them by mistake; training goes on once they are as before."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), **on("cpu", offload_gradients=offload_gradients))
    train(model, optimizer, 1)
    before, groups = bits(model.parameters()), [dict(group) for group in optimizer.param_groups]
    entries = {p: dict(entry) for p, entry in optimizer.state.items()}
    backward(model, 1)

    def step() -> None:
        change(optimizer, model[0].weight)
        optimizer.step()

    with pytest.raises((TypeError, ValueError), match=message):
        step()
    assert bits(model.parameters()) == before
    optimizer.param_groups = groups
    optimizer.state = entries
    train(model, optimizer, 1)
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def test_none_is_no_entry(device: EmulatedDevice) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device)
    train(model, optimizer, 2)
    optimizer.state[model[0].weight] = None
    train(model, optimizer, 1)
    assert [optimizer.state[p]["step"] for p in model.parameters()][:2] == [1, 3]


def test_parameters_converted_after_their_first_step(device: EmulatedDevice) -> None:
    model = mlp()
    optimizer = DOSAdam(model.named_parameters(), device=device)
    train(model, optimizer, 2)
    model.to(torch.bfloat16)
    before = bits(model.parameters())
    with pytest.raises(
        RuntimeError,
        match=r"was torch\.float32 .* is torch\.bfloat16 .* now; move or convert the model before the first step",
    ):
        train(model, optimizer, 1)
    assert bits(model.parameters()) == before
    model.to(torch.float32)
    train(model, optimizer, 1)


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_model_may_be_converted_until_the_first_step(accelerated: bool, device: EmulatedDevice) -> None:
    """As trainers do, which take an optimizer and then put the model where it shall be."""
    model, other = mlp(), mlp(torch.bfloat16)
    optimizer = DOSAdam(model.parameters(), device=device if accelerated else None)
    model.to(torch.bfloat16)
    train(model, optimizer, 3)
    train(other, DOSAdam(other.parameters()), 3)
    assert bits(model.parameters()) == bits(other.parameters())


def test_a_device_too_small_for_a_slot_loses_nothing() -> None:
    model, twin = mlp(), mlp()
    device = EmulatedDevice(FAST, capacity=1000)
    optimizer = DOSAdam(model.parameters(), policy="stride:2", subgroup_size=300, device=device)
    before = bits(model.parameters())
    with pytest.raises(ValueError, match=r"needs a staging slot of \d+ bytes and the device has 1000 bytes"):
        train(model, optimizer, 1)
    assert bits(model.parameters()) == before
    assert all(entry["step"] == 0 for entry in optimizer.state.values())
    optimizer = DOSAdam(model.parameters(), policy="stride:2", subgroup_size=20, device=device)
    train(model, optimizer, 2)
    train(twin, DOSAdam(twin.parameters()), 2)
    assert bits(model.parameters()) == bits(twin.parameters())


def test_policies_that_return_nonsense(device: EmulatedDevice) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy=lambda workload: "cpu", device=device)
    with pytest.raises(TypeError, match=r"must return a perfmodel\.Plan, found str"):
        train(model, optimizer, 1)
    short = Plan((Placement.CPU,), (0,), 0)
    optimizer = DOSAdam(model.parameters(), policy=lambda workload: short, subgroup_size=100, device=device)
    with pytest.raises(ValueError, match="a plan of 1 subgroups for a workload of"):
        train(model, optimizer, 1)


WEIGHT = nn.Parameter(torch.ones(3))
with torch.inference_mode():
    INFERENCE = nn.Parameter(torch.ones(3))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.ones(3, requires_grad=True), TypeError, "iterable of Tensors"),
        (nn.Linear(2, 2), TypeError, r"found a model, Linear; pass its parameters\(\)"),
        (mlp(), TypeError, r"found a model, Sequential; pass its parameters\(\)"),
        ([WEIGHT, WEIGHT], ValueError, "names a parameter twice"),
        ([{"params": [WEIGHT]}, {"params": [WEIGHT]}], ValueError, "more than one parameter group"),
        (
            [("w", nn.Parameter(WEIGHT.double()))],
            TypeError,
            "parameter 'w': expected a parameter of .*float64",
        ),
        (
            [("w", nn.Parameter(WEIGHT.cfloat()))],
            TypeError,
            "parameter 'w': expected a parameter of .*complex64",
        ),
        ([("w", INFERENCE)], TypeError, r"'w' was made in torch\.inference_mode.*; build the model outside"),
    ],
)
def test_parameters_that_cannot_be_optimised_are_refused(
    parameters: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DOSAdam(parameters)
