"""Steps that are queued on a CUDA device: what waits for them, what is learnt from them, and captured graphs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices import Job
from dos.parameters.reconciler import Reconciler
from dos.planning.decisions import Decisions
from dos.state.device_store import DeviceStore
from dos.step.iteration import Iteration
from perfmodel import Lane, Op
from tests.support.fake_cuda import (
    FakeCudaDevice,
    FakeEvent,
    FakeStream,
    Runtime,
    install,
    use_virtual_time,
)
from tests.support.inside import session_of, state_on_device
from tests.support.training import bits, mlp


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
    parameter.grad = torch.ones(8)
    (0 * parameter).sum().backward()  # which ends the last step
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


def test_a_step_that_fails_behind_queued_ones_says_that_these_are_complete(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    runtime.caller = FakeStream(runtime)
    _, optimizer = resident(runtime)
    for _ in range(3):
        optimizer.step()
    monkeypatch.setattr(Reconciler, "count", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    with pytest.raises(RuntimeError, match="step 3 was the last complete one"):
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
    assert session_of(optimizer).ledger.unfinished
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
    memory = session_of(optimizer).assembly.decisions.memory
    before, memory.due = memory.reading, 0.0
    runtime.capturing = True
    backward()
    runtime.capturing = False
    assert memory.reading is before, "no memory was measured, although a sample is due"
    optimizer.step()
    assert not session_of(optimizer).ledger.unfinished, "what a replay reads is there"


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


def test_slots_are_given_back_when_step_returns(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward needs their memory, however late the CPU lane comes to that."""
    model, device = mlp(), FakeCudaDevice(runtime)
    optimizer = DOSAdam(model.parameters(), device=device, policy="stride:1", subgroup_size=300)
    release_slots, held = DeviceStore.release_slots, []
    monkeypatch.setattr(DeviceStore, "release_slots", lambda store: (time.sleep(0.05), release_slots(store)))
    for _ in range(3):
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        held.append(state_on_device(optimizer))
    assert held == [0, 0, 0]


def test_offloaded_gradients_cannot_be_captured(runtime: Runtime) -> None:
    parameter, _optimizer = resident(runtime, offload_gradients=True)
    runtime.capturing = True
    with pytest.raises(RuntimeError, match="offload_gradients=False"):
        parameter.sum().backward()


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
    pace = session_of(optimizer).assembly.decisions.pace
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
