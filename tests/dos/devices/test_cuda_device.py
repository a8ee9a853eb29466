"""CudaDevice on a runtime that runs work as late as it may, or in any order: `fake_cuda`."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.deciding.decisions import Decisions
from dos.deciding.policies import AdaptivePolicy
from dos.devices import Copy, Job
from dos.devices.cuda import CudaDevice
from dos.devices.ranges import named
from dos.machine.threads import Cores, kernel_threads
from dos.state.device_store import DeviceStore
from dos.state.record import ParameterRecord
from dos.step.host_lane import HostLane
from dos.step.iteration import Iteration
from perfmodel import Lane, Op, Placement, Plan, Workload
from tests.support.fake_cuda import (
    FakeCudaDevice,
    FakeEvent,
    FakeStream,
    Record,
    Runtime,
    end_backward,
    install,
    queue_gradients,
    use_virtual_time,
)
from tests.support.random_plans import RandomPlans
from tests.support.ranks import TORCH_2_6
from tests.support.training import bits, mlp, plan_anew, train


def trained(
    device: FakeCudaDevice | None,
    *,
    attached: bool = False,
    streams: Sequence[FakeStream] = (),
    prepare: Callable[[nn.Parameter], None] = lambda parameter: None,
    before_step: Callable[[DOSAdam], None] = lambda optimizer: None,
    **options: object,
) -> list[bytes]:
    """Losses, parameters and state after some steps, to the bit. On a device all that the caller does is late, too.

    streams: on which backward runs if not on the caller's. prepare: is called with each parameter before.
    """
    model = mlp(torch.bfloat16)
    for parameter in model.parameters():
        prepare(parameter)
    if device is not None:
        queue_gradients(device.runtime, model.parameters(), streams or None)

    def backward_is_issued(step: int) -> None:
        before_step(optimizer)
        if device is not None:
            was = bits(model.parameters())
            device.runtime.caller.enqueue(lambda: unchanged.append(bits(model.parameters()) == was))
            end_backward(device.runtime, streams)

    unchanged: list[bool] = []
    settings = {"lr": 1e-2, "device": device, "subgroup_size": 300, **options}
    optimizer = DOSAdam(model.parameters(), **settings)  # type: ignore[arg-type]
    if attached:
        optimizer.attach(model)
    losses = train(model, optimizer, 4, before_step=backward_is_issued)
    optimizer.synchronize()
    assert all(unchanged), "parameters were overwritten before the caller had read them"
    state = optimizer.state
    return bits([torch.tensor(losses), *model.parameters(), *(t for s in state.values() for t in s.values())])


def resident(runtime: Runtime, **settings: Any) -> tuple[nn.Parameter, DOSAdam]:
    """A parameter with a gradient whose state stays on the device."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = DOSAdam([parameter], **{"device": FakeCudaDevice(runtime), "policy": "resident", **settings})
    parameter.grad = torch.ones(8)
    return parameter, optimizer


def test_a_step_on_the_device_is_four_launches_and_waits_for_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the steps that follow at once: the caller's stream is ordered behind each, which the host need not see."""
    launches: list[Op] = []
    queue = FakeCudaDevice._queue
    monkeypatch.setattr(FakeCudaDevice, "_queue", lambda d, op, *rest: (launches.append(op), queue(d, op, *rest))[1])

    def run(device: FakeCudaDevice | None) -> list[Tensor]:
        parameters = [nn.Parameter(torch.full((n,), 0.5, dtype=torch.bfloat16)) for n in (700, 300, 64, 5)]
        groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "weight_decay": 0.0}]
        optimizer = DOSAdam(groups, device=device, policy="adaptive", subgroup_size=200)
        for number in range(5):
            if number == 2:
                optimizer.synchronize()
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.25 + number)
            waits, before = runtime.waits, bits(parameters)
            launches.clear()
            optimizer.step()
            if number and device is not None:
                assert runtime.waits == waits
                assert set(launches) == {Op.UPDATE}
                assert len(launches) <= 4
                assert bits(parameters) == before, "the device has not come to it"
            elif device is not None:
                optimizer.synchronize()
        optimizer.synchronize()
        assert not device or optimizer.timeline()
        return bits([*parameters, *(optimizer.state[p]["exp_avg_sq"] for p in parameters)])

    expected = run(None)
    runtime.caller = FakeStream(runtime)
    assert run(FakeCudaDevice(runtime)) == expected


def test_each_of_the_steps_that_are_queued_is_learnt_from_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[Any] = []
    runtime.caller = FakeStream(runtime)
    monkeypatch.setattr(Decisions, "learn", lambda _, stepped, timeline, *rest: learnt.append((stepped, timeline)))
    _, optimizer = resident(runtime)
    for _ in range(4):
        optimizer.step()
    optimizer.synchronize()
    assert len({id(stepped) for stepped, _ in learnt}) == len(learnt) == 4
    assert all(timeline.on(Lane.GPU) for _, timeline in learnt)


def test_steps_on_the_device_end_with_their_optimizer(runtime: Runtime) -> None:
    """Memory that they use goes with it. And gradients are zeroed without waiting for an update that comes first."""
    runtime.caller = FakeStream(runtime)
    parameter, optimizer = resident(runtime)
    for _ in range(3):
        optimizer.step()
    was, waits = bits([parameter]), runtime.waits
    optimizer.zero_grad(set_to_none=False)
    assert runtime.waits == waits
    optimizer._session._end_last_step()  # as the next backward does
    del optimizer
    assert bits([parameter]) != was


@pytest.mark.parametrize("queued", [1, 2])
def test_a_step_that_fails_on_the_device_is_told_by_the_next_call(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    runtime.caller = FakeStream(runtime)
    _, optimizer = resident(runtime)
    for _ in range(queued):
        optimizer.step()

    def fail(event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for method in ("query", "synchronize"):
        monkeypatch.setattr(FakeEvent, method, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed part way"):
            optimizer.step()


def test_ctrl_c_before_a_step_is_handed_over_waits_for_all_of_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model that is attached no hook would make up for it."""
    parameter, optimizer = resident(runtime)
    was = bits([parameter])

    def interrupt(device: FakeCudaDevice, job: Job) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeCudaDevice, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert bits([parameter]) != was


def test_memory_is_released_behind_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose slots are in use."""
    expected = trained(None)

    def release(optimizer: DOSAdam) -> None:
        optimizer.register_step_post_hook(lambda *_: optimizer.release_memory())

    device = FakeCudaDevice(install(monkeypatch, None))
    assert trained(device, attached=True, policy="stride:1", before_step=release) == expected


def test_hooks_leave_a_capture_early_and_what_it_reads_is_finished_by_the_step(runtime: Runtime) -> None:
    """Its replays run no hooks: they neither wait for parameters nor tell of gradients."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), policy="cpu", subgroup_size=300)
    optimizer.attach(model)

    def backward() -> None:
        model(torch.ones(2, 24)).sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    assert optimizer._session.unfinished
    runtime.capturing = True
    with pytest.raises(RuntimeError, match="before the capture"):
        model(torch.ones(2, 24))
    with pytest.raises(RuntimeError, match="before the capture"):
        optimizer.synchronize()
    with pytest.raises(RuntimeError, match="after each replay"):
        optimizer.step()
    runtime.capturing = False
    optimizer.synchronize()
    optimizer.zero_grad()
    runtime.capturing = True
    backward()
    runtime.capturing = False
    optimizer.step()
    assert not optimizer._session.unfinished, "what a replay reads is there"


def test_gradients_leave_no_more_once_a_backward_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes to them after backward, without a version that tells it."""
    runtime = install(monkeypatch, 0)
    parameter = nn.Parameter(torch.ones(300))
    optimizer = DOSAdam([parameter], device=FakeCudaDevice(runtime), policy="cpu")
    for _ in range(2):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    runtime.capturing = True
    parameter.sum().backward()
    runtime.capturing = False
    optimizer.zero_grad()
    parameter.sum().backward()
    while runtime.advance():  # what has left has arrived
        pass
    parameter.grad.data.fill_(0.5)
    optimizer.step()
    expected = 0.9 * (1 - 0.9**2) + 0.1 * 0.5
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((300,), expected))


def test_new_parameters_come_behind_what_the_caller_has_queued(runtime: Runtime) -> None:
    """The rest of backward, where gradients have left in it."""
    runtime.caller = FakeStream(runtime)
    layer, reads = nn.Linear(20, 15), list[list[bytes]]()
    optimizer = DOSAdam(layer.parameters(), device=FakeCudaDevice(runtime), policy="cpu")
    optimizer.attach(layer)
    for number in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2, 20)).sum().backward()
        runtime.caller.enqueue(lambda: reads.append(bits(layer.parameters())))
        was = bits(layer.parameters())
        optimizer.step()
        optimizer.synchronize()
        runtime.complete(runtime.caller.record())
        assert reads[number] == was


def test_slots_are_given_back_when_step_returns(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward needs their memory, however late the CPU lane comes to that."""
    model, device = mlp(), FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), device=device, policy="stride:1", subgroup_size=300)
    free_slots, held = DeviceStore.free_slots, []
    monkeypatch.setattr(DeviceStore, "free_slots", lambda store: (time.sleep(0.05), free_slots(store)))
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        held.append(optimizer._session.on_device.engine.stores.device.nbytes)
    assert held == [0, 0, 0]


def test_offloaded_gradients_cannot_be_captured(runtime: Runtime) -> None:
    parameter, _optimizer = resident(runtime, offload_gradients=True)
    runtime.capturing = True
    with pytest.raises(RuntimeError, match="offload_gradients=False"):
        parameter.sum().backward()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
    ("slots", "attached", "offload"), [(1, True, False), (3, True, False), (1, False, False), (3, True, True)]
)
def test_no_order_of_work_changes_a_bit(
    slots: int, attached: bool, offload: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plans that change in every step."""
    expected = trained(None)
    settings = {"policy": RandomPlans(seed or 0, slots), "before_step": plan_anew, "offload_gradients": offload}
    assert trained(FakeCudaDevice(install(monkeypatch, seed)), attached=attached, **settings) == expected


@pytest.mark.parametrize(("policy", "offload"), [("cpu", True), (0.5, False), ("stride:2", False)])
def test_no_copy_leaves_the_region_in_which_it_begins(policy: str | float, offload: bool, runtime: Runtime) -> None:
    """Subgroups are pinned one by one, a parameter spans several, and users move views of its state as a whole."""
    size = 1 << 11
    parameter = nn.Parameter(torch.ones(5 * size // 2, dtype=torch.bfloat16))
    device = FakeCudaDevice(runtime)
    optimizer = DOSAdam([parameter], device=device, policy=policy, subgroup_size=size, offload_gradients=offload)
    for value in (0.5, -0.25):
        for _ in range(2):
            (value * parameter).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(runtime.regions) > 5, "each subgroup's was pinned apart"
    for entry in (optimizer.state_dict()["state"][0], optimizer.state[parameter]):
        for key in ("exp_avg", "exp_avg_sq", "master_rest"):
            assert torch.equal(entry[key].cuda(), entry[key]), key
    regions = len(runtime.regions)
    (0.5 * parameter).sum().backward()
    optimizer.step()
    assert len(runtime.regions) == regions, "what has become one region stays one"


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(("layouts", "offload"), [(False, False), (True, True)])
def test_a_backward_on_two_streams(
    layouts: bool, offload: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of one subgroup come from both. layouts: gradients lie otherwise than parameters, so they are copied."""

    def relaid(parameter: nn.Parameter) -> None:
        if layouts:
            with torch.no_grad():
                parameter.set_(parameter.t().contiguous().t())
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.contiguous()))

    def flat_gradient(record: ParameterRecord, gradient: Tensor) -> Tensor:
        flat = made(record, gradient)
        if flat.data_ptr() != gradient.data_ptr():
            runtime.current_stream().enqueue(lambda: flat.copy_(made(record, gradient)))
        return flat

    settings: dict[str, Any] = {"policy": "cpu", "subgroup_size": 700, "offload_gradients": offload, "prepare": relaid}
    expected = trained(None, **settings)
    runtime = install(monkeypatch, seed)
    made = ParameterRecord.flat_gradient
    monkeypatch.setattr(ParameterRecord, "flat_gradient", flat_gradient)
    streams = [runtime.caller_stream(), runtime.caller_stream()]
    assert trained(FakeCudaDevice(runtime), streams=streams, **settings) == expected


def test_a_weight_of_two_modules_is_waited_for_on_the_stream_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, None)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.ModuleList([first, second])
    device = FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device)
    optimizer.attach(model)
    joined: list[object] = []
    join = device.join
    monkeypatch.setattr(device, "join", lambda job: (joined.append(device.caller()), join(job)))
    streams = [runtime.caller_stream(), runtime.caller_stream()]
    for _ in range(3):
        joined.clear()
        outputs = []
        for module, stream in zip((first, second, first), (*streams, streams[0]), strict=True):
            with runtime.stream(stream):
                outputs.append(module(torch.ones(1, 4)))
        in_forward = list(joined)
        torch.stack(outputs).sum().backward()
        optimizer.step()
    assert in_forward == streams


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return install(monkeypatch, None)


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


@pytest.mark.parametrize("attached", [False, True])
def test_the_device_says_how_long_the_model_computes(
    attached: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward are issued in no time, and last."""
    use_virtual_time(runtime, monkeypatch)
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))

    def compute(seconds: float) -> None:
        runtime.caller.enqueue(lambda: None, seconds)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: compute(0.03))
    device = FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), device=device, policy="cpu", subgroup_size=100)
    if attached:
        optimizer.attach(model)
    for _ in range(4):
        compute(0.05)
        model(torch.ones(10)).sum().backward()
        optimizer.step()
        if not attached:
            optimizer.synchronize()
            assert optimizer.metrics()["exposed_s"] < 0.02, "the backlog of the device is not the optimizer's"
        optimizer.zero_grad()
    pace = optimizer._session.decisions.pace
    assert pace.backward.seconds == pytest.approx(0.12, abs=0.01), "from the first of five gradients"
    assert pace.forward.seconds == pytest.approx(0.08, abs=0.01), "until the first of them"


def test_only_waits_that_hold_the_device_up_are_exposed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    use_virtual_time(runtime, monkeypatch)
    device = FakeCudaDevice(runtime)
    iteration = Iteration(device)
    runtime.caller.enqueue(lambda: None, 0.5)
    with iteration.held_up():
        runtime.host += 0.2
    assert iteration.exposed_s == 0.0, "the device has not come so far"
    device.fence()[0].wait()
    assert iteration.exposed_s == 0.0, "the host was held up, and the device had work meanwhile"
    with iteration.held_up():
        device.fence()[0].wait()
        runtime.host += 0.2
    assert iteration.exposed_s == pytest.approx(0.2), "the device is held up still"
    device.fence()[0].wait()
    assert iteration.exposed_s == pytest.approx(0.2)


def test_a_job_that_nobody_holds_keeps_its_host_memory_until_it_is_done(runtime: Runtime) -> None:
    device = FakeCudaDevice(runtime)
    source, destination = torch.arange(5.0), torch.zeros(5)
    memory = weakref.ref(source.untyped_storage())
    job = device.copy(Op.PREFETCH, 0, [(destination, source)])
    del job, source
    device.launch(0, lambda: None, 1).wait()  # another stream's end says nothing of this one's
    device.launch(0, lambda: None, 1)
    assert memory() is not None
    assert not destination.any()
    device.copy(Op.PREFETCH, 1, []).wait()
    device.launch(0, lambda: None, 1)
    gc.collect()
    assert memory() is None
    assert destination.tolist() == [0, 1, 2, 3, 4]


def test_gradients_are_not_kept_by_jobs(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    # The allocator knows by record_stream how long they are used, so that freeing them gives their memory back.
    told: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append(tensor.data_ptr()))
    device = FakeCudaDevice(runtime)
    gradient, staged, state = torch.ones(5), torch.zeros(5), torch.ones(5)
    jobs = [device.copy(Op.GRADIENT, 0, [(staged, gradient)]), device.copy(Op.FLUSH, 0, [(torch.zeros(5), state)])]
    jobs.append(device.launch(0, lambda: None, 5, reads=[gradient]))
    assert told == [gradient.data_ptr()] * 2
    memory = weakref.ref(gradient.untyped_storage())
    for job in jobs:
        job.wait()
    del gradient
    assert memory() is None


def test_updates_go_before_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, None)
    priorities = []

    def stream(device: torch.device, priority: int = 0) -> FakeStream:
        priorities.append(priority)
        return FakeStream(runtime)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    FakeCudaDevice(runtime)
    assert sorted(priorities) == [-1, 0, 0, 0, 0, 0, 0, 0]
    FakeCudaDevice(runtime)
    assert len(priorities) == 8, "torch has 32 of a priority and then gives the same ones again"


@pytest.mark.parametrize("seed", [None, 0])
def test_two_optimizers_share_streams(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_together(runtime: Runtime | None) -> list[bytes]:
        models = [mlp(torch.bfloat16, seed=0), mlp(torch.bfloat16, seed=1)]
        optimizers = []
        for model, policy in zip(models, ["stride:2", "cpu"], strict=True):
            device = None if runtime is None else FakeCudaDevice(runtime)
            optimizers.append(DOSAdam(model.parameters(), lr=1e-2, device=device, subgroup_size=300, policy=policy))
            optimizers[-1].attach(model)  # so that both are in flight at once
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, 1, first_step=step)
        for optimizer in optimizers:
            optimizer.synchronize()
        return bits([p for model in models for p in model.parameters()])

    expected = trained_together(None)
    assert trained_together(install(monkeypatch, seed)) == expected


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("NVIDIA H100 80GB HBM3", "GPU-0-1-2-3"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-0-1-2-3")],
)
def test_uuid(name: str, uuid: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name=name, uuid="0-1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert FakeCudaDevice(runtime).uuid == uuid


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_that_state_cannot_have_is_not_free(
    expandable: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segment(pool: int, total: int, active: int) -> dict[str, object]:
        pool_id = {"device": 0, "segment_pool_id": (0, pool), "is_expandable": expandable}
        return {**pool_id, "total_size": total, "active_size": active}

    segments = [segment(0, 40, 0), segment(0, 30, 20)]
    asked: list[None] = []

    def stats(device: object) -> dict[str, dict[str, dict[str, int]]]:
        asked.append(None)
        total, active = (sum(int(str(s[key])) for s in segments) for key in ("total_size", "active_size"))
        split = sum(int(str(s["total_size"])) - int(str(s["active_size"])) for s in segments if s["active_size"])
        figures = {"reserved": total, "active": active, "inactive_split": split}
        return {f"{key}_bytes": {"all": {"current": value, "allocated": total}} for key, value in figures.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **settings: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    use_virtual_time(runtime, monkeypatch)
    device = CudaDevice(torch.device("cuda", 0))
    assert device.cached() == (70, 50 if expandable else 40)
    assert len(asked) == 1
    segments += [segment(1, 100, 0), segment(1, 10, 4)]
    runtime.host += 2.0
    assert device.cached() == (180, 50 if expandable else 40), "what is free in a CUDA graph's pool is the graph's"
    assert device.memory() == (7, 9)


def test_memory_that_hooks_take_is_of_the_stream_of_step(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 and DDP call hooks on streams of their own, where what state gives back would be lost to the model."""
    taken: list[bool] = []
    allocate = FakeCudaDevice.allocate

    def noted(device: FakeCudaDevice, nbytes: int) -> Tensor:
        taken.append(runtime.current_stream() is theirs)
        return allocate(device, nbytes)

    monkeypatch.setattr(FakeCudaDevice, "allocate", noted)
    theirs = runtime.caller_stream()
    assert trained(FakeCudaDevice(runtime), streams=[theirs], policy="stride:1") == trained(None)
    assert any(taken), "nothing was allocated in a hook"
    assert runtime.allocated == {runtime.caller}


@pytest.mark.parametrize("placement", [Placement.GPU_STREAMED, Placement.GPU_RESIDENT])
def test_state_comes_in_backward_behind_what_still_uses_the_memory(placement: Placement, runtime: Runtime) -> None:
    """The caller freed it, but its stream has not come past the last use; here that writes NaN."""

    class Used(FakeCudaDevice):
        in_backward, taken = False, 0

        def _empty(self, nbytes: int) -> Tensor:
            buffer = super()._empty(nbytes)
            if self.in_backward:
                self.taken += 1
                runtime.current_stream().enqueue(lambda: buffer.fill_(0xFF))
            return buffer

    class AtHomeFirst(AdaptivePolicy):
        first = True

        def __call__(self, workload: Workload) -> Plan:
            n = len(workload.subgroups)
            chosen, self.first = (Placement.CPU if self.first else placement), False
            return Plan((chosen,) * n, tuple(range(n)), slots=2)

    def end_of_backward(step: int) -> None:
        device.in_backward = False
        assert optimizer._session.on_device is not None
        for issued in optimizer._session.on_device.engine.early.begun:
            issued.job.wait()

    expected = trained(None)
    device, model = Used(runtime), mlp(torch.bfloat16)
    optimizer = DOSAdam(model.parameters(), lr=1e-2, device=device, subgroup_size=300, policy=AtHomeFirst())
    losses: list[float] = []
    for step in range(4):
        optimizer.synchronize()
        device.in_backward = True
        losses += train(model, optimizer, 1, first_step=step, before_step=end_of_backward)
    state = optimizer.state
    tensors = [torch.tensor(losses), *model.parameters(), *(t for s in state.values() for t in s.values())]
    assert bits(tensors) == expected
    assert device.taken > 0, "nothing came in backward"


def test_backward_waits_for_the_link(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it outruns the link, gradients that it has freed do not pile up on the device."""
    limit = 3 * 10 * 10 * 4
    monkeypatch.setattr("dos.gradients.offload.MOST_LEAVING", limit)
    most, copy, submit = [0], FakeCudaDevice.copy, HostLane.submit
    under_way: list[tuple[Any, int]] = []
    lane_goes_on = threading.Event()  # which waits for gradients, too

    def counted(device: FakeCudaDevice, op: Op, subgroup: int, copies: Sequence[Copy], *after: Any) -> Job:
        job = copy(device, op, subgroup, copies, *after)
        if op is Op.GRADIENT:
            under_way.append((job, sum(source.nbytes for _, source in copies)))
            running = [nbytes for job, nbytes in under_way if job.at() is None]
            most[0] = max(most[0], sum(running) if len(running) > 1 else 0)
        return job

    def late(lane: HostLane, work: Callable[[], None]) -> Future[None]:
        return submit(lane, lambda: (lane_goes_on.wait(), work())[1])

    monkeypatch.setattr(FakeCudaDevice, "copy", counted)
    monkeypatch.setattr(HostLane, "submit", late)
    lane_goes_on.set()
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(8)), nn.Linear(10, 100, bias=False))
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=FakeCudaDevice(runtime), offload_gradients=True)
    for _ in range(2):
        lane_goes_on.clear()
        model(torch.ones(10)).sum().backward()
        lane_goes_on.set()
        optimizer.step()
    assert most[0] == limit, "as much as may be, but for one that is larger by itself"


def test_what_has_left_is_given_to_others_between_steps(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the CPU lane's thread, where the allocator would be locked while forward runs, and not in hooks."""
    trimmed: list[tuple[int, str]] = []
    now = [-1]
    monkeypatch.setattr(
        FakeCudaDevice, "trim", lambda device: trimmed.append((now[0], threading.current_thread().name))
    )
    model, budget = mlp(), [10**9]
    device = FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=300, memory_budget=lambda: budget[0])
    optimizer.attach(model)

    def before_step(step: int) -> None:
        now[0], budget[0] = step, 10**9 if step < 2 else 0

    train(model, optimizer, 5, before_step=before_step)
    assert trimmed in ([(2, "MainThread")], [(3, "MainThread")]), "as soon as the CPU lane has come to that"


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
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), policy="stride:2", subgroup_size=600)
    train(model, optimizer, 1)
    assert named("a") is named("b"), "a range was made although no profiler runs"
    # Profiles are of one thread unless they are asked for all.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile:
        train(model, optimizer, 1)
        for lane in (Lane.READ, Lane.WRITE):
            before = time.perf_counter()
            with optimizer._device.disk_io(lane, 4096) as start:
                assert before <= start <= time.perf_counter()
    seen = {event.key for event in profile.key_averages() if event.key.startswith("dos ")}
    assert {"dos H2D prefetch 0", "dos GPU update 0", "dos D2H flush 0"} <= seen
    assert {"dos D2H gradient 1", "dos CPU update 600 parameters", "dos H2D parameter 1"} <= seen
    assert {f"dos {lane.value} 4096 bytes" for lane in (Lane.READ, Lane.WRITE)} <= seen
