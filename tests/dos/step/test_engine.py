"""What the engine does in which order, and how long it holds memory."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dos import DOSAdam, EmulatedDevice
from perfmodel import Lane, Op, Placement
from tests.support.clock import eventually
from tests.support.devices import UpdatesAfterStep
from tests.support.inside import plan_anew
from tests.support.random_plans import all_in
from tests.support.training import FAST, bits, mlp, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")


@pytest.mark.parametrize("attached", [False, True])
def test_state_that_leaves_is_updated_where_it_is_and_flushed_beside_the_rest(
    attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is free again without another step, and the bits are those of the host's update."""
    placement = [Placement.GPU_RESIDENT]
    device = EmulatedDevice(FAST, capacity=10**9)
    trimmed: list[int] = []
    monkeypatch.setattr("dos.state.device_store.SHORT", 2)  # so that others may need it
    device.trim = lambda: trimmed.append(device.memory().free)
    model, reference = mlp(), mlp()
    optimizer = DOSAdam(
        model.parameters(), policy=lambda work: all_in(placement[0], work), subgroup_size=300, device=device
    )
    expected = DOSAdam(reference.parameters())
    if attached:
        optimizer.attach(model)
    for step, stays in enumerate([True, True, False, False, True]):
        placement[0] = Placement.GPU_RESIDENT if stays else Placement.CPU
        plan_anew(optimizer)
        train(model, optimizer, 1, first_step=step)
        train(reference, expected, 1, first_step=step)
        optimizer.synchronize()
        timeline = optimizer.timeline()
        found = {span.op for span in timeline.spans} - {Op.UPDATE}
        on_device = [span.subgroup for span in timeline.on(Lane.GPU)]
        if step == 2:  # leaving
            assert found == {Op.FLUSH}
            assert sorted(i for i in on_device if i is not None) == list(range(len(optimizer.plan() or ())))
        else:
            arriving = {Op.PREFETCH} if step == 4 else set()  # in step 0 it begins there
            assert found == (arriving if stays else {Op.GRADIENT, Op.PARAMETER})
        assert (device.memory().free < device.capacity) == stays
        assert bits(model.parameters()) == bits(reference.parameters())
    assert trimmed == [device.capacity], "what has left is given back to other processes, once"


@pytest.mark.parametrize("policy", ["cpu", "stride:2", 0.0])
def test_gradients_are_held_no_longer_than_the_update_needs_them(policy: str | float) -> None:
    """Nor until the host has updated what they were copied for: their memory is for the next forward."""
    model, device = mlp(), UpdatesAfterStep(FAST, 10**9)
    optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=300, device=device)
    optimizer.attach(model)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    model(torch.ones(2, 24)).sum().backward()
    gradients = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
    device.returned.clear()
    optimizer.step()
    optimizer.zero_grad()
    assert eventually(lambda: all(gradient.expired() for gradient in gradients))
    device.returned.set()
