"""`activations="auto"`: what the plan is told of saved tensors, and that they leave as it says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dos.activations.offload as offload_module
from dos import DOSAdam, EmulatedDevice
from dos.activations.offload import ActivationOffload
from dos.activations.saved import MOST
from dos.devices.base import Moment
from dos.planning.forecast import Room
from dos.step.pace import Pace
from perfmodel import Lane, Op, Placement, Plan, Workload
from perfmodel.policies import cpu_only, resident
from perfmodel.simulate import Scope, simulate
from perfmodel.workload import peak_room
from tests.support.activations import BATCH, EACH, LAYERS, WIDTH, Layers, saved, saves, start
from tests.support.inside import plan_anew, state_on_device
from tests.support.training import FAST, bits

TOTAL = (LAYERS + 1) * EACH


def step(model: nn.Module, optimizer: DOSAdam, batch: int = BATCH, number: int = 0, keeps_batch: bool = True) -> Tensor:
    """keeps_batch: whether the caller has the batch after forward."""
    optimizer.zero_grad()
    batches = [torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(number))]
    loss = model(batches[0] if keeps_batch else batches.pop()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Ticking(EmulatedDevice):
    """A device whose clock goes on by a millisecond at each mark, so that no plan follows from how busy the host is."""

    @functools.cached_property
    def ticks(self) -> Iterator[int]:
        return itertools.count()

    def mark(self) -> Moment:
        return Moment(next(self.ticks) * 1e-3)


class Leaving:
    """A policy that lets so many groups of saved tensors leave, and notes what it is told."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.told: list[Workload] = []

    def __call__(self, workload: Workload) -> Plan:
        self.told.append(workload)
        sums = [0, *itertools.accumulate(group.nbytes for group in workload.activations)]
        left = next((nbytes for nbytes in sums[self.groups :] if nbytes >= workload.activation_least_bytes), sums[-1])
        return dataclasses.replace(cpu_only(workload), activation_bytes=left)


def test_the_first_iteration_tells_what_is_saved_and_when() -> None:
    policy = Leaving(0)
    model, optimizer, _ = start(policy=policy)
    for _ in range(2):
        step(model, optimizer)
        assert not policy.told[-1].activations
    optimizer.synchronize()
    assert optimizer.metrics()["activation_bytes"] == 0
    step(model, optimizer)
    groups = policy.told[-1].activations
    assert 0 < len(groups) <= MOST
    assert sum(group.nbytes for group in groups) == pytest.approx(TOTAL, rel=0.01)
    assert groups[0].born < groups[-1].born
    assert groups[-1].due < groups[0].due


@pytest.mark.parametrize("groups", [5, LAYERS + 1])
def test_as_much_leaves_as_the_plan_says_and_no_bit_changes(groups: int) -> None:
    model, optimizer, offload = start(policy=Leaving(groups))
    losses = [step(model, optimizer, number=number) for number in range(4)]
    saves(optimizer)
    losses += [step(model, optimizer, number=4)]
    assert saves(optimizer) == groups * [EACH]
    assert offload.share == pytest.approx(groups / (LAYERS + 1), abs=0.01)
    optimizer.synchronize()
    expected, other, _ = start(policy="cpu")
    expected_losses = [step(expected, other, number=number) for number in range(5)]
    other.synchronize()
    assert bits(losses) == bits(expected_losses)
    assert bits(model.parameters()) == bits(expected.parameters())


@pytest.mark.parametrize("attached", [True, False])
def test_the_timeline_has_what_left_and_came_back_as_the_predicted_one_has(attached: bool) -> None:
    policy = Leaving(5)
    model, optimizer, _ = start(policy=policy)
    if not attached:
        optimizer.attach(nn.Sequential(model.layers[0]))
        context = optimizer.offload_activations("auto")
        model.register_forward_pre_hook(lambda *_: context.__enter__() and None)
        model.register_forward_hook(lambda *_: context.__exit__(None, None, None))
    for number in range(4):
        step(model, optimizer, number=number)
    optimizer.synchronize()
    found, plan = optimizer.timeline(), optimizer.plan()
    work = dataclasses.replace(policy.told[-1], forward_s=1.0, backward_s=2.0)
    predicted = simulate(plan, work, FAST, Scope.beside(work))
    for op, lane in ((Op.SAVE, Lane.D2H), (Op.RESTORE, Lane.H2D)):
        moved = [[span for span in timeline.spans if span.op is op] for timeline in (found, predicted)]
        assert [[(s.lane, s.subgroup, s.nbytes) for s in spans] for spans in moved] == 2 * [5 * [(lane, None, EACH)]]
    left, back = ([span for span in found.spans if span.op is op] for op in (Op.SAVE, Op.RESTORE))
    forward, backward = found.beside
    assert all(forward.start < span.start < span.end < backward.end for span in (*left, *back))
    assert all(save.end < restore.start for save, restore in zip(left, reversed(back), strict=True))
    slices = [event for event in found.chrome_trace()["traceEvents"] if event.get("cat") == "save"]
    assert [event["args"] for event in slices] == 5 * [{"bytes": EACH}]


def test_batches_of_other_lengths_are_no_new_beginning() -> None:
    policy = Leaving(5)
    model, optimizer, _ = start(policy=policy)
    for number, batch in enumerate([BATCH, BATCH, BATCH, BATCH // 2, BATCH // 3, BATCH]):
        saves(optimizer)
        step(model, optimizer, batch, number)
    assert saves(optimizer) == 5 * [EACH]
    assert len({workload.activations for workload in policy.told if workload.activations}) == 1


def test_where_the_share_falls_state_leaves_first() -> None:
    policy = Leaving(9)
    model, optimizer, _ = start(policy=policy)
    for number in range(3):
        step(model, optimizer, number=number)
    policy.groups = 3
    plan_anew(optimizer)
    saves(optimizer)
    step(model, optimizer)
    assert saves(optimizer) == 9 * [EACH]
    step(model, optimizer)
    assert saves(optimizer) == 9 * [EACH], "the state that the last plan sends home is still leaving"
    step(model, optimizer)
    assert saves(optimizer) == 3 * [EACH]


def test_what_has_to_leave_makes_the_room_that_is_missing() -> None:
    model, optimizer, offload = start(policy=Leaving(0))
    for number in range(3):
        step(model, optimizer, number=number)
    for short in (0, 1, EACH, EACH + 1, 3 * EACH, TOTAL):
        told = offload.recorded(Room(0, 0, short=short), False)
        room = peak_room(told["activations"], told["activation_least_bytes"])
        assert room >= min(short, peak_room(told["activations"], TOTAL))
        assert (told["activation_least_bytes"] > 0) == (short > 0)


@pytest.mark.parametrize("policy", ["cpu", 0.5, Leaving(0)])
def test_a_policy_that_lets_none_leave_is_named(policy: str | float | Leaving) -> None:
    model, optimizer, _ = start(policy=policy)
    for _ in range(3):
        step(model, optimizer)
    optimizer.synchronize()
    assert "stay on the device, because this policy moves none" in optimizer.explain()
    assert optimizer.metrics()["activation_bytes"] == 0


def test_memory_is_told_as_if_all_stayed() -> None:
    def room(groups: int) -> float:
        policy = Leaving(groups)
        device = EmulatedDevice(FAST, 4 * TOTAL, occupied=2 * TOTAL)
        model, optimizer, _ = start(policy=policy, device=device)
        for number in range(4):
            step(model, optimizer, number=number)
        return policy.told[-1].peak_free_bytes

    assert room(0) == pytest.approx(room(LAYERS + 1), abs=2 * EACH)


def full_of_state(others: Callable[[], int]) -> tuple[nn.Module, DOSAdam, ActivationOffload, EmulatedDevice]:
    """Training on a device with room for all state and all saved tensors, and for EACH * 4 more."""
    parameters = sum(p.nbytes for p in Layers().parameters())
    capacity = (3 * parameters + TOTAL + 4 * EACH) * 50 // 49  # of parameters and two moments
    device = Ticking(FAST, capacity, occupied=lambda: parameters + others())
    model, optimizer, offload = start(policy="adaptive", device=device)
    for number in range(8):
        step(model, optimizer, number=number)
    assert residents(optimizer) == 1
    assert offload.share == 0
    return model, optimizer, offload, device


def residents(optimizer: DOSAdam) -> float:
    """Share of the subgroups that the plan has on the device."""
    plan = optimizer.plan()
    return plan.placements.count(Placement.GPU_RESIDENT) / len(plan)


def runs_out(model: nn.Module, optimizer: DOSAdam) -> bool:
    """A step as `release_memory` says; whether it took a second attempt."""
    try:
        step(model, optimizer)
    except torch.OutOfMemoryError:
        pass
    else:
        return False
    optimizer.zero_grad()
    optimizer.release_memory()
    step(model, optimizer)
    return True


@pytest.mark.parametrize("more", [5, 8])
def test_when_memory_runs_out_the_next_plan_raises_the_share_before_it_gives_up_residents(more: int) -> None:
    others = 0
    model, optimizer, offload, device = full_of_state(lambda: others)
    others = more * EACH
    assert runs_out(model, optimizer)
    assert offload.share == 1, "it falls once the plan's state is there"
    plan = optimizer.plan()
    # The margin, and a sixteenth of what is saved that is on its way, take as much as was free before, and more.
    assert (more - 5) * EACH < plan.activation_bytes < (more + 4) * EACH
    assert residents(optimizer) == 1
    assert not any(runs_out(model, optimizer) for _ in range(6))
    assert device.own_peak_bytes <= device.capacity


def test_when_it_runs_out_again_at_once_all_leaves_and_state_counts_on_none_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others come and go in forward, and no sample shows them, however long a busy host takes meanwhile."""
    others, often = 0, 0
    model, optimizer, _, device = full_of_state(lambda: others)

    def come(*_: object) -> None:
        nonlocal others
        memory = device.memory()
        monkeypatch.setattr(device, "memory", lambda: memory)
        others = 6 * EACH

    def go(*_: object) -> None:
        nonlocal others
        others = 0
        monkeypatch.undo()

    model.layers[-2].register_forward_pre_hook(come)
    model.layers[-1].register_forward_pre_hook(go)
    model.register_forward_hook(go, always_call=True)
    for _ in range(8):
        often += runs_out(model, optimizer)
    assert often == 2
    plan = optimizer.plan()
    assert plan.activation_bytes == TOTAL
    assert residents(optimizer) < 1


def test_state_gives_way_to_what_backward_needs() -> None:
    """In backward others take what is free until state has left: what is away could not come back beside it."""
    losses, results = [], []
    for others_come in (False, True):
        others = 0
        device = EmulatedDevice(FAST, 100 * TOTAL, occupied=lambda: others)  # noqa: B023
        model, optimizer, _ = start(policy="adaptive", device=device)
        optimizer.attach(model, activations=1.0)
        for number in range(3):
            step(model, optimizer, number=number)
        optimizer.synchronize()
        assert optimizer.metrics()["share_gpu_resident"] == 1

        def take(gradient: Tensor) -> None:
            nonlocal others
            held = state_on_device(optimizer)  # noqa: B023
            others = others + max(0, device.memory().free - EACH * 3 // 4) if held else 0  # noqa: B023

        y = torch.ones(BATCH, WIDTH)
        for layer in model.layers[:10] if others_come else ():  # once the peak was seen
            layer.register_forward_hook(lambda module, inputs, output: output.register_hook(take) and None)
        loss = model(y).square().mean()
        loss.backward()
        assert (state_on_device(optimizer) == 0) == others_come
        for layer in model.layers:
            layer._forward_hooks.clear()
        others = 0
        optimizer.step()
        optimizer.synchronize()
        assert (optimizer.metrics()["share_gpu_resident"] < 1) == others_come
        losses.append(step(model, optimizer))
        for _ in range(6):
            step(model, optimizer)
        optimizer.synchronize()
        assert optimizer.metrics()["share_gpu_resident"] == 1, "it is tried again soon"
        results.append(bits(model.parameters()))
    assert losses[0] == losses[1]
    assert results[0] == results[1]


class Refusing(EmulatedDevice):
    """Notes what it had no memory for."""

    def allocate(self, nbytes: int) -> Tensor:
        try:
            return super().allocate(nbytes)
        except torch.OutOfMemoryError:
            self.refused.append(nbytes)
            raise

    @functools.cached_property
    def refused(self) -> list[int]:
        return []


class Full:
    """A policy that lets all leave that may, and makes resident what there is room for then."""

    def __call__(self, workload: Workload) -> Plan:
        sums = [0, *itertools.accumulate(group.nbytes for group in workload.activations)]
        left = max(nbytes for nbytes in sums if nbytes <= workload.activation_host_bytes)
        free = min(workload.peak_free(left), workload.shared_free(left))
        count = int(free // workload.slot_bytes)
        plan = resident(dataclasses.replace(workload, peak_free_bytes=math.inf, shared_free_bytes=math.inf))
        plan = plan.on_host(range(count, len(plan)))
        assert workload.has_room(dataclasses.replace(plan, activation_bytes=left))
        return dataclasses.replace(plan, activation_bytes=left)


@pytest.mark.parametrize(
    ("batch", "spare", "keeps_batch"),
    [(BATCH, 0, True), (BATCH // 2, 40_000, False), (BATCH * 5 // 8, 400_000, True)],
)
def test_there_is_all_the_memory_that_leaving_is_said_to_make(batch: int, spare: int, keeps_batch: bool) -> None:
    """State takes all that it may.

    When backward ends saved tensors have gone, but all gradients are there. The batch leaves in vain: the caller has
    it, too, at least until forward ends, which is seen when it has left.
    """
    each = EACH * batch // BATCH
    parameters = sum(p.nbytes for p in Layers().parameters())
    device = Refusing(FAST, (parameters + (LAYERS + 5) * each + spare) * 50 // 49, occupied=parameters)
    model, optimizer, offload = start(policy=Full(), device=device, subgroup_size=1000)
    for number in range(8):
        step(model, optimizer, batch, number, keeps_batch)
    assert offload.share > 0
    held = state_on_device(optimizer)
    assert held > spare + EACH
    assert device.refused == []


def test_what_does_not_fit_without_leaving_leaves_and_the_peak_is_kept() -> None:
    """The first iterations have room for all, then the model takes most of what they leave."""
    others = 0
    device = EmulatedDevice(FAST, TOTAL * 11 // 10, occupied=lambda: others)
    model, optimizer, offload = start(policy=Leaving(0), device=device)
    for number in range(3):
        step(model, optimizer, number=number)
    assert offload.share == 0
    others = TOTAL // 11
    for number in range(3):
        step(model, optimizer, number=number)
    assert device.own_peak_bytes <= device.capacity
    assert offload.share > 0


def test_the_host_limits_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Leaving(MOST)
    model, optimizer, _ = start(policy=policy)
    for number in range(2):
        step(model, optimizer, number=number)
    monkeypatch.setattr(offload_module, "available_bytes", lambda: TOTAL // 2)
    step(model, optimizer)
    assert policy.told[-1].activation_host_bytes <= TOTAL // 2
    step(model, optimizer)
    assert saved(optimizer) <= TOTAL // 2


def test_a_memory_budget_is_not_exceeded_by_what_leaving_makes_free() -> None:
    policy = Leaving(0)
    model, optimizer, _ = start(policy=policy, memory_budget=10_000, subgroup_size=500)
    for number in range(3):
        step(model, optimizer, number=number)
    assert policy.told[-1].activation_host_bytes == 0


@pytest.mark.parametrize(("policy", "stalls"), [(Leaving(0), False), (Leaving(LAYERS + 1), True)])
def test_forward_and_backward_do_not_count_the_waits_for_what_leaves(
    policy: Leaving, stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan adds them to how long compute lasts; if that had them in it, leaving would seem to cost nothing."""
    told = []
    for name in ("backward_begins", "step"):

        def noted(self: Pace, *arguments: Any, name: str = name, **named: Any) -> None:
            told.append((name, len(named.get("stalls", arguments[-1]))))

        monkeypatch.setattr(Pace, name, noted)
    model, optimizer, _ = start(policy=policy)
    for number in range(4):
        step(model, optimizer, number=number)
    told.clear()
    step(model, optimizer)
    assert [name for name, _ in told] == ["backward_begins", "step"]
    assert all((count > LAYERS // 2) == stalls for _, count in told)
