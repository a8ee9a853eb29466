"""Gradients that live on the host: accumulation as in `p.grad`, clipping, what torch no longer sees.

That any micro-batches add up to the same bits, `test_stateful.py` compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_before
from torch.nn.utils import clip_grad_value_ as clip_value_imported_before

from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy
from dos.gradients import offload
from dos.step.transit import Transits
from perfmodel import Op
from tests.support.blocks import loss, net, start
from tests.support.inside import session_of
from tests.support.training import FAST, assert_close_ulp, backward, batch, bits, mlp, on, profile, train

pytestmark = pytest.mark.usefixtures("one_core")
BETAS = (0.0, 0.999)
"""With which exp_avg is the gradient itself."""


def offloading(model: nn.Module, policy: str | float = "stride:3", **settings: Any) -> DOSAdam:
    place = on(policy, 10**7, subgroup_size=150, offload_gradients=True)
    return DOSAdam(model.parameters(), **{**place, **settings})


def trained(model: nn.Module, optimizer: DOSAdam) -> list[bytes]:
    """The parameters and their averages after five steps."""
    for step in range(5):
        optimizer.zero_grad()
        backward(model, 10 * step, micro_batches=4)
        optimizer.step()
    optimizer.synchronize()
    return bits([*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())])


def without(dtype: torch.dtype) -> list[bytes]:
    """The same where autograd adds up."""
    model = mlp(dtype)
    return trained(model, DOSAdam(model.parameters(), betas=BETAS))


@pytest.mark.parametrize("policy", ["cpu", "resident"])
def test_what_user_code_puts_beside_gradients_that_are_away_is_used(policy: str) -> None:
    """Of some parameters, which share subgroups with others that have a gradient."""
    ends = []
    for offloads in (True, False):
        model = mlp()
        optimizer = offloading(model, policy) if offloads else DOSAdam(model.parameters())
        for step in range(3):
            parameters = list(model.parameters())
            for parameter in parameters:
                parameter.requires_grad_(parameter not in set(parameters[step % 2 :: 2]))
            backward(model, step)
            for parameter in parameters[step % 2 :: 2]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


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


@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf, "inf", 3.0])
def test_torch_clips_offloaded_gradients(norm_type: float | str) -> None:
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
                inputs = batch(10 * step + micro)
                torch.stack([net(inputs).square().mean() for net in nets]).sum().backward()
            clip = (nn.utils.clip_grad_norm_, clip_imported_before)[step % 2]
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


def gradients_of(optimizer: DOSAdam) -> list[torch.Tensor]:
    """Copies of the gradients that the next step would use."""
    found = []

    def keep(_: object, gradient: torch.Tensor) -> torch.Tensor:
        found.append(gradient.clone())
        return gradient

    optimizer.edit_gradients(keep)
    return found


@pytest.mark.parametrize("weights", [None, 0])
def test_what_is_clipped_before_another_micro_batch_is_added_stays_clipped(weights: int | None) -> None:
    model = net(torch.float32)
    optimizer = start(model, weights)
    loss(model, 1).backward()
    second = gradients_of(optimizer)
    optimizer.zero_grad()
    loss(model, 0).backward()
    first = gradients_of(optimizer)
    factor = 0.01 / (nn.utils.clip_grad_norm_(model.parameters(), 0.01) + 1e-6)
    loss(model, 1).backward()
    assert bits(gradients_of(optimizer)) == bits([a * factor + b for a, b in zip(first, second, strict=True)])


def test_torch_clipping_of_what_is_not_finite() -> None:
    ends = []
    for make in (offloading, lambda model: torch.optim.AdamW(model.parameters())):
        model = mlp()
        optimizer = make(model)
        (model(torch.ones(2, 24)).sum() * math.nan).backward()
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 for gradients .* non-finite|is nan, so"):
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


def test_another_optimizer_that_takes_gradients_away_is_named() -> None:
    model = mlp()
    first = offloading(model)
    second = offloading(model)
    train(model, second, 1)
    backward(model, 1)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="another optimizer, built later with offload_gradients=True, takes away"):
        first.step()
    assert bits(model.parameters()) == before
    second.step()
    assert bits(model.parameters()) != before


def test_gradients_are_taken_away_again_once_another_optimizer_is_gone() -> None:
    model = mlp()
    optimizer = offloading(model, betas=BETAS)
    offloading(model)
    assert trained(model, optimizer) == without(torch.float32)
    offloading(model)  # after steps, too
    train(model, optimizer, 1)
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_built_later_that_leaves_gradients_gets_its_own() -> None:
    """As an actor and a critic with a common trunk: each has its backward before its step."""
    found = []
    for make in (offloading, lambda model: DOSAdam(model.parameters())):
        model = mlp()
        optimizers = make(model), DOSAdam(model.parameters(), lr=1e-2)
        for number in range(6):
            optimizers[number % 2].zero_grad()
            backward(model, number)
            optimizers[number % 2].step()
        found.append(bits(model.parameters()))
    assert found[0] == found[1]


@pytest.mark.parametrize("weights", [None, 0, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [DOSAdam, torch.optim.AdamW])
def test_weights_that_user_code_moves_to_another_optimizer_train_on(
    kind: type[torch.optim.Optimizer], first: bool, weights: int | None
) -> None:
    """A weight that streams gives its gradients to a copy, which only the first optimizer knows."""
    found = []
    for offloads in (True, False):
        model = net(torch.float32)
        optimizer = start(model, weights) if offloads else DOSAdam(model.parameters(), lr=1e-2)
        optimizers: list[Any] = [optimizer]
        for step in range(6):
            if step == 2:
                optimizer.synchronize()
                group, block = optimizer.param_groups[0], model.blocks[1]
                moved = [block.out.bias, *model.blocks[2].parameters()]
                group["params"] = [p for p in group["params"] if all(p is not each for each in moved)]
                optimizers.insert(0 if first else 1, kind(moved, lr=1e-2))
            for micro in range(2):
                loss(model, 2 * step + micro).backward()
            for each in optimizers:
                each.step()
                optimizer.synchronize()  # parameters of the other one are read without their module
            for each in optimizers:
                each.zero_grad()
        found.append(bits(model.parameters()))
    assert found[0] == found[1]


class Wide(torch.autograd.Function):
    """The identity, with gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float() / 3


@pytest.mark.parametrize("state_format", ["float32", "int8"])
@pytest.mark.parametrize("wide", [(), (0,), (2,), (0, 1, 2)], ids=str)
def test_gradients_of_another_dtype_add_up_as_in_grad(state_format: str, wide: tuple[int, ...]) -> None:
    """wide: micro-batches in which the bias has gradients in float32; so those of the weight are staged in it, too."""
    if wide and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch takes no gradient of another dtype")
    model = nn.Linear(128, 64).bfloat16()
    twin = nn.Linear(128, 64).bfloat16()
    twin.load_state_dict(model.state_dict())
    for m, optimizer in (
        (model, offloading(model, betas=BETAS, state_format=state_format)),
        (twin, DOSAdam(twin.parameters(), betas=BETAS, state_format=state_format)),
    ):
        if wide:
            m.bias.grad_dtype = None
        for micro_batch in range(6):
            inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(micro_batch)).bfloat16()
            bias = Wide.apply(m.bias) if micro_batch % 3 in wide else m.bias
            nn.functional.linear(inputs, m.weight, bias).float().square().mean().backward()
            if micro_batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_gradients_come_in_parts_through_few_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is used again when nothing reads from it any more, over a link on which all wait."""
    monkeypatch.setattr(offload, "PASSAGE_BYTES", 64)
    monkeypatch.setattr(offload, "PASSAGES", 3)
    link = EmulatedDevice(profile(d2h_bandwidth=1e6, d2h_bandwidth_duplex=1e6), capacity=10**7)
    model = mlp(torch.bfloat16)
    optimizer = offloading(model, betas=BETAS, device=link)
    assert trained(model, optimizer) == without(torch.bfloat16)
    assert len(session_of(optimizer).registry.offloaded._passages) == 3


def test_passages_take_little_of_the_host_memory_that_is_allowed() -> None:
    model = mlp(torch.bfloat16, width=3000)
    limit = 18 * sum(p.numel() for p in model.parameters())
    optimizer = offloading(model, "cpu", host_memory=limit)
    for step in range(3):
        backward(model, step, micro_batches=2)
        optimizer.step()
    assert limit / 2 < optimizer.metrics()["host_held_bytes"] <= 1.1 * limit


@pytest.mark.parametrize("part", [0, 2])
def test_a_part_that_does_not_come_is_said(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is; after zero_grad training goes on."""
    monkeypatch.setattr(offload, "PASSAGE_BYTES", 64)
    model = mlp(torch.bfloat16)
    optimizer = offloading(model, betas=BETAS)
    backward(model, 0)
    send, sent = Transits.send, itertools.count()

    class Broken:
        def wait(self) -> None:
            raise OSError("the link broke")

    def fail(self: Transits, index: int, subgroup: Any, copies: Sequence[Copy], **more: Any) -> Any:
        found = send(self, index, subgroup, copies, **more)
        found.job.wait()
        return dataclasses.replace(found, job=Broken()) if next(sent) == part else found

    with monkeypatch.context() as patch:
        patch.setattr(Transits, "send", fail)
        backward(model, 1)
    with pytest.raises(RuntimeError, match="are not complete"):
        optimizer.step()
    optimizer.zero_grad()
    assert trained(model, optimizer)


def test_gradients_asked_for_without_accumulation_do_not_stop_the_offloading() -> None:
    model = mlp(torch.bfloat16)
    optimizer = DOSAdam(model.parameters(), offload_gradients=True, device=EmulatedDevice(FAST, capacity=10**7))
    for _ in range(2):
        loss = model(torch.ones(2, 24, dtype=torch.bfloat16)).float().sum()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
    assert optimizer.grad_norm() > 0
