"""NVML in all its moods, budgets, hysteresis, and memory that lies: figures change where state is, never a bit."""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.devices import Cached, Memory
from dos.memory.forecast import MARGIN
from dos.memory.monitor import SHARE_AT_FIRST, SHARE_OF_TIME, Budget, MemoryMonitor
from dos.memory.reading import _REASONS, Reading, Source
from perfmodel import Lane, Op, Placement, Plan, SubgroupLoad, Workload
from tests.support.training import FAST, bits, bits_on_host, mlp, train, trained_as_on_host

pytestmark = pytest.mark.usefixtures("one_core")

GPU, TOTAL = "GPU-5f1c", 10**6
STATE_BYTES = 12 * sum(p.numel() for p in mlp().parameters())
STEPS = 12


class Pynvml(ModuleType):
    """`import pynvml` as nvidia-ml-py has it: errors of one class each, handles by UUID, a struct of figures.

    figures: what the device has, or what is raised instead. fails_at: the function that raises; None: none does.
    """

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.figures: object = SimpleNamespace(free=600_000, used=400_000, total=TOTAL)
        self.fails_at: str | None = None
        self.error: Exception = self.error_of("Unknown")
        self.calls: list[str] = []
        self.known = {GPU, "MIG-77aa"}

    @classmethod
    def error_of(cls, name: str) -> Exception:
        return type(f"NVMLError_{name}", (cls.NVMLError,), {})()

    def nvmlInit(self) -> None:  # noqa: N802
        self._called("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._called("nvmlDeviceGetHandleByUUID")
        if uuid not in self.known:
            raise self.error_of("NotFound")
        return f"handle of {uuid}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> object:  # noqa: N802
        self._called("nvmlDeviceGetMemoryInfo")
        assert handle.startswith("handle of ")
        return self.figures

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise self.error


class Card(EmulatedDevice):
    """A device that NVML may know. says: what its runtime says of its memory; unused: reserved and not used."""

    def __init__(self, uuid: str | None = GPU, free: int = 500_000, unused: int = 0) -> None:
        super().__init__(FAST, TOTAL)
        self.uuid = uuid  # type: ignore[misc]
        self.says = Memory(free, TOTAL)
        self.unused = unused
        self.reads = 0

    def memory(self) -> Memory:
        self.reads += 1
        return self.says

    def cached(self) -> Cached:
        return Cached(TOTAL, self.unused)  # whatever is not free is this process's own


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Pynvml:
    fake = Pynvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The texts of the warnings so far."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
        yield texts


def monitor_of(device: Card, budget: Budget = None) -> MemoryMonitor:
    return MemoryMonitor(device, held=lambda: 0, budget=budget)


# NVML.


@pytest.mark.parametrize("uuid", [GPU, "MIG-77aa"])
def test_what_nvml_says_counts_and_what_the_allocator_has_unused(uuid: str, nvml: Pynvml, said: list[str]) -> None:
    monitor = monitor_of(Card(uuid, free=1, unused=50))
    assert monitor.reading == Reading(Memory(600_050, TOTAL), Source.NVML)
    monitor.sample(always=True)
    assert nvml.calls.count("nvmlDeviceGetHandleByUUID") == 1, "the handle is kept"
    assert not said


def test_a_device_without_uuid_speaks_for_itself(nvml: Pynvml, said: list[str]) -> None:
    assert monitor_of(Card(None, free=7)).reading == Reading(Memory(7, TOTAL), Source.DEVICE)
    assert not nvml.calls
    assert not said


CALLS = ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"]


ERRORS = [
    ("LibraryNotFound", Source.NO_NVML, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ("DriverNotLoaded", Source.NO_NVML, "Install nvidia-ml-py"),
    ("NoPermission", Source.NOT_PERMITTED, "Let this user read it"),
    ("NotFound", Source.NOT_FOUND, "nvidia-smi -L"),
    ("NotSupported", Source.NOT_FOUND, "nvidia-smi -L"),
    ("GpuIsLost", Source.LOST, "Xid"),
    ("Uninitialized", Source.FAILED, "upgrade nvidia-ml-py"),
    ("Unknown", Source.FAILED, "upgrade nvidia-ml-py"),
]


IMPOSSIBLE = [
    (TOTAL + 1, TOTAL),
    (-1, TOTAL),
    (0, 0),
    (-2, -1),
    (1, TOTAL // 2),
    (1, 2 * TOTAL),
    (2**64 - 1, 2**64 - 1),
]


@pytest.mark.parametrize(
    ("changes", "source", "words"),
    [
        *(({"fails_at": call, "error": Pynvml.error_of(error)}, *found) for error, *found in ERRORS for call in CALLS),
        ({"library": None}, Source.NO_NVML, "Install nvidia-ml-py"),
        ({"library": ModuleType("pynvml")}, Source.FAILED, ""),
        ({"known": {}}, Source.NOT_FOUND, ""),
        ({"figures": None}, Source.FAILED, ""),
        ({"figures": SimpleNamespace(free=None, total=TOTAL)}, Source.FAILED, ""),
        ({"figures": SimpleNamespace(free=1)}, Source.FAILED, ""),
        *(
            ({"figures": SimpleNamespace(free=free, total=total)}, Source.NONSENSE, "cannot be those of this device")
            for free, total in IMPOSSIBLE
        ),
    ],
)
def test_without_nvml_the_runtime_counts_and_one_warning_says_what_to_do(
    changes: dict[str, Any], source: Source, words: str, nvml: Pynvml, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", changes.get("library", nvml))
    for name, value in changes.items():
        setattr(nvml, name, value)
    monitor = monitor_of(Card(free=1234, unused=6))
    for _ in range(3):
        monitor.sample(always=True)
        assert monitor.reading == Reading(Memory(1240, TOTAL), source)
    assert len(said) == 1
    for expected in (source.value, words, "memory_budget="):
        assert expected in said[0]


def test_a_device_that_is_lost_and_comes_back(nvml: Pynvml, said: list[str]) -> None:
    # What the driver reserves is no contradiction.
    nvml.figures = SimpleNamespace(free=1000, total=TOTAL + TOTAL // 50)
    monitor = monitor_of(Card(free=1234))
    sources = [monitor.reading.source]
    for fails_at in [None, "nvmlDeviceGetMemoryInfo", "nvmlInit", None, None, "nvmlDeviceGetMemoryInfo", None]:
        nvml.fails_at, nvml.error = fails_at, Pynvml.error_of("GpuIsLost")
        monitor.sample(always=True)
        sources.append(monitor.reading.source)
    there, lost = Source.NVML, Source.LOST
    assert sources == [there, there, lost, lost, there, there, lost, there]
    assert nvml.calls.count("nvmlDeviceGetHandleByUUID") == 3, "a handle from before is not trusted"
    assert len(said) == 1, "of the same loss there is nothing new to say"


def test_the_thread_samples_and_ends_with_its_optimizer() -> None:
    device, model, enough = Watched(STATE_BYTES), mlp(), threading.Event()
    before = set(threading.enumerate())
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=100, memory_interval=1e-3)
    train(model, optimizer, STEPS)
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "dos-memory")
    assert thread.daemon
    assert bits(model.parameters()) == bits_on_host()

    def reports(true: Memory) -> Memory:
        if threading.current_thread() is thread:
            enough.set()
        return true

    device.reports = reports
    assert enough.wait(60), "the thread samples"
    del optimizer
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_the_errors_are_those_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in _REASONS:
        assert issubclass(getattr(pynvml, f"NVMLError_{name}"), pynvml.NVMLError)
    for call in CALLS:
        assert callable(getattr(pynvml, call))


# The runtime's own figures.


def test_a_runtime_that_cannot_be_read_leaves_no_room_until_it_can(said: list[str]) -> None:
    device = Card(None)
    monitor = monitor_of(device)
    loads = (SubgroupLoad(100, 400, 400, 1200),) * 10

    def room(says: object, iterations: int = 6) -> float:
        device.memory = says  # type: ignore[method-assign, assignment]
        for _ in range(iterations):
            monitor.enter(Op.BACKWARD)
            monitor.enter(Op.UPDATE)
            work = Workload(loads, **monitor.limits(loads, update_overlaps_forward=False))
            monitor.end_iteration()
        return work.peak_free_bytes

    assert room(lambda: Memory(500_000, TOTAL)) == 12_000
    assert room(_fail, iterations=1) == 0
    assert monitor.reading.source is Source.UNREADABLE
    assert room(lambda: Memory(500_000, TOTAL), 10) == 12_000
    for nonsense in (Memory(-5, TOTAL), Memory(TOTAL + 1, TOTAL), Memory(5, 0), Memory(-1, -1)):
        assert room(functools.partial(tuple.__new__, Memory, nonsense), iterations=1) == 0
        assert monitor.reading.source is Source.UNREADABLE
        assert room(lambda: Memory(500_000, TOTAL), 10) == 12_000
    assert len(said) == 1
    assert "Optimizer state stays on the host" in said[0]


def _fail() -> Memory:
    raise RuntimeError("CUDA error: unknown error")


# When samples are taken.


class Clock:
    """Stands for the module `time`; reading it takes no time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_sampling_takes_no_more_than_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("dos.memory.monitor.time", clock)
    took = 2e-3
    device = Card(None)

    def slow() -> Memory:
        clock.now += took
        device.reads += 1
        return Memory(500_000, TOTAL)

    device.memory = slow  # type: ignore[method-assign]
    monitor = monitor_of(device)
    # The first peak is looked at closely, for nothing is known of it.
    for share in (SHARE_AT_FIRST, SHARE_OF_TIME):
        device.reads, began = 0, clock.now
        for _ in range(100_000):
            clock.now += 1e-4
            monitor.sample()
        elapsed = clock.now - began
        assert 0.5 * share < device.reads * took / elapsed <= share * 1.2
        monitor.end_iteration()
    before = device.reads
    for phase in (Op.BACKWARD, Op.UPDATE, Op.FORWARD):
        monitor.enter(phase)
    assert device.reads == before + 3, "the phases' beginnings are always looked at"


# What becomes of the figures.


LOADS = (SubgroupLoad(100, 400, 400, 1200),) * 10


def follow(device: Card, free: list[int], attached: bool = False) -> list[Workload]:
    """The workloads of iterations with so much free throughout; what is resident is seen as held."""
    held = [0]
    monitor = MemoryMonitor(device, held=lambda: held[0])
    works = []
    for nbytes in free:
        for phase in (Op.BACKWARD, Op.UPDATE):
            device.says = Memory(nbytes - held[0], TOTAL)
            monitor.enter(phase)
        works.append(Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=attached)))
        held[0] = int(works[-1].peak_free_bytes)
        device.says = Memory(nbytes - held[0], TOTAL)
        monitor.end_iteration()
    return works


MARGIN_BYTES = int(MARGIN * TOTAL)


def test_room_is_counted_in_whole_subgroups() -> None:
    works = follow(Card(None), [MARGIN_BYTES + 4 * 1200 + 1100] * 3)
    assert [w.peak_free_bytes for w in works] == [4800] * 3
    works = follow(Card(None), [MARGIN_BYTES + 10**5] * 3)
    assert [w.peak_free_bytes for w in works] == [12_000] * 3, "of all the state there is"
    works = follow(Card(None), [MARGIN_BYTES] * 3)
    assert [w.peak_free_bytes for w in works] == [0] * 3


def test_noise_does_not_make_state_travel() -> None:
    """At the edge of a subgroup: it goes home once, and comes back only for a quarter more than it needs."""
    edge = MARGIN_BYTES + 4 * 1200
    noise = [7, -5, 0, 120, -90, 30, 299, -299, 250, 1, -1, 180, -250, 299, 299, 299, 299, 299, 299, 299, 0, 299]
    works = follow(Card(None), [edge + n for n in noise])
    assert [w.peak_free_bytes for w in works] == [4800] + [3600] * (len(noise) - 1)
    works = follow(Card(None), [edge - 1] + [edge + 300] * 6)
    assert [w.peak_free_bytes for w in works] == [3600] * 5 + [4800] * 2


def test_slots_may_use_what_is_free_while_updating_unless_the_update_runs_on() -> None:
    device = Card(None)
    monitor = monitor_of(device)
    for phase, free in ((Op.BACKWARD, 4 * 1200 + 5), (Op.UPDATE, 7 * 1200 + 5)):
        device.says = Memory(MARGIN_BYTES + free, TOTAL)
        monitor.enter(phase)
    alone = Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=False))
    assert (alone.peak_free_bytes, alone.shared_free_bytes) == (4800, 7 * 1200)
    beside = Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=True))
    assert (beside.peak_free_bytes, beside.shared_free_bytes) == (4800, 4800)


def budgeted(budget: Budget, free: int = 10_000 + MARGIN_BYTES) -> float:
    monitor = monitor_of(Card(None, free=free), budget)
    monitor.enter(Op.UPDATE)
    return Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=False)).peak_free_bytes


@pytest.mark.parametrize(
    ("budget", "room"),
    [
        (None, 9600),
        (0, 0),
        (2400, 2400),
        (2399, 1200),
        (10**9, 9600),
        (0.0, 0),
        (0.0036, 3600),
        (1.0, 9600),
        (lambda: 4800, 4800),
        (lambda: 4800.5, 4800),
        (lambda: 10**12, 12_000),
        (lambda: 0, 0),
    ],
)
def test_numbers_cap_and_functions_replace_what_is_measured(budget: Budget, room: int) -> None:
    assert budgeted(budget) == room


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (lambda: None, TypeError, ": .*the function must give bytes as an int, found None"),
        (lambda: "4 GiB", TypeError, ": .*found '4 GiB'"),
        (lambda: True, TypeError, ": .*found True"),
        (lambda: -1, ValueError, ": .*must give 0 or more bytes, found -1"),
        (lambda: math.nan, ValueError, ": .*found nan"),
        (lambda: math.inf, ValueError, ": .*found inf"),
        ("1 GiB", TypeError, " must be .*found"),
        (True, TypeError, " must be .*found"),
        (-1, ValueError, " must be .*found"),
        (1.5, ValueError, " must be .*found"),
        (math.nan, ValueError, " must be .*found"),
    ],
)
def test_budgets_that_are_none(budget: Any, error: type[Exception], message: str) -> None:
    model = mlp()
    before = bits(model.parameters())
    with pytest.raises(error, match=f"memory_budget{message}"):
        train(model, DOSAdam(model.parameters(), device=Watched(), memory_budget=budget), 1)
    assert bits(model.parameters()) == before


# The whole optimizer.


class Watched(EmulatedDevice):
    """Remembers the most that state has held, and whether memory was denied. reports: what it says when it lies."""

    def __init__(
        self, capacity: int = 10**6, reports: Callable[[Memory], Memory] = lambda true: true, occupied: int = 0
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


@pytest.mark.parametrize("policy", [0.0, 0.5, "stride:2"])
def test_fixed_policies_do_not_look_at_memory_and_what_fails_is_updated_on_the_host(policy: str | float) -> None:
    _, optimizer = trained_as_on_host(Watched(STATE_BYTES // 3), policy=policy, memory_budget=0)
    assert any(p is not Placement.CPU for p in optimizer.plan().placements), "as the policy says"
    assert optimizer.timeline().on(Lane.GPU)
    assert optimizer.timeline().on(Lane.CPU)


def _nonsense() -> Callable[[Memory], Memory]:
    figures = [Memory(-1, 10), Memory(10**18, 10**6), Memory(0, 0), Memory(10**6, 10**18), Memory(5, -5)]
    seen = [0]

    def reports(true: Memory) -> Memory:
        seen[0] += 1
        return true if seen[0] % 3 else figures[seen[0] % len(figures)]

    return reports


def _failing() -> Callable[[Memory], Memory]:
    seen = [0]

    def reports(true: Memory) -> Memory:
        seen[0] += 1
        if 10 < seen[0] < 40 or seen[0] % 7 == 0:
            raise RuntimeError("CUDA error: unknown error")
        return true

    return reports


LIES = {
    "too much": lambda: lambda true: Memory(min(true.total, true.free + STATE_BYTES), true.total),
    "all is free": lambda: lambda true: Memory(true.total, true.total),
    "too little": lambda: lambda true: Memory(max(0, true.free - STATE_BYTES), true.total),
    "nothing is free": lambda: lambda true: Memory(0, true.total),
    "nonsense": _nonsense,
    "failing": _failing,
}


@pytest.mark.parametrize(
    ("capacity", "policy", "attach"),
    [(STATE_BYTES // 2, "adaptive", False), (3 * STATE_BYTES, "adaptive", True), (STATE_BYTES // 2, "stride:2", True)],
)
@pytest.mark.parametrize("lie", LIES)
def test_memory_that_lies_changes_no_bit(
    lie: str, policy: str, attach: bool, capacity: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    trained_as_on_host(Watched(capacity, LIES[lie]()), attach, policy=policy)
    if lie in ("nonsense", "failing"):
        assert len(said) == 1, "what the user can act upon"
    if lie == "all is free" and capacity < STATE_BYTES and policy == "adaptive":
        assert [r.levelname for r in caplog.records if "no device memory" in r.message] == ["WARNING"]


def test_a_figure_that_is_too_high_makes_no_state_travel() -> None:
    """What could not be allocated is tried again now and then; what is there stays there."""
    model, device = mlp(), Watched(2 * STATE_BYTES, LIES["all is free"](), occupied=3 * STATE_BYTES // 2)
    optimizer = DOSAdam(model.parameters(), device=device, subgroup_size=128, policy=_all_that_fit)
    denied, flushes = [], 0
    for step in range(60):
        device.denied = False
        train(model, optimizer, 1, first_step=step)
        denied.append(device.denied)
        flushes += sum(span.op is Op.FLUSH for span in optimizer.timeline().spans)
    assert 3 <= sum(denied) <= 6
    assert flushes == 0
    assert device.usage().held == 5 * 12 * 128
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
    assert resident == min(11, int(capacity * (1 - MARGIN) - 4 * 128) // (12 * 128))
    for step in range(1, STEPS):
        train(model, optimizer, 1, first_step=step)
        moved = [span.subgroup for span in optimizer.timeline().spans if span.op is Op.PREFETCH]
        assert len(moved) == resident, "one gradient each, and no state"
        assert not any(span.op is Op.FLUSH for span in optimizer.timeline().spans)
        assert not device.denied
    assert bits(model.parameters()) == bits_on_host()


def test_an_iteration_that_is_tried_again_has_its_peak_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=Watched(), subgroup_size=128)
    train(model, optimizer, 2)
    phases: list[Op] = []
    monkeypatch.setattr(optimizer._session.decisions.memory, "enter", phases.append)

    def attempt() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 24)).square().mean().backward()

    attempt()
    optimizer.release_memory()
    attempt()
    optimizer.step()
    assert phases == [Op.BACKWARD, Op.BACKWARD, Op.UPDATE]


def test_the_first_peak_is_seen_when_samples_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dos.memory.monitor.SHARE_AT_FIRST", 1e-9)
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
        signal.alarm(10)
        monitor.sample(always=True)
        os._exit(0)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
