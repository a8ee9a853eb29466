"""Transfers on the streams of a CUDA device whose work runs as late as it may, or in any order: no bit changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices import Copy, Job, Memory
from dos.state.record import ParameterRecord
from dos.step.host_lane import HostLane
from perfmodel import Op, Placement, Plan, Workload
from tests.support.fake_cuda import (
    FakeCudaDevice,
    FakeStream,
    Runtime,
    end_backward,
    install,
    queue_gradients,
)
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import RandomPlans, all_in
from tests.support.training import bits, mlp, train


def trained(
    device: FakeCudaDevice | None,
    *,
    attached: bool = False,
    width: int = 40,
    steps: int = 4,
    streams: Sequence[FakeStream] = (),
    prepare: Callable[[nn.Parameter], None] = lambda parameter: None,
    before_step: Callable[[DOSAdam], None] = lambda optimizer: None,
    **options: object,
) -> list[bytes]:
    """Losses, parameters and state after some steps, to the bit. On a device all that the caller does is late, too.

    streams: on which backward runs if not on the caller's. prepare: is called with each parameter before.
    """
    model = mlp(torch.bfloat16, width=width)
    parameters = list(model.parameters())  # the device reads these, which waits for no update
    for parameter in parameters:
        prepare(parameter)
    if device is not None:
        queue_gradients(device.runtime, model.parameters(), streams or None)

    def backward_is_issued(step: int) -> None:
        before_step(optimizer)
        if device is not None:
            was = bits(parameters)
            device.runtime.caller.enqueue(lambda: unchanged.append(bits(parameters) == was))
            end_backward(device.runtime, streams)

    unchanged: list[bool] = []
    settings = {"lr": 1e-2, "device": device, "subgroup_size": 300, **options}
    optimizer = DOSAdam(model.parameters(), **settings)
    if attached:
        optimizer.attach(model)
    losses = train(model, optimizer, steps, before_step=backward_is_issued)
    optimizer.synchronize()
    assert all(unchanged), "parameters were overwritten before the caller had read them"
    state = optimizer.state
    return bits([torch.tensor(losses), *model.parameters(), *(t for s in state.values() for t in s.values())])


def test_memory_is_released_behind_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose slots are in use."""
    expected = trained(None)

    def release(optimizer: DOSAdam) -> None:
        optimizer.register_step_post_hook(lambda *_: optimizer.release_memory())

    device = FakeCudaDevice(install(monkeypatch, None))
    assert trained(device, attached=True, policy="stride:1", before_step=release) == expected


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
    ("slots", "attached", "offload", "host_memory"),
    [
        *((1, True, False, 0), (3, True, False, 0), (1, False, False, 0), (3, True, True, 0)),
        *((1, False, False, 90_000), (1, False, False, 120_000), (1, True, False, 120_000)),
    ],
)
def test_no_order_of_work_changes_a_bit(
    slots: int,
    attached: bool,
    offload: bool,
    host_memory: int,
    seed: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With plans that change in every step. host_memory: beside which state is on disk, in windows; 0: there is none.

    Such orders as of a transfer from a window that backward begins and the next state in that window.
    """
    disk = {"subgroup_size": 1024, "disk": tmp_path, "host_memory": host_memory} if host_memory else {}
    width, steps = (450, 8) if host_memory else (40, 4)
    settings = {"policy": RandomPlans(seed or 0, slots), "before_step": plan_anew, "offload_gradients": offload, **disk}
    expected = trained(None, width=width, steps=steps)
    device = FakeCudaDevice(install(monkeypatch, seed))
    assert trained(device, attached=attached, width=width, steps=steps, **settings) == expected


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
def test_a_backward_on_two_streams(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one subgroup come from both, and lie otherwise than parameters, so that they are copied."""

    def relaid(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.set_(parameter.t().contiguous().t())
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.contiguous()))

    def flat_gradient(record: ParameterRecord, gradient: Tensor) -> Tensor:
        flat = made(record, gradient)
        if flat.data_ptr() != gradient.data_ptr():
            runtime.current_stream().enqueue(lambda: flat.copy_(made(record, gradient)))
        return flat

    settings: dict[str, Any] = {"policy": "cpu", "subgroup_size": 700, "offload_gradients": True, "prepare": relaid}
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


def test_backward_waits_for_the_link(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it outruns the link, gradients that it has freed do not pile up on the device."""
    limit = 3 * 10 * 10 * 4
    monkeypatch.setattr("dos.gradients.offload.MOST_IN_TRANSIT", limit)
    most, copy, add = [0], FakeCudaDevice.copy, HostLane.add
    under_way: list[tuple[Any, int]] = []
    lane_goes_on = threading.Event()  # which waits for gradients, too

    def counted(device: FakeCudaDevice, op: Op, subgroup: int, copies: Sequence[Copy], *after: Any) -> Job:
        job = copy(device, op, subgroup, copies, *after)
        if op is Op.GRADIENT and copies:  # others only compare parameters
            under_way.append((job, sum(source.nbytes for _, source in copies)))
            running = [nbytes for job, nbytes in under_way if job.at() is None]
            most[0] = max(most[0], sum(running) if len(running) > 1 else 0)
        return job

    def late(lane: HostLane, work: Callable[[], None]) -> Future[None]:
        return add(lane, lambda: (lane_goes_on.wait(), work())[1])

    monkeypatch.setattr(FakeCudaDevice, "copy", counted)
    monkeypatch.setattr(HostLane, "add", late)
    lane_goes_on.set()
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(8)), nn.Linear(10, 100, bias=False))
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=FakeCudaDevice(runtime), offload_gradients=True)
    for _ in range(2):
        lane_goes_on.clear()
        model(torch.ones(10)).sum().backward()
        lane_goes_on.set()
        optimizer.step()
    assert most[0] == limit, "as much as may be, but for one that is larger by itself"


@pytest.mark.parametrize("attached", [False, True])
def test_what_has_left_is_given_to_others_between_steps(
    attached: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little is free. Nothing runs beside it that queues work: on a GPU that waits until the device is idle.

    On an H100 the CPU lane stood still for 55 ms, until streamed updates had ended. Nor is it for hooks, or the lane.
    """
    trimmed: list[int] = []
    now = [-1]

    def trim(device: FakeCudaDevice) -> None:
        assert threading.current_thread() is threading.main_thread()
        step = session_of(optimizer).ledger.step
        assert step is None or step.host is None or step.host.done(), "the CPU lane still has turns"
        trimmed.append(now[0])

    def memory(device: FakeCudaDevice) -> Memory:
        return Memory(10**8 if now[0] >= 4 else 10**9, 10**9)

    monkeypatch.setattr(FakeCudaDevice, "trim", trim)
    monkeypatch.setattr(FakeCudaDevice, "memory", memory)

    def plan(work: Workload) -> Plan:
        return all_in(Placement.GPU_RESIDENT if now[0] < 2 else Placement.CPU, work)

    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), subgroup_size=300, policy=plan)
    if attached:
        optimizer.attach(model)

    def before_step(step: int) -> None:
        now[0] = step
        plan_anew(optimizer)

    train(model, optimizer, 6, before_step=before_step)
    assert trimmed == [4], "it left in step 2, when nobody needed it"
