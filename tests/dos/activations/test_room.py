"""What leaves, the memory that it gives back on the device, and the memory that it takes on the host."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dos.activations.offload as offload_module
from dos import DOSAdam, EmulatedDevice
from perfmodel import Op
from tests.support.activations import (
    BATCH,
    EACH,
    LAYERS,
    WIDTH,
    Layers,
    Net,
    optimizer_of,
    saved,
    saves,
    start,
    transfers,
)
from tests.support.clock import eventually
from tests.support.devices import synchronize_devices
from tests.support.inside import offload_of, session_of
from tests.support.training import FAST, Raises, everything


def forward(model: nn.Module, batch: int = BATCH) -> Tensor:
    return model(torch.randn(batch, WIDTH)).square().mean()


@pytest.mark.parametrize(
    ("share", "layers", "batch"),
    [(1.0, LAYERS + 1, 2 * BATCH), (0.5, 9, BATCH // 2), (0.25, 5, BATCH), (0.0, 0, BATCH)],
)
def test_a_share_is_a_prefix_of_what_is_saved_whatever_the_length_of_the_batch(
    share: float, layers: int, batch: int
) -> None:
    model, optimizer, offload = start(share)
    forward(model).backward()
    optimizer.step()
    offload.pool.resize(2 * offload.pool.nbytes)
    saves(optimizer)
    forward(model, batch)
    assert saves(optimizer) == layers * [4 * WIDTH * batch]  # the batch, and what each layer gives


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_memory_comes_back_with_the_graph(share: float) -> None:
    device = EmulatedDevice(FAST, 10**9)
    model, _optimizer, offload = start(share, device=device)
    loss = forward(model)
    assert device.usage().occupied > 0
    assert (offload.pool.used > 0) == (share > 0)
    del loss
    assert_empty(device, offload)


def assert_empty(device: EmulatedDevice, offload: Any) -> None:
    assert eventually(lambda: device.usage() == (0, 0, 0)), "once the last copy has ended"
    assert offload.pool.used == 0


def test_an_exception_in_backward_keeps_no_memory() -> None:
    device = EmulatedDevice(FAST, 10**9)
    model, optimizer, offload = start(1.0, device=device)
    model.layers[3].register_forward_hook(lambda module, inputs, output: Raises.apply(output))
    loss = forward(model)
    with pytest.raises(ArithmeticError, match="in backward"):
        loss.backward()
    del loss
    optimizer.zero_grad()
    gc.collect()  # the exception's frames
    assert_empty(device, offload)


def test_the_pool_grows_and_shrinks_to_what_is_wanted_and_the_rest_stays_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, offload = start(1.0)
    assert offload.pool.nbytes >= (LAYERS + 1) * EACH  # of nothing is known how much it is
    offload.pool.resize(3 * EACH)
    loss = forward(model)
    assert saves(optimizer) == 3 * [EACH]
    loss.backward()
    optimizer.step()
    wanted = offload.pool.nbytes
    assert (LAYERS + 1) * EACH <= wanted < 1.25 * (LAYERS + 1) * EACH
    forward(model)
    assert saves(optimizer) == (LAYERS + 1) * [EACH]
    offload.pool.resize(3 * EACH)
    monkeypatch.setattr(
        offload_module, "available_bytes", lambda: 4 * EACH + session_of(optimizer).registry.bytes_to_come
    )
    optimizer.step()
    assert offload.pool.nbytes <= 7 * EACH  # what the host has left, and what it had


def test_micro_batches_want_no_more_than_one_of_them() -> None:
    model, optimizer, offload = start(1.0)
    offload.pool.resize(3 * EACH)
    for _ in range(8):
        forward(model).backward()
    optimizer.step()
    assert offload.pool.nbytes < 1.25 * (LAYERS + 1) * EACH


def test_plans_count_the_micro_batches_in_each_of_which_saved_tensors_move() -> None:
    model, optimizer, _ = start(1.0)
    for _ in range(3):
        forward(model).backward()
    optimizer.step()
    assert session_of(optimizer).assembly.on_device.facts().workload.micro_batches == 3


@pytest.mark.parametrize("amount", [0.25, 4 * EACH + 1])
def test_no_more_is_pinned_than_was_chosen_to_leave(amount: float) -> None:
    model, optimizer, offload = start(amount)
    for step in range(4):
        forward(model).backward()
        optimizer.step()
        if step == 2:
            optimizer.release_memory()
    assert offload.pool.nbytes < 6 * EACH


def test_with_no_memory_left_on_the_host_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "available_bytes", lambda: 0)
    model, optimizer, offload = start(1.0)
    forward(model).backward()
    optimizer.step()
    assert offload.pool.nbytes == 0
    assert saves(optimizer) == []


def test_only_a_part_is_on_its_way_or_back_at_a_time() -> None:
    device = EmulatedDevice(FAST, 10**9)
    model, _optimizer, _ = start(1.0, device=device)
    most = 0

    def looked(*_: Any) -> None:
        nonlocal most
        most = max(most, device.usage().occupied + device.usage().held)

    for layer in model.layers:
        layer.register_forward_hook(looked)
        layer.register_full_backward_hook(looked)
    forward(model).backward()
    gradients = sum(p.nbytes for p in model.parameters())
    assert most < 7 * EACH + gradients


def test_parameters_on_the_host_have_nothing_to_leave_from() -> None:
    model = Layers()
    optimizer = DOSAdam(model.parameters())
    optimizer.attach(model, activations=1.0)
    with optimizer.offload_activations(0.5):
        loss = forward(model)
    loss.backward()
    optimizer.step()
    assert optimizer.plan() is None


@pytest.mark.parametrize(
    ("error", "message", "amounts"),
    [
        (TypeError, "bytes as an int, 'auto' or None, found", (True, "all", [0.5])),
        (ValueError, "or bytes as an int, found", (-1, 1.5, float("nan"), -0.5)),
    ],
)
def test_amounts_that_cannot_be(error: type[Exception], message: str, amounts: Sequence[Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = DOSAdam(model.parameters())
    for amount in amounts:
        for use in (optimizer.offload_activations, lambda amount: optimizer.attach(model, activations=amount)):
            with pytest.raises(error, match=f"activations must be a share from 0 to 1, {message}"):
                use(amount)
    with pytest.raises(TypeError, match="found None"):
        optimizer.offload_activations(None)


@pytest.mark.parametrize(("activations", "left"), [(0.0, 0), (1.0, LAYERS + 1), (3 * EACH + 1, 3)])
def test_what_was_chosen_to_leave_is_said(activations: float, left: int) -> None:
    model, optimizer, offload = start(activations)
    for _ in range(2):
        forward(model).backward()
        optimizer.step()
    optimizer.synchronize()
    found = optimizer.metrics()
    assert found["activation_bytes"] == left * EACH
    assert found["activation_share"] == pytest.approx(left / (LAYERS + 1))
    assert found["activation_host_bytes"] == offload.pool.nbytes >= left * EACH
    said = f"{left * EACH / 2**20:.2f} MiB" if left > 1 else "0.00 KiB"
    assert f"Saved tensors: {said} of 1.06 MiB moved to the host in forward" in optimizer.explain()


class Widened(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.cat([super().forward(x)] * 4))


@pytest.mark.parametrize(("model", "left"), [(Layers, 5 * EACH), (Widened, (LAYERS + 1) * EACH)])
def test_what_leaves_last_has_left_when_forward_ends(model: type[nn.Module], left: int) -> None:
    """And what stays takes the memory of as many bytes that have left."""

    def held(activations: float) -> int:
        device = EmulatedDevice(FAST, 10**9, occupied=10**6)
        made, _optimizer, _ = start(activations, model=model(), device=device)
        loss = made(torch.randn(BATCH, WIDTH)).square().mean()
        assert loss.requires_grad, "its graph is there"
        synchronize_devices()  # a copy that has just ended may still refer to memory that was released
        return device.usage().occupied

    assert held(0) - held(left + 100) == left


@pytest.mark.parametrize("weights", [None, 0, "auto"])
def test_under_auto_tensors_leave_before_there_is_a_plan_where_memory_runs_short(weights: Any) -> None:
    def train(room: int) -> tuple[int, list[bytes]]:
        torch.default_generator.manual_seed(0)
        model = Layers()
        device = EmulatedDevice(FAST, room)
        optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=5000, offload_gradients=True)
        optimizer.attach(model, activations="auto", weights=weights)
        forward(model).backward()
        left, _ = offload_of(optimizer).last_offloaded
        for _ in range(5):
            optimizer.step()
            optimizer.zero_grad()
            forward(model).backward()
        return left, everything(model, optimizer)

    left, found = train(14 * EACH)  # of 17 that are saved, beside what is on its way
    assert 5 * EACH < left < (LAYERS + 1) * EACH
    nothing, expected = train(50 * EACH)
    assert nothing == 0
    assert found == expected


@pytest.mark.parametrize("policy", ["cpu", "resident", 0.5])
def test_under_auto_nothing_leaves_with_a_fixed_policy(policy: Any) -> None:
    model = Layers()
    device = EmulatedDevice(FAST, 12 * EACH)
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=5000, policy=policy)
    optimizer.attach(model, activations="auto")
    with pytest.raises(torch.OutOfMemoryError):
        forward(model)
    assert offload_of(optimizer).pool.nbytes == 0


def test_what_backward_has_read_comes_back_no_second_time() -> None:
    """A product saves both factors: the second is read when the first has been, and is still there."""
    model = Net(12)
    optimizer = optimizer_of(model, 1.0)
    loss = model(torch.randn(8, 24)).square().mean()
    for backward in (1, 2, 3):
        before = sum(transfers(optimizer, Op.RESTORE))
        loss.backward(retain_graph=backward < 3)
        restored = sum(transfers(optimizer, Op.RESTORE)) - before
        # What was needed before it had left was read where it was, in the first.
        assert 0.5 * saved(optimizer) < restored <= saved(optimizer)


def test_another_backward_brings_back_ahead_as_the_first() -> None:
    model = Net(12)
    optimizer = optimizer_of(model, 1.0)
    so_far: list[int] = []

    def count(gradient: Tensor) -> None:
        so_far.append(len(transfers(optimizer, Op.RESTORE)))

    def hooked(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(count)

    model.blocks[6].register_forward_hook(hooked)
    loss = model(torch.randn(8, 24)).square().mean()
    for retain in (True, True, False):
        saves(optimizer)
        loss.backward(retain_graph=retain)
    assert so_far[0] == so_far[1] == so_far[2] > 0
