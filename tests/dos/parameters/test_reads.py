"""User code that reads or writes parameters right after `step()`, without a forward, while updates run on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dos import DOSAdam
from dos.torch_internals.live_objects import parameters_of_all_modules
from tests.support.disk import bytes_on_disk
from tests.support.inside import session_of
from tests.support.races import allowed
from tests.support.training import SLOW, assert_close_ulp, batch, bits, maker, mlp, profile, train

Read = Callable[[Any, Any], Iterable[Tensor]]
"""Reads parameters of a model with its optimizer."""


def applied(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    model.apply(lambda module: found.extend(module.parameters(recurse=False)))
    return found


READS: dict[str, Read] = {
    "parameters": lambda model, _: model.parameters(),
    "named_parameters": lambda model, _: dict(model.named_parameters()).values(),
    "attributes": lambda model, _: [model[0].weight, model[0].bias, model[3].weight],
    "get_parameter": lambda model, _: [model.get_parameter("2.bias"), model.get_parameter("3.weight")],
    "_parameters": lambda model, _: [model[0]._parameters["weight"], *model[2]._parameters.values()],
    "state_dict": lambda model, _: model.state_dict().values(),
    "parameters_to_vector": lambda model, _: [parameters_to_vector(model.parameters())],
    "apply": lambda model, _: applied(model),
    "deepcopy": lambda model, _: copy.deepcopy(model).parameters(),
    "copy": lambda model, _: copy.copy(model).parameters(),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)).parameters(),
    "a regulariser": lambda model, _: [sum((p.square().sum() for p in model.parameters()), torch.zeros(()))],
    "groups": lambda _, optimizer: [p for group in optimizer.param_groups for p in group["params"]],
    "groups by number": lambda _, optimizer: [optimizer.param_groups[0]["params"][number] for number in range(5)],
    "sums of lists": lambda _, optimizer: [] + optimizer.param_groups[0]["params"] + [],
    "copy of groups": lambda _, optimizer: copy.deepcopy(optimizer.param_groups)[0]["params"],
}


@torch.no_grad()
def clamp(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        p.clamp_(-0.1, 0.1)


def halve(model: nn.Sequential, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data / 2


def replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[3].weight = nn.Parameter(model[3].weight.detach() / 2)
    optimizer.param_groups[0]["params"][4] = model[3].weight


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clamp_": lambda model, _: clamp(model.parameters()),
    "clamp_ in groups": lambda _, optimizer: clamp(p for group in optimizer.param_groups for p in group["params"]),
    "nn.init": lambda model, _: nn.init.constant_(model[0].weight, 0.01),
    "data": halve,
    "a new parameter": replace,
}


def prepared(make: Any, width: int = 40) -> tuple[nn.Sequential, Any]:
    """A model after three steps, the last of which is in flight if the optimizer is ours."""
    model = mlp(width=width)
    optimizer = make(model.parameters())
    if isinstance(optimizer, DOSAdam):
        optimizer.attach(model)
    train(model, optimizer, 3)
    if isinstance(optimizer, DOSAdam):
        assert session_of(optimizer).ledger.unfinished, "nothing is in flight, and nothing can be stale"
    return model, optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


SETTINGS = [
    pytest.param({"place": "cpu"}, id="float32"),
    pytest.param({"place": "cpu", "offload_gradients": True}, id="offloaded"),
    pytest.param({"place": 0.5, "state_format": "float32"}, id="on both"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_all_that_reads_right_after_a_step_reads_its_values(settings: dict[str, Any]) -> None:
    model, optimizer = prepared(maker(machine=SLOW, lr=0.01, **settings))
    twin, plain = prepared(adamw)
    for step, (way, read) in enumerate(READS.items()):
        found = [t.detach().clone() for t in read(model, optimizer)]
        optimizer.synchronize()
        assert all(map(torch.equal, found, read(model, optimizer))), way
        assert_close_ulp(found, read(twin, plain), 256)
        train(model, optimizer, 1, first_step=step)
        train(twin, plain, 1, first_step=step)


ON_DISK = {"host_memory": 120_000, "subgroup_size": 2048, "machine": profile(cpu_update_rate=3e6)}


@pytest.mark.parametrize("settings", [{"state_format": "int8"}, ON_DISK], ids=["codes", "disk"])
def test_reads_and_writes_right_after_a_step_with_state_in_codes_or_on_disk(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where user code synchronises first."""
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)
    if "host_memory" in settings:
        settings = {**settings, "disk": tmp_path}
    ends = []
    for first in (False, True):
        model, optimizer = prepared(
            maker("cpu", **{"machine": SLOW, "lr": 0.01, **settings}), 600 if "disk" in settings else 40
        )
        assert "disk" not in settings or bytes_on_disk(tmp_path)
        found: list[Tensor] = []
        for step, (way, write) in enumerate(WRITES.items()):
            for read in READS.values() if way == "nn.init" else [READS["parameters"]]:
                if first:
                    optimizer.synchronize()
                found += [t.detach().clone() for t in read(model, optimizer)]
                train(model, optimizer, 1, first_step=step)
            if first:
                optimizer.synchronize()
            write(model, optimizer)
            train(model, optimizer, 1, first_step=step)
        optimizer.synchronize()
        ends.append(bits([*found, *model.parameters()]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("settings", SETTINGS)
def test_all_that_is_written_right_after_a_step_stays_and_is_trained_on(settings: dict[str, Any]) -> None:
    for write in WRITES.values():
        ends = []
        for make in (maker(machine=SLOW, lr=0.01, **settings), adamw):
            model, optimizer = prepared(make)
            write(model, optimizer)
            train(model, optimizer, 2, first_step=3)
            if isinstance(optimizer, DOSAdam):
                optimizer.synchronize()
            ends.append(list(model.parameters()))
        assert_close_ulp(*ends, 256)


@pytest.mark.parametrize("settings", [*SETTINGS, pytest.param({"place": "adaptive"}, id="adaptive")])
def test_parameters_are_shared_right_after_a_step(settings: dict[str, Any]) -> None:
    """That moves them to other memory, which must not be released under an update that runs."""
    ends = []
    for make in (maker(machine=SLOW, lr=0.01, **settings), adamw):
        model, optimizer = prepared(make)
        model.share_memory()
        assert all(p.is_shared() for p in model.parameters())
        train(model, optimizer, 2, first_step=3)
        if isinstance(optimizer, DOSAdam):
            optimizer.synchronize()
        ends.append(list(model.parameters()))
    assert_close_ulp(*ends, 256)


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS, {"place": "stride:1", "offload_gradients": True}])
def test_parameters_of_a_kept_list_are_shared_right_after_a_step(settings: dict[str, Any], synchronised: bool) -> None:
    """The memory to which the update writes is not released under it, and its values are those of the new memory."""
    ends = []
    for make in (maker(machine=SLOW, lr=0.01, **settings), adamw):
        model = mlp(width=64)
        optimizer = make(kept := list(model.parameters()))
        if isinstance(optimizer, DOSAdam):
            optimizer.attach(model)
        for step in range(4):
            train(model, optimizer, 1, first_step=step)
            if step == 2:
                with allowed():  # reads while the update writes, which gives the new memory its values afterwards
                    for p in kept:
                        p.share_memory_()
                if synchronised and isinstance(optimizer, DOSAdam):
                    optimizer.synchronize()
        if isinstance(optimizer, DOSAdam):
            optimizer.synchronize()
        assert all(p.is_shared() for p in kept)
        ends.append(kept)
    assert_close_ulp(*ends, 256)


def test_shared_parameters_stay_shared() -> None:
    """As other processes have them."""
    model = mlp().share_memory()
    addresses = [p.data_ptr() for p in model.parameters()]
    train(model, maker("stride:1", machine=SLOW)(model.parameters()), 2)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.is_shared() for p in model.parameters())


def test_a_list_that_user_code_puts_into_a_group_waits_too() -> None:
    """As Accelerate does where it divides parameters."""
    model, optimizer = prepared(maker("cpu", machine=SLOW, lr=0.01))
    optimizer.synchronize()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1, first_step=3)
    assert session_of(optimizer).ledger.unfinished
    found = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.synchronize()
    assert all(map(torch.equal, found, model.parameters()))


def test_a_model_with_a_scripted_part_is_trained_as_by_adamw() -> None:
    """Its parameters are in C++, in no dict; `attach` cannot put hooks on it."""
    ends = []
    for make in (maker("cpu", lr=0.01, offload_gradients=True), adamw):
        model = mlp()
        model[0] = torch.jit.script(model[0])
        optimizer = make(model.parameters())
        assert {id(p) for p in model.parameters()} <= {id(p) for p in parameters_of_all_modules()}
        for step in range(3):
            train(model, optimizer, 1, first_step=step)
            model.zero_grad()
        if isinstance(optimizer, DOSAdam):
            optimizer.synchronize()
        ends.append(list(model.parameters()))
    assert_close_ulp(*ends, 256)


def test_an_average_is_that_of_the_values_after_each_step() -> None:
    ends = []
    for make in (maker("cpu", machine=SLOW, lr=0.01), adamw):
        model = mlp()
        optimizer = make(model.parameters())
        if isinstance(optimizer, DOSAdam):
            optimizer.attach(model)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(4):
            train(model, optimizer, 1, first_step=step)
            average.update_parameters(model)
        ends.append(list(average.module.parameters()))
    assert_close_ulp(*ends, 256)


class Borrowing(nn.Module):
    """Uses the weight of a layer that it calls, too, as torch's ConvBn does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        borrowed = nn.functional.linear(x, self.layer.weight)
        return borrowed + self.layer(x)


def test_a_weight_that_is_used_before_its_module_runs_is_the_one_after_the_step() -> None:
    ends = []
    for make in (maker("cpu", machine=SLOW, lr=0.01), adamw):
        model = Borrowing()
        optimizer = make(model.parameters())
        if isinstance(optimizer, DOSAdam):
            optimizer.attach(model)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        ends.append([p.clone() for p in model.parameters()])
    assert_close_ulp(*ends, 256)


def test_code_that_reads_no_parameter_waits_for_none() -> None:
    """Schedulers, Accelerate and GradScaler read the groups in each iteration, and `zero_grad` lists of parameters."""
    model, optimizer = prepared(maker("cpu", machine=SLOW, lr=0.01))
    session = session_of(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer._opt_called = True  # else the scheduler warns, which was made after the steps
    for read in (
        optimizer.zero_grad,
        scheduler.step,
        lambda: optimizer.param_groups[0].update(lr=0.02),
        lambda: [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        lambda: [len(group["params"]) for group in optimizer.param_groups],
        lambda: list(model.modules()) and list(model.buffers()),
        lambda: optimizer.offload_activations(0.5),
    ):
        read()
        assert session.ledger.unfinished
    # A parameter is waited for alone.
    first = model[0].weight
    assert session.registry.record(first) not in session.ledger.unfinished
    assert session.ledger.unfinished


def test_a_module_that_has_run_reads_its_parameters_from_its_own_dict() -> None:
    """Nothing is left to pay for where no update runs, and torch.compile finds what it has seen."""
    model = mlp()
    own = [vars(module)["_parameters"] for module in model]
    optimizer = maker("cpu", machine=SLOW)(model.parameters())
    optimizer.attach(model)
    train(model, optimizer, 2)
    assert type(vars(model[0])["_parameters"]) is not dict
    assert type(optimizer.param_groups[0]["params"]) is not list
    model(batch(0))
    assert all(found is vars(module)["_parameters"] for found, module in zip(own, model, strict=True))
    optimizer.step()
    model.eval()
    model(batch(0))
    assert all(found is vars(module)["_parameters"] for found, module in zip(own, model, strict=True))
    optimizer.attach(mlp_of(optimizer))
    assert all(found is vars(module)["_parameters"] for found, module in zip(own, model, strict=True))


def mlp_of(optimizer: DOSAdam) -> nn.Module:
    """Another model of the same parameters."""
    return nn.ParameterList(optimizer.param_groups[0]["params"])


def test_two_optimizers_of_one_model_wait_each_for_its_own() -> None:
    model = mlp()
    parameters = list(model.parameters())
    one, other = (maker("cpu", machine=SLOW)(part) for part in (parameters[:2], parameters[2:]))
    for each in (one, other):
        each.attach(model)
    for step in range(2):
        train(model, one, 1, first_step=step)
        other.step()
    assert session_of(one).ledger.unfinished
    assert session_of(other).ledger.unfinished
    _ = model[3].weight
    assert session_of(one).registry.record(parameters[0]) in session_of(one).ledger.unfinished
    one.synchronize()
    assert type(vars(model[2])["_parameters"]) is not dict, "its updates, which are the other's, run on"
    found = [p.detach().clone() for p in model.parameters()]
    other.synchronize()
    assert all(map(torch.equal, found, parameters))


def test_groups_are_saved_and_copied_as_lists() -> None:
    _, optimizer = prepared(maker("cpu", machine=SLOW))
    assert type(copy.deepcopy(optimizer.param_groups)[0]["params"]) is list
    assert type(copy.copy(optimizer.param_groups[0]["params"])) is list
    assert isinstance(optimizer.param_groups[0]["params"], list)
    found = pickle.loads(pickle.dumps(optimizer.param_groups[0]["params"]))
    assert type(found) is list
    assert len(found) == 5
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.param_groups[0]["params"]) == 5


def test_parametrised_weights_and_those_of_lists_are_read_after_their_updates() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.list = nn.ParameterList([torch.randn(24, 24) / 5 for _ in range(2)])
            self.dict = nn.ParameterDict({"a": torch.randn(24, 24) / 5})
            self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24))
            self.recurrent = nn.GRU(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(self.layer(x @ self.list[0] @ self.list[1] @ self.dict["a"]))[0]

    ends = []
    for make in (maker("cpu", machine=SLOW, lr=0.01), adamw):
        model = Lists()
        optimizer = make(model.parameters())
        if isinstance(optimizer, DOSAdam):
            optimizer.attach(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            clamp([model.layer.parametrizations.weight.original1, *model.list])
        parametrize.remove_parametrizations(model.layer, "weight")
        ends.append([p.detach().clone() for p in model.parameters()])
    assert_close_ulp(*ends, 512)
