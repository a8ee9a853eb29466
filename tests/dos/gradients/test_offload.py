"""Gradients that live on the host: accumulation in float32, clipping, and what torch can no longer see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_before
from torch.nn.utils import clip_grad_value_ as clip_value_imported_before

from dos import DOSAdam, EmulatedDevice
from perfmodel import Op
from tests.support.training import FAST, assert_close_ulp, bits, mlp, train

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
def test_low_precision_gradients_add_up_in_float32(dtype: torch.dtype) -> None:
    """From the first micro-batch of the first iteration on, to the bit what is added up by hand."""
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = offloading(model, betas=(0.0, 0.999))
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
    optimizer.step()
    found = [optimizer.state[p]["exp_avg"] for p in model.parameters()]  # the gradient itself, with these betas
    assert all(torch.equal(gradient, total) for gradient, total in zip(found, sums, strict=True))


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


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, clip_imported_before], ids=["now", "imported before"])
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf, "inf", 3.0])
def test_torch_clips_offloaded_gradients(clip, norm_type: float | str) -> None:
    """Together with gradients that are not: of another optimizer of ours, of AdamW's, and of a layer of this one."""
    found = {}
    for ours in (True, False):
        nets = [mlp() for _ in range(4)]
        builders = [offloading, offloading, lambda net: DOSAdam(net.parameters())] if ours else []
        optimizers = [build(net) for build, net in zip(builders, nets, strict=False)]
        optimizers += [torch.optim.AdamW(net.parameters()) for net in nets[len(optimizers) :]]
        parameters = [p for net in nets for p in net.parameters()]
        norms = []
        for step in range(4):
            for micro in range(2):
                inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + micro))
                torch.stack([net(inputs).square().mean() for net in nets]).sum().backward()
            norms.append(clip(iter(parameters), 0.05, norm_type, error_if_nonfinite=True, foreach=None))
            assert clip(parameters, 10.0, norm_type=norm_type) < 0.051, "the norm of what was clipped"
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[ours] = torch.stack(norms), parameters, optimizers[0]
    sent = [span.start < 0 for span in found[True][2].timeline().spans if span.op is Op.GRADIENT]
    assert any(sent), "gradients still leave during backward"
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-5, atol=0)
    assert_close_ulp(found[True][1], found[False][1], ulps=512)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_torch_clipping_of_what_is_not_finite(value: float) -> None:
    ends = []
    for ours in (True, False):
        model = mlp()
        optimizer = offloading(model) if ours else torch.optim.AdamW(model.parameters())
        (model(torch.ones(2, 24)).sum() * value).backward()
        with pytest.raises(
            RuntimeError, match=r"total norm of order 2\.0 for gradients .* non-finite|is (nan|inf), so"
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        optimizer.step()
        ends.append([p.isnan() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_torch_clipping_that_does_not_see_offloaded_gradients_is_refused() -> None:
    model, other = mlp(), nn.Linear(3, 3)
    optimizer = offloading(model)
    model(torch.ones(2, 24)).sum().backward()
    other(torch.ones(1, 3)).sum().backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    both = [*model.parameters(), *other.parameters()]
    before = other.weight.grad.clone()
    with pytest.raises(
        RuntimeError, match=r"clip_grads_with_norm_ cannot .* norm with torch\.nn\.utils\.clip_grad_norm_"
    ):
        nn.utils.clip_grads_with_norm_(both, 0.1, norm)
    for clip in (nn.utils.clip_grad_value_, clip_value_imported_before):
        with pytest.raises(RuntimeError, match=r"clip_grad_value_ cannot clip gradients that DOSAdam"):
            clip(both, 0.1)
    assert torch.equal(before, other.weight.grad)
    nn.utils.clip_grad_value_(other.parameters(), 0.1)
    nn.utils.clip_grads_with_norm_(other.parameters(), 0.1, nn.utils.get_total_norm([other.weight.grad]))
    optimizer.step()
    nn.utils.clip_grad_value_(both, 1.0)  # no gradient is hidden now
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)


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
