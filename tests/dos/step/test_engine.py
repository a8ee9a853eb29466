"""What the engine does in which order, and how long it holds memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dos import DOSAdam, EmulatedDevice
from perfmodel import Lane, Op, Placement, Plan, Workload
from perfmodel.format import float32
from perfmodel.simulate import simulate
from tests.support.clock import compares_with_a_clock, eventually, skip_if_the_clock_cannot_be_trusted
from tests.support.devices import UpdatesAfterStep
from tests.support.random_plans import all_in
from tests.support.training import FAST, bits, mlp, plan_anew, profile, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")


@compares_with_a_clock
def test_order_of_operations_on_each_lane_is_the_simulated_one() -> None:
    """Five subgroups, every second one streamed through one slot: which lane does what, in which order."""

    parameter = nn.Parameter(torch.ones(500))
    slow = profile(
        h2d_bandwidth=1e5, d2h_bandwidth=1e5, h2d_bandwidth_duplex=1e5, d2h_bandwidth_duplex=1e5, cpu_update_rate=2e4
    )
    optimizer = DOSAdam(
        [parameter],
        policy=lambda w: Plan(
            tuple(Placement.CPU if i % 2 else Placement.GPU_STREAMED for i in range(5)), tuple(range(5)), 1
        ),
        subgroup_size=100,
        device=EmulatedDevice(slow, capacity=10**6),
    )
    parameter.grad = torch.ones(500)
    optimizer.step()
    timeline = optimizer.timeline()
    simulated = simulate(optimizer.plan(), Workload.of_sizes([100] * 5, float32("float32")), slow)
    orders = [[[s.name for s in line.on(lane)] for lane in Lane] for line in (timeline, simulated)]
    if orders[0] != orders[1]:  # a lane that wakes up late is overtaken
        skip_if_the_clock_cannot_be_trusted()
    assert orders[0] == orders[1]
    assert [s.name for s in timeline.on(Lane.CPU)] == ["update 1", "update 3"]
    assert [s.name for s in timeline.on(Lane.GPU)] == ["update 0", "update 2", "update 4"]
    assert [s.name for s in timeline.on(Lane.D2H)] == ["gradient 1", "gradient 3", "flush 0", "flush 2", "flush 4"]
    assert [s.name for s in timeline.on(Lane.H2D)] == [
        "prefetch 0", "parameter 1", "parameter 3", "prefetch 2", "prefetch 4",
    ]  # fmt: skip


@pytest.mark.parametrize("attached", [False, True])
def test_state_that_leaves_is_updated_where_it_is_and_flushed_beside_the_rest(attached: bool) -> None:
    """Its memory is free again without another step, and the bits are those of the host's update."""
    placement = [Placement.GPU_RESIDENT]
    device = EmulatedDevice(FAST, capacity=10**9)
    trimmed: list[int] = []
    device.trim = lambda: trimmed.append(device.memory().free)  # type: ignore[method-assign]
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
    assert eventually(lambda: all(gradient.expired() for gradient in gradients), seconds=30)
    device.returned.set()
