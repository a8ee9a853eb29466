"""Rates of a machine's lanes as one rank sees them, where they come from, and their file format."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from perfmodel.format import CODED, MIXED
from perfmodel.timeline import Lane

VERSION = 1
"""Version of the JSON format; a file of another version is refused."""

_FEWER_BYTES = MIXED.update_traffic / CODED.update_traffic

_RETIRED = ("gpu_bandwidth", "cast_rate")
"""Rates in files of earlier versions that no plan reads."""

SLOWDOWN = 0.09
"""By which other work of the host takes longer for each thread of an update on the CPU, where that was not measured:
that of an H100 took 1.4 times as long beside 4 threads, and 2.1 times beside 12
(experiments/results/nvidia-h100-2026-11-28)."""

SOURCES = ("measured", "fitted", "data sheet")


@dataclass(frozen=True)
class Provenance:
    """The origin of a profile's figures.

    source: `measured` (on the machine itself), `fitted` (to runs of others), or `data sheet` (estimated, not seen).
    date: of the measurement or of the runs, ISO 8601; empty when unknown.
    machine: the GPU, CPU and memory they are of.
    note: how they were found, and which of them were not measured.
    """

    source: str
    date: str = ""
    machine: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"provenance source must be one of {', '.join(SOURCES)}, found {self.source!r}")
        for name in ("date", "machine", "note"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"provenance {name} must be a text, found {getattr(self, name)!r}")


@dataclass(frozen=True)
class ThreadRates:
    """The fields of `HardwareProfile` that depend on the number of threads of the CPU update, by the same names."""

    cpu_threads: int
    cpu_update_rate: float
    host_bandwidth: float
    h2d_weight: float
    d2h_weight: float
    host_slowdown: float | None = None

    def __post_init__(self) -> None:
        _check(self, "rates by threads")


@dataclass(frozen=True)
class HardwareProfile:
    """The rates of one machine, as one rank sees them when it runs alone. Bytes and parameters per second, seconds.

    host_bandwidth: bytes/s of host DRAM for the whole host, reads plus writes; all ranks, CPU updates and DMA
        transfers share it. Infinite: nothing contends.
    cpu_update_rate: parameters/s that the CPU updates alone.
    h2d_bandwidth, d2h_bandwidth: bytes/s of one direction alone, pinned memory.
    h2d_bandwidth_duplex, d2h_bandwidth_duplex: bytes/s of each direction while both run.
    gpu_update_rate: parameters/s that the GPU updates.
    copy_latency_s: fixed cost of a copy.
    launch_latency_s: fixed cost of an update on the GPU.
    disk_read_bandwidth, disk_write_bandwidth: bytes/s of reading from all folders of state on disk, and of writing,
        alone; with _duplex while both go on. Where nothing was measured, those of a modest NVMe drive.
    disk_latency_s: fixed cost of a read or write.
    ranks_per_host: ranks that share the host's DRAM in equal parts.
    cpu_traffic_factor: host traffic of a CPU update over the bytes it needs; above 1 when threads reach the memory
        of other NUMA nodes.
    cpu_threads: threads behind cpu_update_rate; 0 when unknown.
    cpu_speed_split, gpu_speed_split, cpu_speed_int8, gpu_speed_int8: how many times as fast updates of state in these
        formats are as those that the update rates are of, which have 28 bytes of traffic per parameter. Where that
        was not measured, split ones count as equally fast, and int8 ones as faster as they move fewer bytes.
    h2d_weight, d2h_weight: how copies in these directions share host DRAM with the CPU, whose weight is 1, where it
        cannot serve all (`sharing.shared_speeds`). By default those with which an H200 and an H100 are within 12%.
    turn_latency_s: fixed cost of an update on the CPU; None: as of one on the GPU.
    host_slowdown: how many times as long other work of the host takes beside an update on the CPU; None: by SLOWDOWN.
    by_threads: the rates with each number of threads that was measured.

    Raises ValueError for a figure that no machine has: rates from 1e-30 to 1e30, latencies from 0 to 1e6 s.
    """

    name: str
    host_bandwidth: float
    cpu_update_rate: float
    h2d_bandwidth: float
    d2h_bandwidth: float
    h2d_bandwidth_duplex: float
    d2h_bandwidth_duplex: float
    gpu_update_rate: float
    copy_latency_s: float = 10e-6
    launch_latency_s: float = 10e-6
    disk_read_bandwidth: float = 3e9
    disk_write_bandwidth: float = 2e9
    disk_read_bandwidth_duplex: float = 1.5e9
    disk_write_bandwidth_duplex: float = 1e9
    disk_latency_s: float = 100e-6
    ranks_per_host: int = 1
    cpu_traffic_factor: float = 1.0
    cpu_threads: int = 0
    cpu_speed_split: float = 1.0
    gpu_speed_split: float = 1.0
    cpu_speed_int8: float = _FEWER_BYTES
    gpu_speed_int8: float = _FEWER_BYTES
    h2d_weight: float = 0.7
    d2h_weight: float = 1.06
    turn_latency_s: float | None = None
    host_slowdown: float | None = None
    by_threads: tuple[ThreadRates, ...] = ()
    provenance: Provenance = field(default_factory=lambda: Provenance("data sheet"))

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"profile name must be a text, found {self.name!r}")
        _check(self, f"profile {self.name!r}")

    @functools.cached_property
    def host_bandwidth_per_rank(self) -> float:
        """Bytes/s of host DRAM that one rank can count on while its neighbours do the same as it does."""
        return self.host_bandwidth / self.ranks_per_host

    @functools.cached_property
    def cpu_latency_s(self) -> float:
        """Fixed cost of an update on the CPU, in seconds."""
        return self.launch_latency_s if self.turn_latency_s is None else self.turn_latency_s

    @property
    def slowdown(self) -> float:
        """How many times as long other work of the host takes beside an update on the CPU."""
        return 1 + SLOWDOWN * self.cpu_threads if self.host_slowdown is None else self.host_slowdown

    def with_threads(self, threads: int) -> HardwareProfile:
        """The profile with this number of threads of the CPU update: as measured, or between two numbers that were.

        Beyond what was measured the rates are the nearest ones. 0, or a profile without rates by threads: as it is.
        """
        if threads in (0, self.cpu_threads) or not self.by_threads:
            return self
        if threads not in self._with_threads:
            self._with_threads[threads] = self._interpolated(threads)
        return self._with_threads[threads]

    @functools.cached_property
    def _with_threads(self) -> dict[int, HardwareProfile]:
        return {}

    def _interpolated(self, threads: int) -> HardwareProfile:
        some = sorted(self.by_threads, key=lambda each: each.cpu_threads)
        less = ([each for each in some if each.cpu_threads <= threads] or some[:1])[-1]
        more = ([each for each in some if each.cpu_threads >= threads] or some[-1:])[0]
        part = (threads - less.cpu_threads) / max(more.cpu_threads - less.cpu_threads, 1)
        ends = {name: (getattr(less, name), getattr(more, name)) for name in BY_THREADS}
        known = {name: pair for name, pair in ends.items() if None not in pair}
        rates = {name: low if low == high else low + part * (high - low) for name, (low, high) in known.items()}
        return self.replace(cpu_threads=threads, **rates)

    def corrected(self, **rates: float) -> HardwareProfile:
        """The profile with other rates; those with each number of threads change as the present ones do."""
        factors = {name: rate / getattr(self, name) for name, rate in rates.items() if name in BY_THREADS}

        def times(each: ThreadRates) -> ThreadRates:
            return dataclasses.replace(each, **{name: getattr(each, name) * f for name, f in factors.items()})

        return self.replace(by_threads=tuple(map(times, self.by_threads)), **rates)

    def speed(self, lane: Lane, state_format: str) -> float:
        """How many times as fast updates of state in a format are as the lane's rate says."""
        return float(getattr(self, f"{lane.value.lower()}_speed_{state_format}", 1.0))

    def scaled(self, factor: float) -> HardwareProfile:
        """A machine with all rates times `factor` and the same fixed costs: the same proportions, slower or faster."""
        given: object = factor
        if not isinstance(given, numbers.Real):
            raise TypeError(f"factor must be a number, found {factor!r}")

        def times(one: Any) -> Any:
            scaled = (name for name in RATES if name != "cpu_traffic_factor" and hasattr(one, name))
            return dataclasses.replace(one, **{name: getattr(one, name) * float(factor) for name in scaled})

        return times(self.replace(by_threads=tuple(map(times, self.by_threads))))

    def replace(self, **values: Any) -> HardwareProfile:
        """The profile with other values of the fields that are named."""
        return dataclasses.replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """The profile as plain JSON values; infinite host bandwidth becomes null."""
        values = dataclasses.asdict(self)
        for rates in (values, *values["by_threads"]):
            if math.isinf(rates["host_bandwidth"]):
                rates["host_bandwidth"] = None
        return {"version": VERSION, **values}

    @classmethod
    def from_json(cls, values: object) -> HardwareProfile:
        """The profile that `to_json` described.

        Raises ValueError naming the field for another version, a missing, unknown or impossible value.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a hardware profile is a JSON object, found {type(values).__name__}")
        if values.get("version") != VERSION:
            raise ValueError(
                f"hardware profile of version {values.get('version')!r}, this program reads version {VERSION}; "
                "measure again with `python -m dos.calibrate`"
            )
        fields = {f.name: f for f in dataclasses.fields(cls)}
        required = (n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING)
        wrong = {
            "missing": [name for name in required if name not in values],
            "unknown": sorted(values.keys() - fields.keys() - {"version", *_RETIRED}),
        }
        found = "; ".join(f"{what} {', '.join(names)}" for what, names in wrong.items() if names)
        if found:
            raise ValueError(f"hardware profile {values.get('name', '')!r}: {found}")
        arguments = {name: value for name, value in values.items() if name in fields}
        if arguments["host_bandwidth"] is None:
            arguments["host_bandwidth"] = math.inf
        for name, kind in (("provenance", _provenance), ("by_threads", _by_threads)):
            if name in arguments:
                try:
                    arguments[name] = kind(arguments[name])
                except TypeError as error:
                    raise ValueError(f"hardware profile {arguments['name']!r}: bad {name}: {error}") from None
        return cls(**arguments)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read a profile. Raises OSError when the file cannot be read, ValueError naming it when it is no profile."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (ValueError, RecursionError) as error:  # of JSON that is nested too deeply, too
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def builtin(cls, name: str) -> HardwareProfile:
        """The built-in profile of that name. Raises ValueError listing the names there are."""
        profiles = builtin_profiles()
        if not isinstance(name, str) or name not in profiles:
            raise ValueError(f"no built-in hardware profile {name!r}; there are {', '.join(sorted(profiles))}")
        return profiles[name]


BY_THREADS = tuple(f.name for f in dataclasses.fields(ThreadRates) if f.name != "cpu_threads")
"""The fields that depend on the number of threads."""
RATES = tuple(
    f.name for f in dataclasses.fields(HardwareProfile) if f.name.endswith(("bandwidth", "_rate", "_duplex", "_factor"))
)
"""The fields that must be positive."""
LINK_RATES = tuple(name for name in RATES if name.startswith(("h2d", "d2h")))
DISK_RATES = tuple(name for name in RATES if name.startswith("disk"))
WEIGHTS = "h2d_weight", "d2h_weight"
"""The fields that say how host DRAM is shared, over the CPU's 1."""
SPEEDS = tuple(f.name for f in dataclasses.fields(HardwareProfile) if "_speed_" in f.name)
"""The fields that are relative to a rate."""
_LIMITS: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys((*RATES, *SPEEDS, *WEIGHTS), (1e-30, 1e30, False)),
    **dict.fromkeys(("copy_latency_s", "launch_latency_s", "turn_latency_s", "disk_latency_s"), (0, 1e6, False)),
    "host_slowdown": (1, 1e6, False),
    "ranks_per_host": (1, 1 << 20, True),
    "cpu_threads": (0, 1 << 20, True),
}
"""The least and the most that each figure may be, and whether it is an integer. No machine is near them, and times that
follow from figures within them are numbers."""


def _check(one: object, what: str) -> None:
    """Raise ValueError for a figure that no machine has. Figures of numpy become Python's, as JSON has no others."""
    for name, (least, most, integer) in _LIMITS.items():
        value: Any = getattr(one, name, None)
        if value is None and (name in ("turn_latency_s", "host_slowdown") or not hasattr(one, name)):
            continue
        known = isinstance(value, numbers.Integral if integer else numbers.Real) and not isinstance(value, bool)
        if known and not isinstance(value, int | float):
            value = int(value) if integer else float(value)
            object.__setattr__(one, name, value)
        if not (known and least <= value <= most) and not (name == "host_bandwidth" and value == math.inf):
            kind = "a whole" if integer else "a positive" if least else "a"
            raise ValueError(f"{what}: {name} must be {kind} number from {least:g} to {most:g}, found {value!r}")


def _provenance(values: Any) -> Provenance:
    return Provenance(**values)


def _by_threads(values: Any) -> tuple[ThreadRates, ...]:
    found = []
    for each in values:
        rates: dict[str, Any] = dict(each)
        if rates.get("host_bandwidth", 0.0) is None:  # infinite, as of the profile
            rates["host_bandwidth"] = math.inf
        found.append(ThreadRates(**rates))
    return tuple(found)


def builtin_profiles() -> dict[str, HardwareProfile]:
    """All built-in profiles by name: published machines (fitted) and common ones (from data sheets)."""
    folder = resources.files("perfmodel") / "profiles"
    profiles = (
        HardwareProfile.from_json(json.loads(f.read_text())) for f in folder.iterdir() if f.name.endswith(".json")
    )
    return {p.name: p for p in sorted(profiles, key=lambda p: p.name)}
