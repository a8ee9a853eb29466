"""Where a system pins little memory at once, or in all: on the fake runtime. No GPU has run these."""

from __future__ import annotations

import gc
import math
import mmap
import platform
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import pin_limit, pinned, pinned_zeros
from dos.devices.pinned import excess, lazy_zeros, pin, pinned_bytes, pinned_parts, unpin
from dos.devices.pinned_allocation import allocate_pinned
from perfmodel import Placement
from tests.support.blocks import net, train
from tests.support.fake_cuda import FakeCudaDevice, Runtime, install
from tests.support.inside import session_of
from tests.support.training import FAST, everything

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = install(monkeypatch, None)
    pinned._warn.cache_clear()
    pinned._warn_of_parts.cache_clear()
    monkeypatch.setattr(pin_limit, "LEFT_TO_OTHERS", 8 * MIB)
    monkeypatch.setattr(pinned, "_forget_error", lambda device: None)
    yield runtime
    gc.collect()  # memory that is in a cycle frees itself, for which it needs this runtime
    assert set(Counter(runtime.refused).values()) <= {1}, "a call that failed was repeated"


def zeros(mib: int) -> Tensor:
    return lazy_zeros(mib * MIB, torch.uint8)


def test_memory_is_pinned_in_pieces_where_calls_are_limited(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.most_at_once = 5 * MIB
    tensors = [zeros(mib) for mib in (16, 13, 4, 16)]
    assert all(pin(tensor, DEVICE) for tensor in tensors)
    assert runtime.refused == [16 * MIB, 8 * MIB]
    assert [pinned_bytes(tensor) for tensor in tensors] == [tensor.nbytes for tensor in tensors]
    assert [part.stop // MIB for part in pinned_parts(tensors[1])] == [4, 8, 13]
    assert [r.message.split(" (")[0] for r in caplog.records] == [
        "host memory that was pinned in parts cannot be pinned as a whole"
    ]
    unpin(tensors[0], tensors[0])
    assert runtime.pinned == 33 * MIB


def test_parts_are_joined_once_where_calls_are_limited(runtime: Runtime) -> None:
    runtime.most_at_once = 5 * MIB
    fields = [zeros(16) for _ in range(3)]
    for field in fields:
        assert all(pin(part, DEVICE) for part in field.split(4 * MIB))
    before = dict(runtime.regions)
    for _ in range(2):
        assert all(pin(field, DEVICE) for field in fields), "in parts"
    assert runtime.refused == [16 * MIB]
    assert runtime.regions == before
    assert pin(fields[0][: 4 * MIB], DEVICE)
    assert runtime.regions == before, "nothing is to be done"


def test_others_keep_room_where_the_total_is_limited(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.most_in_all = 59 * MIB
    tensors = [zeros(16) for _ in range(6)]
    assert [pin(tensor, DEVICE) for tensor in tensors] == [True, True, True, False, False, False]
    assert runtime.pinned <= 51 * MIB
    assert runtime.pinned >= 48 * MIB - pin_limit.LEAST_BYTES
    assert runtime.refused == [mib * MIB for mib in (16, 8, 4, 2)]
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("pinning host memory failed (out of memory); copies to and from memory that is not")
    del tensors[1:4]
    gc.collect()
    assert pin(zeros(16), DEVICE), "what was pinned before can be pinned again"
    assert len(runtime.refused) == 4


def test_memory_that_others_have_taken_is_not_tried_again(runtime: Runtime) -> None:
    runtime.most_in_all = 40 * MIB
    tensors = [zeros(16) for _ in range(3)]
    for tensor in tensors:
        pin(tensor, DEVICE)
    del tensor, tensors[1:]
    gc.collect()
    runtime.most_in_all, refused = 20 * MIB, len(runtime.refused)
    assert not pin(zeros(15), DEVICE)
    assert not pin(zeros(15), DEVICE)
    assert len(runtime.refused) > refused
    assert runtime.pinned <= 20 * MIB


def test_nothing_can_be_pinned(runtime: Runtime) -> None:
    runtime.most_in_all = 0
    assert not any(pin(zeros(16), DEVICE) for _ in range(3))
    assert runtime.refused == [mib * MIB for mib in (16, 8, 4, 2)]
    assert not excess()


def test_a_kernel_that_leaks_is_asked_for_no_more_than_it_pins(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.11.0-17-generic")
    monkeypatch.setattr(pin_limit, "_LEAKS_ABOVE", 8 * MIB)
    runtime.most_at_once = 8 * MIB
    assert pin(zeros(24), DEVICE)
    assert not runtime.refused


@pytest.mark.parametrize(
    ("version", "release", "locked", "said"),
    [
        ("Linux version 5.15.167.4-microsoft-standard-WSL2", "5.15.167.4", -1, "memory= under [wsl2] in .wslconfig"),
        ("Linux version 6.10.14-linuxkit", "6.10.14-linuxkit", -1, "Docker Desktop"),
        ("Linux version 6.11.0-17-generic", "6.11.0-17-generic", -1, "Linux 6.11.0-17-generic cannot pin more than"),
        ("Linux version 6.8.0", "6.8.0", 8 * MIB, "locked memory, 8192 KiB (ulimit -l unlimited)"),
        ("Linux version 6.8.0", "6.8.0", -1, "Linux 6.8.0 has no limit that DOSAdam knows"),
    ],
)
def test_the_remedy_is_that_of_this_system(
    version: str, release: str, locked: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(pin_limit, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (locked, locked))
    assert said in pin_limit.remedy()
    assert ";" not in pin_limit.remedy(), "the other remedies are not for this system"


NUMEL = 4 * MIB


def trained(runtime: Runtime, **settings: object) -> tuple[DOSAdam, nn.Parameter]:
    """A parameter of which each field of state has 16 MiB, in four subgroups, after two steps."""
    parameter = nn.Parameter(torch.ones(NUMEL))
    optimizer = DOSAdam([parameter], device=FakeCudaDevice(runtime), subgroup_size=MIB, **settings)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.synchronize()
    return optimizer, parameter


def assert_trained_as_by_adamw(parameter: Tensor) -> None:
    """After the steps of `trained`."""
    reference = nn.Parameter(torch.ones(NUMEL))
    adamw = torch.optim.AdamW([reference])
    for _ in range(2):
        reference.grad = torch.ones_like(reference)
        adamw.step()
    torch.testing.assert_close(parameter, reference)


def test_reading_state_costs_one_failed_call(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.most_at_once = 4 * MIB
    optimizer, parameter = trained(runtime, policy="cpu")
    assert not runtime.refused
    for _ in range(2):
        entry = optimizer.state[parameter]
    assert runtime.refused == [16 * MIB]
    with pytest.raises(RuntimeError, match="invalid argument"):
        entry["exp_avg"].to("cuda")
    assert "copy its .clone() there" in caplog.text
    assert "Host memory: 0.06 of 0.06 GiB pinned" in optimizer.explain().splitlines()
    assert_trained_as_by_adamw(parameter)


def test_each_part_is_too_large(runtime: Runtime) -> None:
    runtime.most_at_once = 3 * MIB
    optimizer, parameter = trained(runtime, policy="cpu")
    assert optimizer.state[parameter]["exp_avg"].sum() > 0
    assert runtime.refused == [4 * MIB]


def test_staging_and_state_that_streams_are_pinned_first(runtime: Runtime) -> None:
    runtime.most_in_all = 42 * MIB
    optimizer, _ = trained(runtime, policy="stride:2")
    plan = optimizer.plan()
    assert plan is not None
    assert runtime.pinned <= 34 * MIB
    subgroups = session_of(optimizer).registry.accelerated
    (arena,) = {subgroup.arena for subgroup in subgroups}
    first = [(tensor, i) for i in plan.served(Placement.CPU) for tensor in arena.staging]
    first += [(tensor, i) for i in plan.served(Placement.GPU_STREAMED) for tensor in arena.homes]
    parts = [tensor.tensor[subgroups[i].start : subgroups[i].stop] for tensor, i in first]
    assert sum(part.nbytes for part in parts) == 32 * MIB
    assert [pinned_bytes(part) for part in parts] == [part.nbytes for part in parts]
    (line,) = [line for line in optimizer.explain().splitlines() if line.startswith("Host memory")]
    assert line.startswith(
        f"Host memory: {runtime.pinned / 2**30:.2f} of 0.05 GiB pinned; the rest is copied more slowly"
    )


def test_where_nothing_is_registered_the_runtime_allocates_what_transfers_need_most(runtime: Runtime) -> None:
    runtime.most_in_all, runtime.most_allocated = 0, math.inf
    optimizer, parameter = trained(runtime, policy="cpu")
    (arena,) = {subgroup.arena for subgroup in session_of(optimizer).registry.accelerated}
    assert [pinned_bytes(tensor.tensor) for tensor in arena.staging] == [16 * MIB] * 2
    assert [pinned_bytes(tensor.tensor) for tensor in arena.homes] == [0] * 2
    assert runtime.pinned == 32 * MIB
    assert "Host memory: 0.03 of 0.06 GiB pinned; the rest is copied more slowly" in optimizer.explain()
    part = arena.incoming.tensor[MIB : 2 * MIB]
    pinned.unpin(part, part)
    assert runtime.pinned == 32 * MIB, "it is pinned as long as it is there"
    assert_trained_as_by_adamw(parameter)


def test_what_the_runtime_does_not_allocate_is_not_asked_for_again(runtime: Runtime) -> None:
    runtime.most_in_all, runtime.most_allocated = 0, 5 * MIB
    device = FakeCudaDevice(runtime)
    found = [pinned_zeros(device, mib * MIB, torch.uint8) for mib in (8, 16, 8, 4)]
    assert [pinned_bytes(zeros) // MIB for zeros in found] == [0, 0, 0, 4]
    assert not any(zeros.any() for zeros in found)
    assert runtime.allocations_refused == [8 * MIB]
    assert runtime.pinned == 4 * MIB
    del found
    gc.collect()
    assert not runtime.pinned


def test_the_runtime_allocates_nothing_where_memory_is_registered_in_pieces_or_up_to_a_total(runtime: Runtime) -> None:
    runtime.most_at_once, runtime.most_in_all, runtime.most_allocated = 4 * MIB, 10 * MIB, math.inf
    device = FakeCudaDevice(runtime)
    found = [pinned_zeros(device, 8 * MIB, torch.uint8) for _ in range(3)]
    assert 0 < sum(map(pinned_bytes, found)) == runtime.pinned <= 10 * MIB


class Pins(EmulatedDevice):
    """Pins memory as a CUDA device does, and computes where weights can stream without one."""

    def pin(self, tensor: Tensor) -> bool:
        return pin(tensor, DEVICE)

    def allocate_pinned(self, nbytes: int) -> Tensor | None:
        return allocate_pinned(nbytes, DEVICE)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"policy": "cpu"},
    "attached": {"policy": "stride:2", "attach": {}},
    "saved tensors leave": {"policy": "cpu", "attach": {"activations": 1.0}},
    "gradients offloaded": {"policy": 0.5, "offload_gradients": True, "attach": {}},
    "disk": {"policy": "cpu", "host_memory": 70_000, "memory_budget": 0, "attach": {}},
    "weights stream": {"policy": "cpu", "offload_gradients": True, "attach": {"weights": 0}},
    "some stay": {"policy": "stride:2", "offload_gradients": True, "attach": {"weights": 2, "activations": 1.0}},
    "all stay": {"policy": 0.5, "offload_gradients": True, "attach": {"weights": 4}},
    "as planned": {"policy": "adaptive", "offload_gradients": True, "attach": {"weights": "auto"}},
}
LIMITS = {
    "none": (math.inf, math.inf, 0),
    "in all and at once": (2 * PAGE, 9 * PAGE, 0),
    "nothing is registered": (0, 0, math.inf),
    "nothing is pinned": (0, 0, 1),
}


LIMITED = [name for name in LIMITS if name != "none"]


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
@pytest.mark.parametrize("way", WAYS)
def test_pins_that_fail_change_no_result(way: str, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that pins more than two pages fails, and each beyond nine pages in all; or all calls.

    turn: which limit is for which way.
    """
    limited = LIMITED[(list(WAYS).index(way) + turn) % len(LIMITED)]
    monkeypatch.setattr(pin_limit, "LEFT_TO_OTHERS", 2 * PAGE)
    monkeypatch.setattr(pinned, "_forget_error", lambda device: None)
    monkeypatch.setattr(pinned._register, "__defaults__", (PAGE,))
    monkeypatch.setattr(pin_limit.PinLimit.fitting, "__defaults__", (PAGE, 0))
    ends, pins = [], []
    for most_at_once, most_in_all, most_allocated in (LIMITS["none"], LIMITS[limited]):
        runtime = install(monkeypatch, None)
        runtime.most_at_once, runtime.most_in_all = most_at_once, most_in_all
        runtime.most_allocated = most_allocated
        settings = dict(WAYS[way])
        attach = settings.pop("attach", None)
        if "host_memory" in settings:
            settings["disk"] = tmp_path
        model = net(torch.float32, blocks=10 if way == "disk" else 4)
        device = Pins(FAST, 10**8) if "weights" in (attach or {}) else FakeCudaDevice(runtime)
        optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=2048, **settings)
        if attach is not None:
            optimizer.attach(model, **attach)
        train(model, optimizer, 3)
        optimizer.synchronize()
        ends.append(everything(model, optimizer))
        train(model, optimizer, 1, first=3)  # after state was read
        optimizer.synchronize()
        ends[-1] += everything(model, optimizer)
        assert runtime.pinned <= max(most_in_all, most_allocated)
        pins.append(runtime.pinned)
        for refused in (runtime.refused, runtime.allocations_refused):
            assert set(Counter(refused).values()) <= {1}, "a call that failed was repeated"
        assert bool(runtime.refused) == (most_at_once < math.inf)
    assert all(end == ends[0] for end in ends)
    assert [bool(each) for each in pins] == [True, limited != "nothing is pinned"]
