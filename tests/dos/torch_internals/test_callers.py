"""What dos/torch_internals/callers.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dos.torch_internals.callers import (
    TrueForScaler,
    calling_scaler,
    loads_full_state,
    makes_state,
    runs_within_itself,
    unflattens_state,
)

CHANGED = "torch has changed what dos/torch_internals/callers.py relies on"


class Asking(torch.optim.AdamW):
    """seen: what it is called for."""

    _step_supports_amp_scaling = TrueForScaler()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: set[str] = set()
        self.infinite = False
        self.state = Entries(self)

    def step(self, closure: Any = None) -> Any:
        if makes_state():
            self.seen.add("makes state")
        if calling_scaler() is None:
            return super().step(closure)
        self.scaler_step()
        return None

    def scaler_step(self) -> None:
        found = calling_scaler()
        assert found is not None, CHANGED
        self.scaler = found.scaler
        assert self.grad_scale in (None, found.scaler.get_scale()), CHANGED
        assert self.found_inf == sum(found.found_inf.values()), CHANGED
        found.set_found_inf(self.infinite)

    def state_dict(self) -> Any:
        if loads_full_state():
            self.seen.add("loads full state")
        return super().state_dict()


class Entries(defaultdict[Tensor, Any]):
    def __init__(self, optimizer: Asking) -> None:
        super().__init__(dict)
        self.optimizer = optimizer

    def __getitem__(self, key: Tensor) -> Any:
        if unflattens_state():
            self.optimizer.seen.add("unflattens")
        return super().__getitem__(key)


@pytest.mark.parametrize("gradient", [0.0, float("inf"), None])
@pytest.mark.parametrize("infinite", [False, True])
def test_the_scaler_that_calls_takes_notice(gradient: float | None, infinite: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = None if gradient is None else torch.full((2,), gradient)
    optimizer, scaler = Asking([parameter]), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    optimizer.infinite = infinite
    if gradient is None:  # torch's own words for a step without any gradient
        scaler._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
    scaler.step(optimizer)
    assert optimizer.scaler is scaler, CHANGED
    scaler.update()
    assert scaler.get_scale() == (4.0 if infinite else 8.0), CHANGED
    assert calling_scaler() is None


def test_only_the_scaler_learns_that_a_step_unscales() -> None:
    """And user code can say otherwise, for one optimizer."""
    optimizer = Asking([nn.Parameter(torch.ones(2))])
    assert not optimizer._step_supports_amp_scaling
    optimizer._step_supports_amp_scaling = True  # type: ignore[assignment]
    assert optimizer._step_supports_amp_scaling


def test_a_scaler_that_passes_itself_warns_that_it_will_not() -> None:
    class Old(Asking):
        def step(self, closure: Any = None, grad_scaler: GradScaler | None = None) -> Any:
            assert grad_scaler is not None

    parameter = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(Old([parameter]))


@pytest.mark.parametrize(
    ("options", "last"),
    [
        (StateDictOptions(), None),
        (StateDictOptions(full_state_dict=True), "loads full state"),
        (StateDictOptions(flatten_optimizer_state_dict=True), "unflattens"),
    ],
)
def test_torch_distributed_checkpoint_is_known_by_its_functions(options: StateDictOptions, last: str | None) -> None:
    model = nn.Linear(2, 2)
    saved, loaded, mine = (Asking(model.parameters()) for _ in range(3))
    state = get_optimizer_state_dict(model, saved, options=options)
    assert saved.seen == {"makes state"}, CHANGED
    set_optimizer_state_dict(model, loaded, state, options=options)
    assert loaded.seen == {"makes state"} | ({last} if last else set()), CHANGED
    model(torch.ones(2)).sum().backward()
    mine.step()
    mine.state_dict()
    assert mine.seen == set()


def test_a_module_that_runs_within_itself_is_known() -> None:
    seen = []
    outer, inner = nn.Sequential(nn.Identity()), nn.Sequential()
    outer.register_forward_pre_hook(lambda module, _: seen.append(runs_within_itself(module)))
    inner.append(outer)
    outer(torch.ones(1))
    inner(torch.ones(1))

    def again(*_: Any) -> None:
        handle.remove()
        outer(torch.ones(1))

    handle = outer[0].register_forward_hook(again)
    outer(torch.ones(1))
    assert seen == [False, False, False, True], CHANGED
