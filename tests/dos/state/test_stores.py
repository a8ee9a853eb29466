"""What state holds of a device's memory, and what happens when there is none: other places, never other bits."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from dos.state.device_store import DeviceStore
from perfmodel import Lane, Placement
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from tests.support.devices import Unreliable
from tests.support.inside import session_of
from tests.support.training import FAST, bits, bits_on_host, mlp, train, trained_as_on_host

pytestmark = pytest.mark.usefixtures("one_core")

STATE_BYTES = 8 * sum(p.numel() for p in mlp().parameters())
STEPS = 12


def held(device: EmulatedDevice) -> int:
    """Bytes of the device that state has, where nothing else has any."""
    return device.capacity - device.memory().free


def test_a_failed_allocation_is_an_answer_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = EmulatedDevice(FAST, capacity=2500)
    holdings = DeviceStore(device)
    with caplog.at_level(logging.DEBUG, logger="dos"):
        holdings.get_slots(4, 1000)
        assert len(holdings.slots) == 2, "as many as there is memory for"
        assert holdings.nbytes == held(device) == 2000
        assert holdings.denied == 2000
        holdings.expect_denials(False)
        assert holdings.denied is None
        holdings.get_slots(1, 1000)
        assert holdings.denied == 2000
    assert [r.levelname for r in caplog.records] == ["WARNING", "DEBUG"]
    assert "updating on the host instead" in caplog.records[0].message
    assert "1000 bytes asked for, 500 of 2500 free" in caplog.records[0].message


def test_after_the_first_failure_no_more_is_asked_for() -> None:
    """Each failed attempt makes the caching allocator give back what it has, and wait for the device."""
    device = Unreliable(1.0)
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device, policy=0.0, subgroup_size=50)
    train(model, optimizer, 1)
    assert len(optimizer.plan()) > 10
    assert device.failures == 1


def test_failures_beside_state_that_leaves_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    holdings = DeviceStore(EmulatedDevice(FAST, capacity=500))
    with caplog.at_level(logging.WARNING, logger="dos"):
        holdings.expect_denials(True)
        holdings.get_slots(1, 1000)
    assert holdings.denied is None
    assert not caplog.records


@pytest.mark.parametrize("fails", [False, True])
def test_room_to_which_state_has_yet_to_come_is_not_where_it_is(fails: bool) -> None:
    model = mlp()
    device = EmulatedDevice(FAST, capacity=10**6)
    optimizer = DOSAdam(model.parameters(), device=device, policy="cpu", subgroup_size=50)
    train(model, optimizer, 1)
    optimizer.synchronize()
    session = session_of(optimizer)
    stores, (subgroup, *_) = session.ledger.stores, session.registry.accelerated
    stores.device.reserve([subgroup])
    assert (stores.at(subgroup), stores.device.has_room(subgroup)) == (Tier.HOST, True)
    if fails:
        stores.drop_empty()
        assert held(device) == 0
    else:
        job = stores.copy(Move(Tier.HOST, Tier.DEVICE), 0, subgroup, device.fence())
        stores.device.use(Stream.PREFETCH, job, [subgroup], None)
        assert stores.at(subgroup) is Tier.DEVICE
        stores.drop_empty()
        assert stores.at(subgroup) is Tier.DEVICE


def test_after_failures_state_comes_to_the_device_again() -> None:
    device = Unreliable(1.0)
    model, optimizer = trained_as_on_host(device)
    assert optimizer.metrics()["share_gpu_resident"] == 0
    device.failing = 0.0
    train(model, optimizer, 20, first_step=STEPS)
    assert held(device) >= STATE_BYTES
    assert optimizer.plan().served(Placement.GPU_RESIDENT) == tuple(range(len(optimizer.plan())))


@pytest.mark.parametrize(("attach", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_with_enough_memory_nothing_travels_after_the_first_iteration(attach: bool, dtype: torch.dtype) -> None:
    model, optimizer = trained_as_on_host(EmulatedDevice(FAST, capacity=10**6), attach, dtype, steps=1)
    for step in range(1, STEPS):
        train(model, optimizer, 1, first_step=step)
        optimizer.synchronize()
        lanes = {span.lane for span in optimizer.timeline().spans}
        assert lanes == {Lane.GPU}
    assert bits(model.parameters()) == bits_on_host(dtype)


@pytest.mark.parametrize(("attach", "offload_gradients"), [(False, True), (True, False)])
def test_without_any_memory_the_host_does_all_and_nothing_is_ever_allocated(
    attach: bool, offload_gradients: bool
) -> None:
    device = EmulatedDevice(FAST, capacity=10**5, occupied=10**5)
    device.allocate = _never
    _, optimizer = trained_as_on_host(device, attach, offload_gradients=offload_gradients)
    assert set(optimizer.plan().placements) == {Placement.CPU}
    assert device.peak_bytes == 10**5


def _never(nbytes: int) -> Tensor:
    raise AssertionError(f"{nbytes} bytes asked for")


def test_release_says_how_much_it_gave_back() -> None:
    device = EmulatedDevice(FAST, capacity=10**6)
    _, optimizer = trained_as_on_host(device)
    before = held(device)
    assert optimizer.release_memory() == before > 0
    assert optimizer.release_memory() == 0
    assert DOSAdam(mlp().parameters()).release_memory() == 0
