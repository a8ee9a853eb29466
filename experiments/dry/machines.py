"""The machines that ran the library: rates, how they share host memory, and iterations as measured, from result files.

`Machine.floor_s` and `physical_s` are by the arithmetic of the dry accelerator (`experiments/simdev/timed.h`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.simdev.build import arithmetic
from perfmodel.format import CODED, SPLIT, Format
from perfmodel.hardware import HardwareProfile

RESULTS = Path(__file__).parents[1] / "results"
FILES = {
    "h200": ("nvidia-h200-2026-11-27/profile.json", "nvidia-h200-2026-11-28"),
    "h100": ("nvidia-h100-2026-11-28/profile.json", "nvidia-h100-2026-11-28"),
}
"""The profile of a machine, and the folder of what it was measured to do."""
CORES, THREADS = 16, 12
"""Of each, and of the CPU kernel for which plans are made."""
BLOCKS = 36
FORWARD_S, BACKWARD_S = 1.25e-3, 3.7e-3
"""Of one block, on the device: together as long as the iterations of the H200 without an optimizer (178 ms)."""
TAIL_S = 5e-3
"""Of an update beside what `Machine.update_s` counts: the last subgroup's way, for which nothing else runs."""
TAIL_IN_BACKWARD_S = 10e-3
"""The same, where updates run during backward: the gradient that comes last is updated and sent back."""
SLOTS_SHARE = 0.04
"""Of the state: the two staging slots of streamed subgroups."""
STEPS = 50
"""Shares that are tried: multiples of one over this."""


@dataclass(frozen=True)
class Costs:
    """Seconds that the host takes for a runtime's call, without Python: together as phases.jsonl of the H200 has them.

    copy_s: of a copy by torch; memcpy_s: by the runtime alone.
    stretch: by which everything takes longer on the host, for each thread that updates on the CPU.
    device_bandwidth: bytes per second of device memory, which operations read and write that have no time of their own.
    slower: how many times as long as here all else takes on the host, such as Python; None: as this machine shows.
    """

    copy_s: float = 10e-6
    memcpy_s: float = 6e-6
    event_s: float = 0.7e-6
    launch_s: float = 6e-6
    stats_s: float = 1e-6
    stretch: float = 0.09
    device_bandwidth: float = 3e12
    slower: float | None = None


@dataclass(frozen=True)
class Setting:
    """A row; "none" has no optimizer. share: of the state, for which there is device memory; None: the policy "cpu"."""

    name: str
    share: float | None
    format: Format

    @property
    def fixed(self) -> list[str]:
        """Policies that need no more device memory; adaptive plans are compared with them. None without memory."""
        if self.share is None:
            return []
        ratios = [str(ratio) for ratio in (0.25, 0.5, 0.75, 0.9) if 1 - ratio <= self.share + 1e-9]
        return ["cpu", "stride:2", "stride:3", "stride:5", *ratios]


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("none", None, SPLIT),
        Setting("cpu", None, SPLIT),
        Setting("tenth", 0.1, SPLIT),
        Setting("half", 0.5, SPLIT),
        Setting("int8 cpu", None, CODED),
        Setting("int8 tenth", 0.1, CODED),
    )
}


@dataclass(frozen=True)
class Machine:
    """profile: as measured. h2d_beside: bytes per second that copies to the device get beside the CPU at least.

    python_s: that its host takes for ROUNDS of `python_loop`. device_bytes: of device memory.
    measured: seconds of iterations, by setting and when updates begin.
    """

    profile: HardwareProfile
    h2d_beside: float
    python_s: float
    device_bytes: int
    measured: Mapping[tuple[str, str], float]

    def figures(self, threads: int) -> list[float]:
        """Those of `timed::Machine` while so many threads update on the CPU."""
        p = interpolated(self.profile, threads)
        alone, duplex = (p.h2d_bandwidth, p.d2h_bandwidth), (p.h2d_bandwidth_duplex, p.d2h_bandwidth_duplex)
        return [*alone, *duplex, p.h2d_weight, p.d2h_weight, 1.0, p.host_bandwidth, self.h2d_beside]

    @functools.cached_property
    def all_figures(self) -> list[float]:
        """Those of `timed::Simulation`."""
        return [figure for threads in range(CORES + 1) for figure in self.figures(threads)]

    def cpu_rate(self, state: Format, threads: int) -> float:
        """Parameters per second of an update on the CPU alone, with so many threads."""
        speeds = {"split": self.profile.cpu_speed_split, "int8": self.profile.cpu_speed_int8}
        return interpolated(self.profile, threads).cpu_update_rate * speeds.get(state.name, 1.0)

    def gpu_rate(self, state: Format) -> float:
        """Parameters per second of an update on the device."""
        speeds = {"split": self.profile.gpu_speed_split, "int8": self.profile.gpu_speed_int8}
        return self.profile.gpu_update_rate * speeds.get(state.name, 1.0)

    def measured_s(self, setting: Setting, updates: str) -> float | None:
        """Seconds of an iteration of an attached model as measured; None if it was not."""
        return self.measured.get((setting.name, updates))

    def floor_s(self, setting: Setting, numel: int, attached: bool) -> float:
        """Seconds of an iteration whose updates begin when backward ends, with all gradients where they are needed.

        Attached: backward + max(forward, update) + TAIL_S, else the sum. The update is the shortest of any shares of
        CPU, streamed and resident state that the memory permits.
        """
        forward_s, backward_s = BLOCKS * FORWARD_S, BLOCKS * BACKWARD_S
        update_s = self._update_s(setting, numel, gradients=False) + TAIL_S
        return backward_s + (max(forward_s, update_s) if attached else forward_s + update_s)

    def physical_s(self, setting: Setting, numel: int) -> float:
        """Seconds of an iteration whose updates run beside all of it: max(compute, update) + TAIL_IN_BACKWARD_S.

        Gradients go to the host meanwhile.
        """
        compute_s = BLOCKS * (FORWARD_S + BACKWARD_S)
        return max(compute_s, self._update_s(setting, numel, gradients=True)) + TAIL_IN_BACKWARD_S

    def _update_s(self, setting: Setting, numel: int, *, gradients: bool) -> float:
        share = setting.share or 0.0
        found = []
        for cpu in [1.0] if setting.share is None else [n / STEPS for n in range(STEPS + 1)]:
            streamed = max(0.0, 1 - cpu - share)
            if streamed and share >= SLOTS_SHARE:  # slots take their memory from residents
                streamed = min(1 - cpu, streamed + SLOTS_SHARE)
            if not streamed or share >= SLOTS_SHARE:
                found.append(self._passed_s(setting.format, numel * cpu, numel * streamed, gradients))
        return min(found)

    def _passed_s(self, state: Format, cpu: float, streamed: float, gradients: bool) -> float:
        """Seconds in which so many parameters are updated on the CPU, and as many streamed, all at once."""
        threads = self.profile.cpu_threads
        key = tuple(self.figures(threads)), self.cpu_rate(state, threads), _traffic(self.profile, state)
        moved = state.state_bytes * streamed
        values = state.value_bytes * cpu
        return _fluid_s(key, cpu, moved + values, moved + values * gradients)


def interpolated(profile: HardwareProfile, threads: int) -> HardwareProfile:
    """Return the profile with this number of threads: rates between those that were measured."""
    known = [dataclasses.asdict(each) for each in profile.by_threads]
    below = max((each for each in known if each["cpu_threads"] <= threads), key=_count, default=known[0])
    above = min((each for each in known if each["cpu_threads"] >= threads), key=_count, default=known[-1])
    part = (threads - _count(below)) / max(1, _count(above) - _count(below))
    rates = {name: below[name] + (above[name] - below[name]) * part for name in below if below[name] is not None}
    return profile.replace(**{**rates, "cpu_threads": threads})


def _count(rates: Mapping[str, Any]) -> int:
    return rates["cpu_threads"]


def _traffic(profile: HardwareProfile, state: Format) -> float:
    """Bytes of host memory that an update of a parameter moves."""
    return state.update_traffic * profile.cpu_traffic_factor


@functools.cache
def _library() -> Any:
    lib = ctypes.CDLL(str(arithmetic()))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    lib.timed_new.restype, lib.timed_new.argtypes = pointer, [ctypes.POINTER(number), ctypes.c_int]
    lib.timed_delete.argtypes = [pointer]
    lib.timed_copy.argtypes = [pointer, ctypes.c_int, ctypes.c_int, number]
    lib.timed_compute.argtypes = [pointer, ctypes.c_int, number]
    lib.timed_mark.argtypes = [pointer, ctypes.c_int]
    lib.timed_wait.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    lib.timed_update.argtypes = [pointer, number, number, number, ctypes.c_int]
    lib.timed_advance.argtypes = [pointer, number]
    lib.timed_at.restype, lib.timed_at.argtypes = number, [pointer, ctypes.c_int]
    return lib


class Asked:
    """A simulation that is asked what would be when.

    figures: those of `timed::Machine`, whatever the number of threads.
    """

    def __init__(self, figures: list[float]) -> None:
        self._lib = _library()
        self._this = self._lib.timed_new((ctypes.c_double * len(figures))(*figures), 1)

    def __del__(self) -> None:
        self._lib.timed_delete(self._this)

    def copy(self, stream: int, link: int, nbytes: float) -> None:
        """Queue a copy. link: 0 to the device, 1 to the host."""
        self._lib.timed_copy(self._this, stream, link, nbytes)

    def compute(self, stream: int, seconds: float) -> None:
        """Queue compute that lasts so long alone."""
        self._lib.timed_compute(self._this, stream, seconds)

    def mark(self, stream: int) -> int:
        """Queue a moment; return its number."""
        return self._lib.timed_mark(self._this, stream)

    def wait(self, stream: int, moment: int) -> None:
        """Let the stream wait for a moment."""
        self._lib.timed_wait(self._this, stream, moment)

    def update(self, parameters: float, rate: float, traffic: float) -> int:
        """Begin an update on the CPU now; return the number of its end."""
        return self._lib.timed_update(self._this, parameters, rate, traffic, 0)

    def advance(self, now: float) -> None:
        """Let the time be `now` seconds."""
        self._lib.timed_advance(self._this, now)

    def at(self, moment: int) -> float:
        """Return when the moment was; infinite: not yet."""
        return self._lib.timed_at(self._this, moment)


@functools.lru_cache(maxsize=4096)
def _fluid_s(key: tuple[Any, ...], cpu: float, to_device: float, to_host: float) -> float:
    figures, rate, traffic = key
    asked = Asked(list(figures))
    ends = [asked.update(cpu, rate, traffic)] if cpu else []
    for link, nbytes in enumerate((to_device, to_host)):
        if nbytes:
            asked.copy(link, link, nbytes)
            ends.append(asked.mark(link))
    asked.advance(1e6)
    return max((asked.at(end) for end in ends), default=0.0)


@functools.cache
def machine(name: str) -> Machine:
    """Return a machine of FILES by its name."""
    profile, folder = FILES[name]
    traced = _read(f"{folder}/traced.json")
    found = HardwareProfile.from_json(_read(profile))
    # The dry GPU has these rates, whatever else ran while they were measured: corrections stay within their limits.
    found = found.replace(provenance=dataclasses.replace(found.provenance, note=""))
    found = interpolated(found, THREADS)
    return Machine(found, traced["h2d_beside_cpu"], traced["python_s"], traced["device_bytes"], _iterations(folder))


def _read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text())


def _iterations(folder: str) -> dict[tuple[str, str], float]:
    """Seconds, from the rows that were not watched by a profiler."""
    found: dict[tuple[str, str], float] = {}
    for file in sorted((RESULTS / folder).glob("*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            name, _, backward = row.get("row", row.get("phase", "")).partition("+")
            place = name, "backward" if backward else "step"
            if name in SETTINGS and "iteration" in row:
                found.setdefault(place, row["iteration"] / 1e3)
    return found


ROUNDS = 10_000
"""Whose time was measured."""


def python_loop(rounds: int = ROUNDS) -> None:
    """Python, by which hosts are compared."""
    total = 0
    for number in range(rounds):
        total += number
