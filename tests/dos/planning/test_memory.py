"""Training in memory that is little, that others take, or that lies: figures change where state is, never a bit."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.devices import Memory
from dos.planning.forecast import MARGIN, Forecast
from dos.planning.monitor import MemoryMonitor
from dos.planning.policies import AdaptivePolicy
from perfmodel import Lane, Op, Placement, Plan, Workload
from tests.support.training import FAST, bits, bits_on_host, mlp, train, trained_as_on_host

pytestmark = pytest.mark.usefixtures("one_core")

STATE_BYTES = 8 * sum(p.numel() for p in mlp().parameters())
STEPS = 12


class Watched(EmulatedDevice):
    """Remembers the most that state has held, and whether memory was denied. reports: what it says when it lies."""

    def __init__(
        self, capacity: int = 10**6, reports: Callable[[Memory], Memory] = lambda true: true, occupied: Any = 0
    ) -> None:
        self.reports = reports
        super().__init__(FAST, capacity, occupied)
        self.most, self.denied = 0, False

    def memory(self) -> Memory:
        return self.reports(super().memory())

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = super().allocate(nbytes)
        except torch.OutOfMemoryError:
            self.denied = True
            raise
        self.most = max(self.most, self.usage().held)
        return buffer


@pytest.mark.parametrize(
    ("budget", "attach"),
    [(0, False), (STATE_BYTES // 2, True), (0.01, False), (0.0, True), (10**9, True), (1.0, False)],
)
def test_no_more_is_held_than_the_budget(budget: float, attach: bool) -> None:
    """Subgroups whose tensors fill whole 256-byte lines: nothing is lost to alignment."""
    device = Watched()
    trained_as_on_host(device, attach, subgroup_size=128, memory_budget=budget)
    limit = int(budget * device.capacity) if isinstance(budget, float) else budget
    assert device.most <= limit
    assert (device.most >= STATE_BYTES) == (limit >= 2 * STATE_BYTES)


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_no_more_is_held_than_the_budget_while_state_moves_beside_the_forward(
    monkeypatch: pytest.MonkeyPatch, offload_gradients: bool
) -> None:
    """State that moves home takes its memory until the step ends, in which the next forward runs."""
    model, size, others = mlp(), 128, itertools.cycle([False, True, True, False, False])
    total, fits = -(-sum(p.numel() for p in model.parameters()) // size), 6
    budget = fits * 8 * size

    def alternating(policy: AdaptivePolicy, workload: Workload) -> Plan:
        stay = range(total - 4, total) if next(others) else range(4)
        placements = [Placement.GPU_RESIDENT if i in stay else Placement.GPU_STREAMED for i in range(total)]
        return Plan(tuple(placements), tuple(range(total)), slots=2)

    monkeypatch.setattr(AdaptivePolicy, "__call__", alternating)
    gradients = 4 * size * offload_gradients
    device = Watched()
    optimizer = DOSAdam(
        model.parameters(),
        device=device,
        subgroup_size=size,
        memory_budget=lambda: budget + gradients,
        offload_gradients=offload_gradients,
    )
    optimizer.attach(model)
    for step in range(12):
        train(model, optimizer, 1, first_step=step)
        assert device.most <= budget + 2 * gradients, "those of one slot are set apart"
    optimizer.synchronize()
    assert optimizer.plan().served(Placement.GPU_RESIDENT)
    assert bits(model.parameters()) == bits_on_host()


@pytest.mark.parametrize("policy", [0.0, 0.5, "stride:2"])
def test_fixed_policies_do_not_look_at_memory_and_what_fails_is_updated_on_the_host(policy: str | float) -> None:
    _, optimizer = trained_as_on_host(Watched(STATE_BYTES // 3), policy=policy, memory_budget=0)
    assert any(p is not Placement.CPU for p in optimizer.plan().placements), "as the policy says"
    assert optimizer.timeline().on(Lane.GPU)
    assert optimizer.timeline().on(Lane.CPU)


def test_slots_that_are_denied_are_remembered_as_rooms_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has room of its own in this plan, so that the first allocation is that of a slot."""
    told: list[int] = []
    monkeypatch.setattr(Forecast, "allocation_failed", lambda forecast, held: told.append(held))
    model, device = mlp(), Watched(2 * STATE_BYTES, occupied=2 * STATE_BYTES - 1)
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=128, policy="stride:1")
    train(model, optimizer, 1)
    optimizer.synchronize()
    assert told == [0]
    assert set(optimizer.plan().placements) == {Placement.CPU}, "the plan that ran"
    assert bits(model.parameters()) == bits_on_host(steps=1)


def test_a_figure_that_is_too_high_makes_no_state_travel() -> None:
    """What could not be allocated is tried again now and then; what is there stays there."""
    model, device = (
        mlp(),
        Watched(2 * STATE_BYTES, lambda true: Memory(true.total, true.total), occupied=3 * STATE_BYTES // 2),
    )
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=128, policy=_all_that_fit)
    denied, flushes = [], 0
    for step in range(60):
        device.denied = False
        train(model, optimizer, 1, first_step=step)
        denied.append(device.denied)
        flushes += sum(span.op is Op.FLUSH for span in optimizer.timeline().spans)
    assert 3 <= sum(denied) <= 6
    assert flushes == 0
    assert device.usage().held == 5 * 8 * 128
    assert bits(model.parameters()) == bits_on_host(steps=60)


def _all_that_fit(work: Workload) -> Plan:
    """Residents as far as there is room, the others on the host."""
    n = len(work.subgroups)
    resident = n if work.peak_free_bytes >= work.state_bytes else int(work.peak_free_bytes // work.slot_bytes)
    return Plan((Placement.GPU_RESIDENT,) * resident + (Placement.CPU,) * (n - resident), tuple(range(n)), 0)


@pytest.mark.parametrize("capacity", [STATE_BYTES // 2, STATE_BYTES, 2 * STATE_BYTES])
def test_offloaded_gradients_have_room_to_come_up_beside_residents(capacity: int) -> None:
    model, device = mlp(), Watched(capacity)
    optimizer = DOSAdam(
        model.parameters(), device=device, subgroup_size=128, policy=_all_that_fit, offload_gradients=True
    )
    train(model, optimizer, 1)
    resident = len(optimizer.plan().served(Placement.GPU_RESIDENT))
    assert resident == min(11, int(capacity * (1 - MARGIN) - 4 * 128) // (8 * 128))
    for step in range(1, STEPS):
        train(model, optimizer, 1, first_step=step)
        moved = [span.subgroup for span in optimizer.timeline().spans if span.op is Op.PREFETCH]
        assert len(moved) == resident, "one gradient each, and no state"
        assert not any(span.op is Op.FLUSH for span in optimizer.timeline().spans)
        assert not device.denied
    assert bits(model.parameters()) == bits_on_host()


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_memory_is_sampled_at_gradients_that_stay_for_hooks_of_user_code(offload_gradients: bool) -> None:
    """The peak is in backward, where no gradient is moved: state must leave room for it from the first step on."""
    model, used = mlp(), 0

    def use(nbytes: int) -> None:
        nonlocal used
        used = nbytes
        device.usage()  # notes the peak

    device = Watched(2 * STATE_BYTES, occupied=lambda: used)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: use(3 * STATE_BYTES // 2))
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=128, offload_gradients=offload_gradients)
    train(model, optimizer, STEPS, before_step=lambda step: use(0))
    assert device.peak_bytes <= device.capacity
    assert device.most, "some state has room"
    assert bits(model.parameters()) == bits_on_host()


def test_an_iteration_that_is_tried_again_has_its_peak_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=Watched(), subgroup_size=128)
    train(model, optimizer, 2)
    phases: list[Op] = []
    monkeypatch.setattr(MemoryMonitor, "enter", lambda monitor, phase: phases.append(phase))

    def attempt() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 24)).square().mean().backward()

    attempt()
    optimizer.release_memory()
    attempt()
    optimizer.step()
    assert phases == [Op.BACKWARD, Op.BACKWARD, Op.UPDATE]


def test_the_first_peak_is_seen_when_samples_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dos.planning.monitor.SHARE_AT_FIRST", 1e-9)
    model = mlp()
    parameters = list(model.parameters())
    own = [0]
    device = EmulatedDevice(FAST, capacity=STATE_BYTES + STATE_BYTES // 2, occupied=lambda: own[0])

    def take(nbytes: int) -> None:
        own[0] = nbytes
        device.usage()  # the peak counts, seen by the optimizer or not

    first, last = parameters[-1], parameters[0]  # in the order of backward
    for parameter, nbytes in ((first, STATE_BYTES // 2), (last, STATE_BYTES)):
        parameter.register_post_accumulate_grad_hook(lambda _, nbytes=nbytes: take(nbytes))
    optimizer = DOSAdam(parameters, device=device, subgroup_size=128)
    for _ in range(3):
        own[0] = 0
        optimizer.zero_grad()
        model(torch.ones(2, 24)).square().mean().backward()
        own[0] = STATE_BYTES // 2
        optimizer.step()
    assert STATE_BYTES < device.peak_bytes <= device.capacity


def test_memory_that_others_have_only_within_a_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dos.planning.monitor.SHARE_OF_TIME", math.inf)
    model, others = mlp(), [0]
    device = EmulatedDevice(FAST, capacity=10**6, neighbour=lambda: others[0])
    seen = list[int]()
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=128)
    optimizer.attach(model)
    first, *_, last = model
    first.register_forward_hook(lambda *_: others.__setitem__(0, 400_000))
    last.register_forward_pre_hook(lambda *_: others.__setitem__(0, 0))
    sample = Forecast.sample
    monkeypatch.setattr(
        Forecast,
        "sample",
        lambda self, phase, *a, others, **k: (seen.append(others), sample(self, phase, *a, others=others, **k)),
    )
    train(model, optimizer, 2)
    assert max(seen) == 400_000


def test_a_child_that_is_forked_while_a_thread_samples_can_sample(device: EmulatedDevice) -> None:
    sampling, forked = threading.Event(), threading.Event()

    def held() -> int:
        if threading.current_thread() is thread:
            sampling.set()
            forked.wait()
        return 0

    thread = threading.Thread(target=lambda: monitor.sample(always=True))
    monitor = MemoryMonitor(device, held=held)
    thread.start()
    sampling.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the timeout of tests
        signal.alarm(60)
        monitor.sample(always=True)
        os._exit(0)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
