"""Memory that runs short in a step: nothing has changed then, and going on with more is as if it had not."""

from __future__ import annotations

import itertools
import mmap
import shutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.machine import host_memory
from perfmodel import Placement, Plan, Workload
from tests.support.calls import ATTACHED, CALLS, DISK, HALF, HOST, OFFLOADED, go_on, started, undisturbed
from tests.support.calls import CPU as ON_CPU
from tests.support.devices import Amount, Pinning
from tests.support.inside import plan_anew
from tests.support.programs import Program, Training
from tests.support.training import FAST, bits

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

CPU, STREAMED, RESIDENT = Placement
PAGE = mmap.PAGESIZE // 4
"""Elements of float32."""


class Chosen:
    """A policy that is told."""

    def __init__(self, *placements: Placement) -> None:
        self.now = placements

    def __call__(self, workload: Workload) -> Plan:
        return Plan(self.now, tuple(range(len(self.now))), slots=1)


def step(parameter: Tensor, optimizer: DOSAdam, value: float = 0.5) -> None:
    parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


@pytest.mark.parametrize(
    ("before", "now", "offloads", "occupied"),
    [((CPU, RESIDENT), (RESIDENT, CPU), False, 0), ((STREAMED,), (RESIDENT,), True, 9 * PAGE)],
    ids=["one subgroup comes, another leaves and has no home", "state fits, its offloaded gradient does not"],
)
def test_a_step_for_which_the_host_has_no_room_is_as_if_it_had_not_been(
    before: Sequence[Placement],
    now: Sequence[Placement],
    offloads: bool,
    occupied: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was to arrive is not taken for state, and what came is given back once."""
    policy, others = Chosen(*before), Amount()
    device = EmulatedDevice(FAST, 20 * PAGE if occupied else 10**9, others)
    parameter, twin = (nn.Parameter(torch.ones(len(now) * PAGE, dtype=torch.bfloat16)) for _ in range(2))
    settings = {"policy": policy, "device": device, "subgroup_size": PAGE, "offload_gradients": offloads}
    optimizer, reference = DOSAdam([parameter], **settings), DOSAdam([twin])
    step(parameter, optimizer)
    policy.now, others.nbytes, held = now, occupied, device.usage().held
    plan_anew(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: 0)
        with pytest.raises(MemoryError):
            step(parameter, optimizer)
    assert device.usage().held == held
    optimizer.step()
    for _ in range(2):
        step(twin, reference)
    assert bits([parameter, *optimizer.state[parameter].values()]) == bits([twin, *reference.state[twin].values()])


@pytest.mark.parametrize("size", [PAGE, PAGE // 2, 3 * PAGE // 4])
def test_no_page_is_pinned_twice(size: int) -> None:
    device, parameter = Pinning(), nn.Parameter(torch.ones(4 * PAGE + 100))
    optimizer = DOSAdam([parameter], policy=0.5, subgroup_size=size, device=device)
    for _ in range(2):
        step(parameter, optimizer)
        assert len(optimizer.state) == 1
    pages = sorted((first // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)) for first, end in device.pinned)
    assert len(pages) > 2
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(pages))


def test_parameters_on_the_host_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = DOSAdam([parameter])
    step(parameter, optimizer)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4000)
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(10))})


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch takes no gradient of another dtype")
def test_staging_that_was_widened_counts_once() -> None:
    parameter = nn.Parameter(torch.ones(PAGE, dtype=torch.bfloat16))
    optimizer = DOSAdam([parameter], policy="cpu", device=EmulatedDevice(FAST, 10**9))
    for dtype in (torch.bfloat16, torch.float32):
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = torch.ones(PAGE, dtype=dtype)
        optimizer.step()
    assert optimizer.metrics()["host_held_bytes"] == (10 + 2 + 4) * PAGE


def test_homes_are_pinned_part_by_part_before_state_leaves() -> None:
    """While memory grows short, one part a step; the step in which state leaves then pins nothing."""
    parameter = nn.Parameter(torch.ones(4 * PAGE))
    each, budget = 8 * PAGE, [0]
    device = Pinning(100 * each)
    optimizer = DOSAdam([parameter], subgroup_size=PAGE, device=device, memory_budget=lambda: budget[0])

    def pins(nbytes: int) -> int:
        budget[0], before = nbytes, len(device.pinned)
        step(parameter, optimizer)
        return len(device.pinned) - before

    assert [pins(4 * each + nbytes) for nbytes in (50 * each, 40 * each, 40 * each)] == [0, 0, 0], "there is plenty"
    parts = 4 * (2 + 2)  # two fields, a gradient and a parameter
    assert [pins(5 * each - i) for i in range(parts + 2)] == [1] * parts + [0] * 2
    assert pins(2 * each) == 0
    assert optimizer.plan().placements.count(RESIDENT) == 2
    assert pins(2 * each) == 0


def test_pinning_that_lasts_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for patched, lines in (False, 0), (True, 5):
        device = Pinning()
        if patched:
            now = SimpleNamespace(perf_counter=lambda device=device: 2.0 * len(device.pinned))
            monkeypatch.setattr("dos.machine.terminal.time", now)
        parameter = nn.Parameter(torch.ones(4 * PAGE))
        optimizer = DOSAdam([parameter], policy="cpu", subgroup_size=PAGE, device=device)
        caplog.clear()
        with caplog.at_level("INFO", "dos.machine.terminal"):
            step(parameter, optimizer)
        told = [r.message for r in caplog.records if r.name == "dos.machine.terminal" and "pinning" in r.message]
        assert len(told) == lines
    ends = [message.partition("GiB, ")[2] for message in told]
    assert told[0].startswith("pinning host memory, once: 0 of 0 GiB, ")
    left = [float(end.removesuffix(" s left")) for end in ends]
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0]


Short = tuple[Callable[[pytest.MonkeyPatch, Training], None], type[Exception], str]


def host_has(bytes_per_parameter: int) -> Short:
    """Less than state and staging take."""

    def shorten(patch: pytest.MonkeyPatch, training: Training) -> None:
        there = bytes_per_parameter * sum(p.numel() for p in training.model.parameters())
        patch.setattr(host_memory, "available_bytes", lambda: there)

    return shorten, MemoryError, r"optimizer state \(DOSAdam\) needs 0\.00 GiB of host memory"


def disk_is_full(patch: pytest.MonkeyPatch, training: Training) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))


DISK_IS_FULL: Short = (disk_is_full, OSError, r"dos_disk.*: state needs \d+ more bytes on disk, found 0 free")


@pytest.mark.parametrize(
    ("call", "program", "short"),
    [
        *(("first step", program, host_has(0)) for program in (HOST, ON_CPU, ATTACHED, OFFLOADED, HALF)),
        ("first step, gradients by hand", OFFLOADED, host_has(0)),
        ("first step", HOST, host_has(6)),
        ("first step", ON_CPU, host_has(10)),
        ("first step", DISK, DISK_IS_FULL),
    ],
)
def test_without_room_for_state_nothing_has_changed_and_training_goes_on_with_more(
    call: str, program: Program, short: Short
) -> None:
    before, after, later = undisturbed(program, call)
    training, (shorten, error, said) = started(program, CALLS[call]), short
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, training)
        for _ in range(2):
            with pytest.raises(error, match=said):
                training.optimizer.step()
    assert training.read() == before
    assert program is HOST or training.device.usage().held == 0
    training.optimizer.step()
    assert training.read() == after
    assert go_on(training) == later
