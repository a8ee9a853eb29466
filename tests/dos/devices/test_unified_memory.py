"""A GPU whose memory is the host's, as in a DGX Spark: state stays there, and what the system has left counts."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dos import DOSAdam
from dos.devices.cuda import CudaDevice
from dos.planning.reading import MemoryReader, Source
from perfmodel import Lane, Placement
from tests.support.fake_cuda import FakeCudaDevice, Runtime
from tests.support.training import bits, bits_on_host, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

TOTAL = 120 << 30
STATE_BYTES = 8 * sum(p.numel() for p in mlp().parameters())


@pytest.fixture
def integrated(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    properties = SimpleNamespace(name="NVIDIA GB10", uuid="0-1-2-3", is_integrated=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return runtime


def let_the_system_have(nbytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("devices.cuda", "machine.host_memory"):
        monkeypatch.setattr(f"dos.{user}.available_bytes", lambda: nbytes)


@pytest.mark.parametrize(
    ("left", "free"), [(60 << 30, 60 << 30), (TOTAL + 1, TOTAL), (None, 7 << 30)], ids=["less", "more", "unknown"]
)
def test_free_is_what_the_system_has_left(
    left: int | None, free: int, integrated: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime takes files that Linux caches for memory that is taken, and NVML knows of none."""
    let_the_system_have(left, monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, TOTAL))
    names = ("reserved", "active", "inactive_split")
    figures = {f"{name}_bytes": {"all": {"current": 0, "allocated": 0}} for name in names}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: figures)
    device = CudaDevice(torch.device("cuda", 0))
    assert device.memory() == (free, TOTAL)
    reading = MemoryReader(device).read()
    assert reading.memory.free == free
    assert reading.source is Source.DEVICE


def test_a_device_with_memory_of_its_own_speaks_for_that(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_system_have(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 << 30, TOTAL))
    device = CudaDevice(torch.device("cuda", 0))
    assert not device.shares_host_memory
    assert device.memory() == (7 << 30, TOTAL)


def trained(runtime: Runtime, **settings: Any) -> DOSAdam:
    """An optimizer after some steps, with the bits of the host's."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), **settings)
    optimizer.attach(model)
    train(model, optimizer, 12)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits_on_host()
    return optimizer


def test_all_state_stays_on_the_device(integrated: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dos.owners.assembly"):
        optimizer = trained(integrated, subgroup_size=300, memory_budget=0)
    assert [record.message for record in caplog.records] == [
        "CudaDevice(cuda:0) shares the host's memory: all optimizer state stays there, as with policy='resident'"
    ]
    assert set(optimizer.plan().placements) == {Placement.GPU_RESIDENT}
    assert {span.lane for span in optimizer.timeline().spans} == {Lane.GPU}
    assert optimizer.metrics()["host_held_bytes"] == 0


def test_policies_that_users_choose_are_kept(integrated: Runtime) -> None:
    optimizer = trained(integrated, policy="cpu")
    assert set(optimizer.plan().placements) == {Placement.CPU}


def test_state_for_which_the_system_has_no_room_is_refused_before_it_is_allocated(
    integrated: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux grants allocations that it cannot serve, and kills the process when they are used."""
    let_the_system_have(STATE_BYTES - 1, monkeypatch)
    with pytest.raises(MemoryError, match="of host memory"):
        DOSAdam(mlp().parameters(), device=FakeCudaDevice(integrated))
    let_the_system_have(STATE_BYTES, monkeypatch)
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(integrated))
    let_the_system_have(STATE_BYTES - 1, monkeypatch)
    weight = model[0].weight
    with pytest.raises(MemoryError, match="of host memory"):
        train(model, optimizer, 1)
    assert weight not in optimizer.state
    let_the_system_have(STATE_BYTES, monkeypatch)
    train(model, optimizer, 1)
    let_the_system_have(100, monkeypatch)
    more = torch.nn.Parameter(torch.zeros(8))
    optimizer.add_param_group({"params": [more]})


def test_disks_are_refused(integrated: Runtime, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shares the host's memory.*leave disk= out"):
        DOSAdam(mlp().parameters(), device=FakeCudaDevice(integrated), disk=tmp_path)
