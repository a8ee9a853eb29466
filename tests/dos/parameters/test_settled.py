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
from dos.step.iteration import Iteration
from perfmodel import Placement, Plan, Workload
from tests.support.inside import plan_anew
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
