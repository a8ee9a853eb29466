"""CudaDevice on a runtime that runs work as late as it may, or in any order: `fake_cuda`."""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dos import DOSAdam
from dos.devices import cuda
from dos.devices.coalesce import Lent
from dos.devices.cuda import CudaDevice
from dos.devices.pinned import lazy_zeros
from dos.devices.ranges import named
from dos.kernels.update import AdamBatch
from dos.machine.threads import Cores, kernel_threads
from dos.step.host_lane import HostLane
from perfmodel import Lane, Op
from tests.support.fake_cuda import (
    FakeCudaDevice,
    FakeStream,
    Record,
    Runtime,
    install,
    use_virtual_time,
)
from tests.support.inside import offload_of
from tests.support.ranks import TORCH_2_6
from tests.support.training import loss_of, mlp, train


def test_the_clock_follows_the_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock runs 1% fast, and the host is interrupted in two of three looks at it."""
    interruptions = itertools.cycle([5e-3, 1e-4, 8e-3])
    complete = runtime.complete

    def interrupted(record: Record) -> None:
        complete(record)
        if record.stream is device._idle_stream:
            runtime.host += next(interruptions)

    monkeypatch.setattr("dos.devices.cuda.time", SimpleNamespace(perf_counter=lambda: 0.99 * runtime.host))
    device = FakeCudaDevice(runtime)
    monkeypatch.setattr(runtime, "complete", interrupted)
    for _ in range(100):
        runtime.host += 0.3
        span = device.launch(0, lambda: None, 1).wait()
    assert span.end == pytest.approx(0.99 * runtime.host, abs=0.02), "off by what drifted in a minute"
    for _ in range(3):
        device._clock = device._start_clock()
        assert device.launch(0, lambda: None, 1).wait().end == pytest.approx(0.99 * runtime.host, abs=2e-4)


@pytest.mark.parametrize("forked", ["unused", "idle", "after forward", "after backward", "after step"])
def test_a_forked_child_that_collects_garbage_goes_on(forked: str, runtime: Runtime) -> None:
    """There the end of an event is that of the process: its destructor raises, because CUDA is not there."""
    found: list[object] = [device := FakeCudaDevice(runtime)]
    if forked == "idle":
        device.copy(Op.PREFETCH, 0, [(torch.zeros(5), torch.ones(5))])
    elif forked != "unused":
        model = mlp()
        optimizer = DOSAdam(model.parameters(), device=device, policy="stride:2", subgroup_size=100)
        optimizer.attach(model, activations=1.0)
        offload_of(optimizer).least_bytes = 0
        train(model, optimizer, 2)
        found += [model, optimizer, loss := loss_of(model, 2)]
        if forked != "after forward":
            loss.backward()
        if forked == "after step":
            optimizer.step()
        del model, optimizer, loss
    del device
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found.clear()
            gc.collect()
            status = min(runtime.fatal, 1)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_time_before_a_launch_does_not_count(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates follow what is measured, and would be those of the host."""
    use_virtual_time(runtime, monkeypatch)
    monkeypatch.setattr(AdamBatch, "point", takes_long(AdamBatch.point, runtime))
    monkeypatch.setattr(cuda, "parts_of", takes_long(cuda.parts_of, runtime))
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), policy="stride:1", subgroup_size=300)
    train(model, optimizer, 2)
    optimizer.synchronize()
    spans = optimizer.timeline().spans
    assert {span.lane for span in spans} == {Lane.GPU, Lane.H2D, Lane.D2H}
    assert [span.duration for span in spans] == pytest.approx([1e-3] * len(spans)), "as long as the fake says"


def takes_long(function: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """The function, which takes the host 5 ms more."""

    def called(*args: Any, **settings: Any) -> Any:
        runtime.host += 5e-3
        return function(*args, **settings)

    return called


@pytest.mark.parametrize("op", [Op.PREFETCH, Op.PARAMETER, Op.FLUSH, Op.GRADIENT])
def test_between_pieces_of_state_others_may_copy(op: Op, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy engine serves one stream as long as that has a copy ready. A kernel in between makes it look at others."""
    for module in ("coalesce", "cuda"):
        monkeypatch.setattr(f"dos.devices.{module}.PIECE_BYTES", 400)
    device = FakeCudaDevice(runtime)
    runtime.log.clear()

    def copied(numel: int) -> list[str]:
        device.copy(op, 0, [(torch.zeros(numel), torch.ones(numel))]).wait()
        found, runtime.log = runtime.log, []
        return found

    assert copied(250) == ["copy", "kernel", "copy", "kernel", "copy"]
    assert copied(50) == ["copy"], "what is small is not worth a kernel"
    assert copied(100) == ["kernel", "copy"], "the border of two jobs is none for the engine"


@pytest.mark.parametrize("op", [Op.PARAMETER, Op.GRADIENT])
def test_no_copy_crosses_the_border_of_two_pinned_regions(op: Op, runtime: Runtime) -> None:
    device, page = FakeCudaDevice(runtime), mmap.PAGESIZE
    host = lazy_zeros(3 * page, torch.uint8)
    for start in (0, page):
        device.pin(host[start : start + page])
    cuts = [page // 2, page, page, page // 2]
    ours, theirs = host.split(cuts), torch.arange(3 * page, dtype=torch.uint8).split(cuts)
    if op is Op.GRADIENT:
        device.copy(op, 0, list(zip(ours, theirs, strict=True))).wait()
        assert torch.equal(host, torch.cat(theirs))
    else:
        device.copy(op, 0, list(zip(theirs, ours, strict=True))).wait()
        assert not torch.cat(theirs).any()


@pytest.mark.parametrize("op", [Op.SAVE, Op.RESTORE])
def test_nothing_comes_between_pieces_of_a_saved_tensor(
    op: Op, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.devices.coalesce.PIECE_BYTES", 400)
    device = FakeCudaDevice(runtime)
    runtime.log.clear()
    device.copy(op, 0, [(torch.zeros(250), torch.ones(250))]).wait()
    assert runtime.log == ["copy"] * 3


def test_our_kernels_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, None)
    priorities = []

    def stream(device: torch.device, priority: int = 0) -> FakeStream:
        priorities.append(priority)
        return FakeStream(runtime)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    FakeCudaDevice(runtime)
    # On those of saved tensors and weights there are only copies, for which priorities mean nothing.
    assert sorted(priorities) == [-1, -1, -1, -1, -1, 0, 0, 0, 0]
    FakeCudaDevice(runtime)
    assert len(priorities) == 9, "torch has 32 of a priority and then gives the same ones again"


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("NVIDIA H100 80GB HBM3", "GPU-0-1-2-3"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-0-1-2-3")],
)
def test_uuid(name: str, uuid: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name=name, uuid="0-1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert FakeCudaDevice(runtime).uuid == uuid
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert FakeCudaDevice(runtime).uuid is None, "ROCm has no NVML, which is not missing there"


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_that_state_cannot_have_is_not_free(
    expandable: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segment(pool: int, total: int, active: int) -> dict[str, object]:
        pool_id = {"device": 0, "segment_pool_id": (0, pool), "is_expandable": expandable}
        return {**pool_id, "total_size": total, "active_size": active}

    segments = [segment(0, 40, 0), segment(0, 30, 20)]
    asked: list[None] = []
    peak = [60]

    def stats(device: object) -> dict[str, dict[str, dict[str, int]]]:
        asked.append(None)
        total, active = (sum(int(str(s[key])) for s in segments) for key in ("total_size", "active_size"))
        split = sum(int(str(s["total_size"])) - int(str(s["active_size"])) for s in segments if s["active_size"])
        figures = {"reserved": total, "active": active, "inactive_split": split}
        counts = {"allocated": total, "peak": peak[0]}
        return {f"{key}_bytes": {"all": {"current": value, **counts}} for key, value in figures.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **settings: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    use_virtual_time(runtime, monkeypatch)
    device = CudaDevice(torch.device("cuda", 0))
    assert device.cached() == (70, 50 if expandable else 40, None)
    assert len(asked) == 1
    assert device.cached().least is None, "there was no higher peak since"
    for peak[0] in (65, 25, 90):  # the user may reset it
        assert device.cached().least == min(50 if expandable else 40, 70 - peak[0])
    segments += [segment(1, 100, 0), segment(1, 10, 4)]
    runtime.host += 2.0
    assert device.cached()[:2] == (180, 50 if expandable else 40), "what is free in a CUDA graph's pool is the graph's"
    assert device.memory() == (7, 9)


def test_host_updates_run_near_the_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="", uuid="", pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=1)
    asked = []
    everywhere = os.sched_getaffinity(0)
    near = Cores(frozenset([min(everywhere)]), 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("dos.devices.cuda.cores_near", lambda address: asked.append(address) or near)
    device = CudaDevice(torch.device("cuda", 0))
    assert asked == ["0000:ab:01.0"]
    found: list[object] = []
    lane = HostLane(device)
    lane.submit(lambda: found.extend((os.sched_getaffinity(0), kernel_threads()))).result()
    assert found == [near.cpus, 1]
    assert os.sched_getaffinity(0) == everywhere
    with device.host_update(5, 0) as start:
        assert start <= time.perf_counter()


def test_one_connection_is_warned_of(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCudaDevice(runtime)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            FakeCudaDevice(runtime)
    assert [r.message.split()[0] for r in caplog.records] == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]


@pytest.mark.parametrize("chosen", [False, True])
def test_no_context_on_another_device(chosen: bool, runtime: Runtime) -> None:
    """Whether the user has called torch.cuda.set_device or not, and in every thread."""
    if chosen:
        runtime.set_device(1)
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime, 1), policy="stride:2", subgroup_size=100)
    optimizer.attach(model)
    train(model, optimizer, 3)
    collector = threading.Thread(target=optimizer.synchronize)  # as a collection that happens to run there
    collector.start()
    collector.join()
    assert runtime.contexts == {1}
    devices: list[int] = []
    HostLane(FakeCudaDevice(runtime, 1)).submit(lambda: devices.append(runtime.current_device())).result()
    assert devices == [1]


class OnGpu(nn.Parameter):
    """A parameter that says that it is on a GPU."""

    device = torch.device("cuda", 0)

    @classmethod
    def of(cls, index: int) -> OnGpu:
        made = cls(torch.zeros(3))
        made.device = torch.device("cuda", index)
        return made


class TwoGpus(FakeCudaDevice):
    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device


def test_parameters_on_two_gpus_are_refused(runtime: Runtime) -> None:
    def message(name: str) -> str:
        return rf"parameter {name} is on cuda:1 and .* is CudaDevice\(cuda:0\); .*device_map='auto'"

    here, there = OnGpu.of(0), OnGpu.of(1)
    device = TwoGpus(runtime)
    with pytest.raises(ValueError, match=message("'b'")):
        DOSAdam([("a", here), ("b", there)], device=device)
    assert not here._post_accumulate_grad_hooks, "watched although there is no optimizer"
    optimizer = DOSAdam([here, torch.nn.Parameter(torch.zeros(2))], device=device)
    with pytest.raises(ValueError, match=message(r"0 of shape \(3,\)")):
        optimizer.add_param_group({"params": [there]})
    assert len(optimizer.param_groups) == 1
    # Frozen parameters are not updated, wherever they are; unfrozen, they are refused at their first gradient.
    optimizer.add_param_group({"params": [there.requires_grad_(False)]})
    there.requires_grad_(True).grad = torch.zeros(3)
    with pytest.raises(ValueError, match=message(r"0 of shape \(3,\)")):
        optimizer.step()


@pytest.mark.skipif(TORCH_2_6, reason="torch 2.6 profiles one thread alone")
def test_profilers_see_lanes_and_subgroups(runtime: Runtime) -> None:
    model = mlp()
    device = FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), device=device, policy="stride:2", subgroup_size=600)
    train(model, optimizer, 1)
    assert named("a") is named("b"), "a range was made although no profiler runs"
    # Profiles are of one thread unless they are asked for all.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile:
        train(model, optimizer, 1)
        for lane in (Lane.READ, Lane.WRITE):
            before = time.perf_counter()
            with device.disk_io(lane, 4096) as start:
                assert before <= start <= time.perf_counter()
    seen = {event.key for event in profile.key_averages() if event.key.startswith("dos ")}
    assert {"dos H2D prefetch 0", "dos GPU update 0", "dos D2H flush 0"} <= seen
    assert {"dos D2H gradient 1", "dos CPU update 600 parameters", "dos H2D parameter 1"} <= seen
    assert {f"dos {lane.value} 4096 bytes" for lane in (Lane.READ, Lane.WRITE)} <= seen


def test_steps_make_hardly_any_events_once_some_are_there(runtime: Runtime) -> None:
    """Those of jobs that are gone are recorded again; how many jobs there are at once depends on the threads."""
    model, made = mlp(), list[int]()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), policy="stride:2", subgroup_size=100)
    optimizer.attach(model)
    for _ in range(3):
        train(model, optimizer, 4)
        optimizer.synchronize()
        gc.collect()
        made.append(runtime.made)
    assert made[2] - made[1] < made[0] / 5, "as many as in the first steps would be made again"


def test_a_lent_gradient_stays_until_its_copy_has_ended(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is not told of it: user code may release it before, and other work is queued after."""
    told = list[object]()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: told.append(tensor))
    device, gradient, staged = FakeCudaDevice(runtime), torch.ones(5), torch.zeros(5)
    released = weakref.ref(gradient)
    job = device.copy(Op.GRADIENT, 0, Lent([(staged, gradient)]))
    del gradient
    device.copy(Op.PREFETCH, 0, [(torch.zeros(5), torch.ones(5))])
    assert released() is not None, "the copy has not ended"
    runtime.complete(job.end.record_)
    device.copy(Op.PREFETCH, 0, [(torch.zeros(5), torch.ones(5))])
    assert not device._lent
    assert not told
    assert staged.tolist() == [1] * 5


def test_memory_of_a_lent_gradient_stays_where_user_code_gives_it_other(runtime: Runtime) -> None:
    device, gradient = FakeCudaDevice(runtime), torch.ones(5)
    memory = StorageWeakRef(gradient.untyped_storage())
    job = device.copy(Op.GRADIENT, 0, Lent([(torch.zeros(5), gradient)]))
    gradient.data = torch.zeros(5)
    assert not memory.expired(), "the copy has not ended"
    runtime.complete(job.end.record_)
    device.copy(Op.PREFETCH, 0, [(torch.zeros(5), torch.ones(5))])
    assert memory.expired()
