"""What is free, from NVML in all its moods or from the runtime."""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dos.devices import Memory
from dos.planning.reading import _REASONS, Reading, Source
from perfmodel import Op, SubgroupLoad, Workload
from tests.support.devices import TOTAL, UUID, Card, monitor_of


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
        self.known = {UUID, "MIG-77aa"}

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


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Pynvml:
    fake = Pynvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize("uuid", [UUID, "MIG-77aa"])
def test_free_memory_is_nvmls_and_the_allocators(uuid: str, nvml: Pynvml, said: list[str]) -> None:
    monitor = monitor_of(Card(uuid, free=1, unused=50))
    assert monitor.reading == Reading(Memory(600_050, TOTAL), Source.NVML)
    monitor.sample(always=True)
    assert nvml.calls.count("nvmlDeviceGetHandleByUUID") == 1, "the handle is kept"
    assert not said


def test_the_runtime_is_asked_only_where_nvml_does_not_answer(nvml: Pynvml) -> None:
    """A call of cudaMemGetInfo was reported to take 8 ms; whose figures NVML gives is compared once."""
    device, asked = Card(free=1234), []
    runtime = device.memory
    device.memory = lambda: asked.append(nvml.fails_at) or runtime()
    monitor = monitor_of(device)
    for fails_at in (None, None, "nvmlDeviceGetMemoryInfo", None, None):
        nvml.fails_at = fails_at
        monitor.sample(always=True)
    assert asked == [None, "nvmlDeviceGetMemoryInfo"]
    assert monitor.reading.source is Source.NVML


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


def test_a_library_that_is_not_there_is_not_looked_for_in_each_sample(
    nvml: Pynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.fails_at, nvml.error = "nvmlInit", Pynvml.error_of("LibraryNotFound")
    monitor = monitor_of(Card(free=1234))
    for _ in range(3):
        monitor.sample(always=True)
    assert nvml.calls.count("nvmlInit") == 1
    nvml.fails_at, later = None, time.perf_counter() + 60
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    monitor.sample(always=True)
    assert monitor.reading.source is Source.NVML


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
        device.memory = says
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
