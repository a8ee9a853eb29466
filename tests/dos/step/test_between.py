"""What users do between backward and step, and around it: layouts, reading, attaching anew, and interruptions there."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from perfmodel import Plan, Workload
from perfmodel.policies import cpu_only
from tests.support.interruptions import interrupted_everywhere
from tests.support.programs import REFUSED, Program, Training
from tests.support.training import FAST, backward, bits, mlp, profile, train

pytestmark = pytest.mark.usefixtures("one_core")


def test_gradients_asked_for_without_accumulation_do_not_stop_the_offloading() -> None:
    model = mlp(torch.bfloat16)
    optimizer = DOSAdam(model.parameters(), offload_gradients=True, device=EmulatedDevice(FAST, capacity=10**7))
    for _ in range(2):
        loss = model(torch.ones(2, 24, dtype=torch.bfloat16)).float().sum()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
    assert optimizer.grad_norm() > 0


def test_attaching_anew_interrupted_anywhere() -> None:
    """Nothing is left in flight that no hook waits for, and no module loses anything."""
    model, twin = mlp(), mlp()
    device = EmulatedDevice(profile(cpu_update_rate=1e5), capacity=10**7)
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=device)
    on_host = DOSAdam(twin.parameters())
    names = [set(vars(module)) for module in model.modules()]
    for number, call in enumerate(interrupted_everywhere(7)):
        step = 3 * number
        optimizer.attach(model)
        train(model, optimizer, 1, first_step=step)
        call(lambda: optimizer.attach(model))
        assert all(name <= set(vars(module)) for name, module in zip(names, model.modules(), strict=True))
        train(model, optimizer, 2, first_step=step + 1)
        optimizer.synchronize()
        train(twin, on_host, 3, first_step=step)
        assert bits(model.parameters()) == bits(twin.parameters())
    assert number > 6


@pytest.mark.parametrize(
    ("policy", "what"),
    [(0.0, "state_dict"), ("stride:1", "synchronize"), ("stride:1", "release_memory"), ("adaptive", "release_memory")],
)
def test_memory_is_accounted_for_after_interruptions(policy: str | float, what: str) -> None:
    training = Training(Program(policy))
    optimizer, device = training.optimizer, training.device
    for number, call in enumerate(interrupted_everywhere(23)):
        training.backward(2 * number)
        training.step()
        training.backward(2 * number + 1)
        call(getattr(optimizer, what))
        optimizer.step()
        optimizer.release_memory()
        assert device.usage().held == 0


@pytest.mark.parametrize("amsgrad", [False, True])
def test_loading_interrupted_loads_all_or_nothing_or_is_refused(amsgrad: bool) -> None:
    """amsgrad: whether it comes with what is loaded, for which memory is made anew."""
    saved: dict[str, object] = {}
    outcomes = set()
    for call in interrupted_everywhere(1):
        p = nn.Parameter(torch.ones(3))
        optimizer = DOSAdam([p], lr=0.01)
        p.grad = torch.ones(3)
        optimizer.step()
        if not saved:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0]["lr"] = 0.5
            saved["param_groups"][0]["amsgrad"] = amsgrad
            saved["state"][0] |= {"step": torch.tensor(77.0), "max_exp_avg_sq": torch.ones(3)}
        call(functools.partial(optimizer.load_state_dict, saved))
        lr = optimizer.param_groups[0]["lr"]
        try:
            step = float(optimizer.state[p]["step"])
        except RuntimeError as error:
            outcomes.add(str(error)[: len(REFUSED)])
            continue
        outcomes.add((step, lr))
        optimizer.step()
        assert float(optimizer.state[p]["step"]) == step + 1
    assert outcomes <= {REFUSED, (1.0, 0.01), (77.0, 0.5)}
    assert (77.0, 0.5) in outcomes


def test_interrupted_enrolment_leaves_nothing_twice() -> None:
    for call in interrupted_everywhere(23):
        model = mlp()
        enrolled: list[int] = []

        def policy(work: Workload, enrolled: list[int] = enrolled) -> Plan:
            enrolled.append(sum(load.numel for load in work.subgroups))
            return cpu_only(work)

        optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**7), policy=policy, subgroup_size=300)
        backward(model, 0)
        call(optimizer.step)
        try:
            optimizer.step()
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            continue
        assert enrolled[-1] == sum(p.numel() for p in model.parameters())
