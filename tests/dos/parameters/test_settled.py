"""What a step remembers of parameters, gradients and state, and what makes it look again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.gradients.identity import Token
from dos.state.record import ParameterRecord
from dos.step.iteration import Iteration
from perfmodel import Placement, Plan, Workload
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import all_in
from tests.support.training import Make, assert_as_adamw, maker

pytestmark = pytest.mark.usefixtures("one_core")

PLACES = ["host", "cpu", "stride:1", 0.0, "resident"]


def made(place: Any, parameters: Any, **settings: Any) -> DOSAdam:
    return maker(place, lr=0.1, **{"subgroup_size": None, **settings})(parameters)


def weights(numel: int = 40) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(numel)) for _ in range(3)]


def as_adamw(place: Any, work: Callable[[list[nn.Parameter], Any], None], numel: int = 40) -> None:
    """The same with DOSAdam and AdamW; their parameters agree in the end."""

    def run(make: Make) -> list[nn.Parameter]:
        parameters = weights(numel)
        work(parameters, make(parameters))
        return parameters

    assert_as_adamw(run, place, subgroup_size=None)


def step(optimizer: Any, *parameters: Tensor) -> None:
    optimizer.zero_grad()
    for p in parameters:
        p.grad = torch.sin(torch.arange(p.numel(), dtype=torch.float32)).view(p.shape)
    optimizer.step()


def test_memory_that_was_another_for_a_failed_step_only() -> None:
    def policy(workload: Workload) -> Plan:
        if fails:
            raise ValueError("not now")
        return all_in(Placement.GPU_RESIDENT, workload)

    fails = True
    p, q = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    optimizer, reference = made(policy, [p]), torch.optim.AdamW([q], lr=0.1)
    with pytest.raises(ValueError, match="not now"):
        step(optimizer, p)
    assert not optimizer.state, "the first step was none"
    fails = False
    step(optimizer, p)
    before, fails = p.data, True
    p.data = before.clone()
    plan_anew(optimizer)
    with pytest.raises(ValueError, match="not now"):
        step(optimizer, p)
    p.data, fails = before, False
    step(optimizer, p)
    for _ in range(2):
        step(reference, q)
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_memory_at_the_address_of_that_which_it_replaces(place: str | float, stride: int) -> None:
    def work(ps: list[nn.Parameter], optimizer: Any) -> None:
        memory = np.linspace(0, 1, 60 * stride, dtype=np.float32)
        unused = sys.getrefcount(memory)
        ps[0].data = torch.from_numpy(memory)[::stride]
        step(optimizer, *ps)
        ps[0].data = torch.empty(0)
        if sys.getrefcount(memory) > unused:  # an allocator gives out again only what has no owner any more
            memory = memory.copy()
        ps[0].data = torch.from_numpy(memory)[::stride].copy_(torch.linspace(-1, 1, 60))
        step(optimizer, *ps)

    as_adamw(place, work)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch takes no gradient of another dtype")
def test_staged_gradients_outlive_a_wider_staging() -> None:
    numel = 1 << 16
    found = []
    for widened in (False, True):
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(3)]
        optimizer = made("cpu", ps, offload_gradients=True, subgroup_size=numel)
        for last in (False, True):
            sum((p.float() * p.float()).sum() for p in ps[: 2 if last else 3]).backward()
            if last:
                if widened:
                    ps[2].grad_dtype = None
                ps[2].grad = torch.ones(numel, dtype=torch.float32 if widened else torch.bfloat16)
            optimizer.step()
            gc.collect()
        found.append([p.detach().clone() for p in ps])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch takes no gradient of another dtype")
def test_a_wider_staging_has_memory_on_the_host() -> None:
    p = nn.Parameter(torch.ones(1 << 16).bfloat16())
    p.grad_dtype = None
    optimizer = made("cpu", [p], subgroup_size=1 << 16)
    for dtype in (torch.bfloat16, torch.float32):
        p.grad = torch.ones(1 << 16, dtype=dtype)
        optimizer.step()
    registry = session_of(optimizer).registry
    (subgroup,) = registry.accelerated
    assert registry.host_store.stages(subgroup)


def test_skipped_steps_leave_nothing_behind() -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = made("cpu", [p])
    step(optimizer, p)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, Iteration) for o in gc.get_objects())

    before = alive()
    for _ in range(50):
        p.grad = torch.ones(10)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(1.0)
        optimizer.step()
    assert alive() <= before + 5


def write(ps: list[nn.Parameter], _: Any) -> None:
    with torch.no_grad():
        ps[0].mul_(2)


def other_memory(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].data = ps[0].data.clone()


def negate(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].data = torch._neg_view(ps[0].data)


def no_gradient(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].grad = None


def transposed_gradient(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].grad.data = ps[0].grad.data.t()


def negated_gradient(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].grad.data = torch._neg_view(ps[0].grad.data)


def gradient_without_memory(ps: list[nn.Parameter], _: Any) -> None:
    ps[0].grad = torch._efficientzerotensor(*ps[0].shape)


def gradient_of_another(ps: list[nn.Parameter], _: Any) -> None:
    ps[-1].grad = torch.ones_like(ps[-1])


def leave(_: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][0]


def exchange(_: list[nn.Parameter], optimizer: Any) -> None:
    parameters = optimizer.param_groups[0]["params"]
    parameters[0], parameters[1] = parameters[1], parameters[0]


def other_group(_: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.2}


def add_group(ps: list[nn.Parameter], optimizer: Any) -> None:
    added = nn.Parameter(ps[0].detach() * 3)
    added.grad = ps[0].grad.clone()
    optimizer.add_param_group({"params": [added]})
    ps.append(added)


def edit_state(ps: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[ps[0]]["exp_avg"] = torch.ones_like(ps[0])


def edit_step(ps: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[ps[0]]["step"].fill_(50)


def set_lr(_: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.03


CHANGES = [write, other_memory, negate, no_gradient, transposed_gradient, negated_gradient]
CHANGES += [gradient_without_memory, gradient_of_another, leave, exchange, other_group, add_group, edit_state]
CHANGES += [edit_step, set_lr]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_a_look_at_all_at_once_must_notice(change: Callable[[list[nn.Parameter], Any], None]) -> None:
    """Before the first step that looks so, and the second one."""

    def run(make: Make) -> list[nn.Parameter]:
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(6, 6)) for _ in range(3)]
        optimizer = make(ps)
        for number in range(7):
            optimizer.zero_grad()
            sum((p * torch.sin(p)).sum() for p in (ps if len(ps) == 4 else ps[:2])).backward()
            if number in (3, 5):
                change(ps, optimizer)
            optimizer.step()
        return ps

    assert_as_adamw(run, "cpu", subgroup_size=None)


def test_a_gradient_that_left_in_another_form_than_the_one_that_it_has_again() -> None:
    """Of the same object, memory and version."""

    def run(make: Make) -> list[nn.Parameter]:
        torch.manual_seed(0)
        p, turns = nn.Parameter(torch.randn(6, 6)), False

        def turn(p: Tensor) -> None:
            if turns:
                p.grad.data = p.grad.data.t()

        p.register_post_accumulate_grad_hook(turn)  # comes before the optimizer's
        optimizer = make([p])
        for number in range(6):
            optimizer.zero_grad()
            turns = number == 4
            (p * torch.sin(p)).sum().backward()
            turn(p)
            optimizer.step()
        return [p]

    assert_as_adamw(run, "cpu", subgroup_size=None)


def test_a_steady_step_asks_no_parameter_and_no_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def spied(owner: type, name: str) -> None:
        each = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: asked.append(name) or each(*given))

    spied(ParameterRecord, "settled")
    spied(Token, "unchanged")
    spied(Token, "holds")
    ps = weights()
    optimizer = made("cpu", ps)
    for number in range(5):
        optimizer.zero_grad()
        sum(p.square().sum() for p in ps).backward()
        asked.clear()
        optimizer.step()
        assert bool(asked) == (number in (1, 2)), number


def transpose(ps: list[nn.Parameter], _: Any) -> None:
    ps[1].data = ps[1].data.t()
    ps[1].grad = torch.ones_like(ps[1])


def make_sparse(ps: list[nn.Parameter], _: Any) -> None:
    ps[1].grad = ps[1].grad.to_sparse()


def ask_for_amsgrad(_: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


@pytest.mark.parametrize(
    ("spoil", "said"), [(transpose, "its axes in the order"), (make_sparse, "sparse"), (ask_for_amsgrad, "amsgrad")]
)
def test_what_a_look_at_all_at_once_must_refuse(spoil: Callable[[list[nn.Parameter], Any], None], said: str) -> None:
    ps = [nn.Parameter(torch.randn(6, 6)) for _ in range(3)]
    optimizer = made("cpu", ps)
    for _ in range(4):
        step(optimizer, *ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in ps[::2]]
    spoil(ps, optimizer)
    with pytest.raises((RuntimeError, ValueError), match=said):
        optimizer.step()
    assert all(map(torch.equal, before, ps[::2]))
