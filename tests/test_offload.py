"""Gradients that live on the host: accumulation in float32, clipping, and what torch can no longer see."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import FAST, assert_close_ulp, bits, mlp, train
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_before

from dos import DOSAdam, EmulatedDevice

pytestmark = pytest.mark.usefixtures("one_core")

POLICIES = ["adaptive", "cpu", "stride:1", "stride:3", 0.5, 0.0]


def offloading(model: nn.Module, **settings: object) -> DOSAdam:
    device = EmulatedDevice(FAST, capacity=10**7)
    defaults = {"policy": "stride:3", "subgroup_size": 150, "device": device, "offload_gradients": True}
    return DOSAdam(model.parameters(), **{**defaults, **settings})


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 4) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + micro)).to(dtype)
            model(inputs).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("attach", [False, True])
def test_same_bits_as_without_offloading(policy: str | float, micro_batches: int, attach: bool) -> None:
    """In float32 the host adds what autograd would have added, in the same order."""
    model, twin = mlp(), mlp()
    optimizer = offloading(model, policy=policy)
    if attach:
        optimizer.attach(model)
    accumulate(model, optimizer, micro_batches)
    accumulate(twin, DOSAdam(twin.parameters()), micro_batches)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_add_up_in_float32_whatever_the_plan(dtype: torch.dtype) -> None:
    ends = []
    for policy, attach in itertools.product(POLICIES, (False, True)):
        model = mlp(dtype)
        optimizer = offloading(model, policy=policy)
        if attach:
            optimizer.attach(model)
        accumulate(model, optimizer)
        optimizer.synchronize()
        ends.append(bits(model.parameters()))
    assert all(end == ends[0] for end in ends)

    # The same sums made by hand, from the first micro-batch of the first iteration on.
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = offloading(model)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in twin.parameters()]
    for micro in range(4):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(micro)).to(dtype)
        for m in (model, twin):
            m(inputs).float().square().mean().backward()
        for total, p in zip(sums, twin.parameters(), strict=True):
            total += p.grad.float()
            p.grad = None
    expected = torch.sqrt(sum(s.double().square().sum() for s in sums))
    torch.testing.assert_close(optimizer.grad_norm().double(), expected, rtol=1e-6, atol=0)
    for record in optimizer._registry.offloaded._totals:
        index = next(i for i, p in enumerate(model.parameters()) if p is record.parameter)
        assert torch.equal(optimizer._registry.offloaded.flat(record), sums[index].view(-1))


def test_gradients_are_gone_from_the_parameters_and_used_up_by_the_step() -> None:
    model = mlp()
    optimizer = offloading(model)
    model(torch.ones(2, 24)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.grad_norm() > 0
    optimizer.step()
    assert optimizer.grad_norm() == 0
    model(torch.ones(2, 24)).sum().backward()
    optimizer.zero_grad()
    assert optimizer.grad_norm() == 0


def test_a_skipped_step_leaves_nothing_behind() -> None:
    model, twin = mlp(), mlp()
    pairs = ((model, offloading(model)), (twin, DOSAdam(twin.parameters())))
    for m, optimizer in pairs:
        for step in range(6):
            optimizer.zero_grad()
            (m(torch.full((2, 24), 1.0 + step)).sum() * (torch.nan if step == 3 else 1.0)).backward()
            if step != 3:
                optimizer.step()
    assert bits(model.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("how", ["method", "setting"])
def test_clipping_agrees_with_torch(how: str) -> None:
    reference, model = mlp(), mlp()
    optimizer = offloading(model, max_grad_norm=0.05 if how == "setting" else None)
    norms = []

    def clip(step: int) -> None:
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.05))

    def ours(step: int) -> None:
        norms.append(optimizer.grad_norm() if how == "setting" else optimizer.clip_grad_norm_(0.05))

    train(reference, torch.optim.AdamW(reference.parameters()), 5, before_step=clip)
    train(model, optimizer, 5, before_step=ours)
    torch.testing.assert_close(torch.stack(norms[5:]), torch.stack(norms[:5]), rtol=1e-5, atol=1e-7)
    assert_close_ulp(model.parameters(), reference.parameters(), ulps=256)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, clip_imported_before], ids=["now", "imported before"])
def test_torch_clipping_is_explained_and_works_elsewhere(clip) -> None:
    other = nn.Linear(3, 3)
    model = mlp()
    optimizer = offloading(model)
    model(torch.ones(2, 24)).sum().backward()
    with pytest.raises(RuntimeError, match=r"clip with optimizer\.clip_grad_norm_\(max_norm\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    other(torch.ones(1, 3)).sum().backward()
    assert clip(other.parameters(), 0.1) > 0.1
    assert nn.utils.get_total_norm([p.grad for p in other.parameters()]) < 0.11
    optimizer.step()
    clip(model.parameters(), 1.0)  # no gradient is hidden now


def test_grad_scaler_is_refused_with_a_reason() -> None:
    model = mlp()
    optimizer = offloading(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 24)).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler cannot check gradients that DOSAdam"):
        scaler.step(optimizer)


def test_gradients_set_by_hand_count_as_one_more_micro_batch() -> None:
    model, twin = mlp(), mlp()

    def add(m: nn.Module) -> None:
        for p in m.parameters():
            extra = torch.full_like(p, 0.5)
            p.grad = extra if p.grad is None else p.grad + extra

    train(model, offloading(model), 4, before_step=lambda _: add(model))
    train(twin, DOSAdam(twin.parameters()), 4, before_step=lambda _: add(twin))
    assert bits(model.parameters()) == bits(twin.parameters())


def test_device_memory_without_room_for_gradients_falls_back_to_the_host() -> None:
    model, twin = mlp(), mlp()
    optimizer = offloading(model, policy=0.0, device=EmulatedDevice(FAST, capacity=6000))
    accumulate(model, optimizer)
    accumulate(twin, DOSAdam(twin.parameters()))
    assert bits(model.parameters()) == bits(twin.parameters())


def test_another_optimizer_that_takes_gradients_away_is_named() -> None:
    model = mlp()
    first = offloading(model)
    second = offloading(model)
    before = bits(model.parameters())
    train(model, second, 1)
    model(torch.randn(8, 24)).square().mean().backward()
    changed = bits(model.parameters())
    assert changed != before
    with pytest.raises(RuntimeError, match="another optimizer, built later with offload_gradients=True, takes away"):
        first.step()
    assert bits(model.parameters()) == changed
    second.step()
    assert bits(model.parameters()) != changed


def test_gradients_are_taken_away_again_once_another_optimizer_is_gone() -> None:
    model, twin = mlp(), mlp()
    optimizer = offloading(model)
    other = offloading(model)
    del other
    accumulate(model, optimizer)
    accumulate(twin, DOSAdam(twin.parameters()))
    assert bits(model.parameters()) == bits(twin.parameters())
    model(torch.randn(8, 24)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_built_later_that_leaves_gradients_gets_its_own() -> None:
    """As an actor and a critic with a common trunk: each has its backward before its step."""
    model, twin = mlp(), mlp()
    found = []
    for net, first in ((model, offloading(model)), (twin, DOSAdam(twin.parameters()))):
        second = DOSAdam(net.parameters(), lr=1e-2)
        for number in range(6):
            optimizer = (first, second)[number % 2]
            optimizer.zero_grad()
            net(torch.randn(8, 24, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            optimizer.step()
        found.append(bits(net.parameters()))
    assert found[0] == found[1]
