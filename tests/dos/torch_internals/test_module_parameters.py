"""What `dos/torch_internals/module_parameters.py` assumes of modules: fails when torch changes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dos.torch_internals.module_parameters import (
    end_waiting,
    exchange,
    let_move,
    move_buffers,
    own_parameters,
    parameters_of,
    refuse_to_move,
    tensors_in,
    wait_before_reading,
)

CHANGED = "torch has changed how modules keep or move their parameters"


class Asked:
    """Counts how often it was asked to wait."""

    times = lists = 0

    def before_reading(self, parameters: Iterable[Any]) -> None:
        assert [p.shape[0] for p in parameters if p is not None]
        self.times += 1

    def before_reading_all(self, parameters: Iterable[Any]) -> None:
        self.lists += 1
        self.before_reading(parameters)


def test_lists_of_parameters_are_told_from_one() -> None:
    module, asked = nn.Linear(2, 2), Asked()
    wait_before_reading((module,), asked)
    saved = module.state_dict()
    for read in (module.state_dict, lambda: list(module.parameters()), lambda: module.load_state_dict(saved)):
        before = asked.lists
        read()
        assert asked.lists > before, CHANGED
    before = asked.lists
    assert module.weight is module.weight
    module(torch.ones(2))
    assert asked.lists == before


def test_all_ways_to_a_parameter_are_seen() -> None:
    module, asked = nn.Linear(2, 2), Asked()
    own = vars(module)["_parameters"]
    wait_before_reading((module,), asked)
    ways = (
        lambda: module.weight,
        lambda: list(module.parameters()),
        lambda: module.state_dict(),
        lambda: module.load_state_dict(module.state_dict()),
        lambda: copy.deepcopy(module),
        lambda: dict(module._parameters),
        lambda: {**module._parameters},
        lambda: module._parameters | {},
        lambda: module._parameters.copy(),
        lambda: module.register_parameter("other", nn.Parameter(torch.zeros(2))) or module.other,
        lambda: torch.func.functional_call(module, {"other": torch.ones(2)}, (torch.ones(2),)),
        lambda: module._parameters.pop("bias"),
    )
    for way in ways:
        asked.times = 0
        way()
        assert asked.times, CHANGED
    asked.times = 0
    assert [*own_parameters(module)] == ["weight", "other"]
    assert len(parameters_of(nn.Sequential(module, module))) == 2
    assert not asked.times
    assert type(vars(copy.deepcopy(module))["_parameters"]) is dict
    assert type(vars(pickle.loads(pickle.dumps(copy.deepcopy(module))))["_parameters"]) is dict
    end_waiting((module,), asked)
    asked.times = 0
    assert module.weight is own_parameters(module)["weight"]
    assert vars(module)["_parameters"] is own
    assert [*own] == ["weight", "other"], "what was written meanwhile is lost"
    assert not asked.times


def test_a_module_waits_until_its_last_watcher_has_ended() -> None:
    module, one, other = nn.Linear(2, 2), Asked(), Asked()
    for each in (one, other, one):
        wait_before_reading((module,), each)
    _ = module.weight
    end_waiting((module,), one)
    module.bias = nn.Parameter(torch.ones(2))
    _ = module.weight
    assert (one.times, other.times) == (1, 3), CHANGED  # registration reads the name, too
    end_waiting((module,), other)
    assert type(vars(module)["_parameters"]) is dict
    assert module.bias.sum() == 2


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.GRU(3, 3)])
def test_an_exchanged_parameter_is_the_one_that_the_module_uses(module: nn.Module) -> None:
    name = next(iter(own_parameters(module)))
    exchange(module, name, nn.Parameter(torch.full_like(own_parameters(module)[name], torch.nan)))
    found = module(torch.ones(2, 3))
    assert torch.isnan(found if isinstance(found, torch.Tensor) else found[0]).any(), CHANGED


def test_an_exchanged_weight_of_a_recurrent_layer_is_not_moved_by_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[nn.RNNBase]()  # on a GPU each gives the weights other memory
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    module = nn.LSTM(3, 3)
    assert calls == [module], CHANGED
    for name, parameter in own_parameters(module).items():
        exchange(module, name, nn.Parameter(parameter.detach().clone()))
    module(torch.ones(2, 3))
    assert calls == [module]
    module.weight_hh_l0 = nn.Parameter(torch.ones(12, 3))
    module(torch.ones(2, 3))
    assert calls == [module, module], CHANGED


def test_a_module_that_refuses_to_move_has_copies_that_move() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def refuse() -> None:
        raise RuntimeError("stays")

    refuse_to_move(model, refuse)
    for move in (model.half, model.cpu, lambda: model.to(torch.float64)):
        with pytest.raises(RuntimeError, match="stays"):
            move()
    assert all(p.dtype is torch.float32 for p in model.parameters()), CHANGED
    assert copy.deepcopy(model).half()[0].weight.dtype is torch.float16
    move_buffers(model, torch.device("meta"))
    assert all(b.is_meta for b in model.buffers())
    assert not any(p.is_meta for p in model.parameters())
    let_move(model)
    assert model.half()[0].weight.dtype is torch.float16


def test_tensors_in_nested_arguments() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    assert [len(t) for t in tensors_in(((one, 3), {"x": [other, None]}))] == [1, 2]
