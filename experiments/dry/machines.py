"""The machines that ran the library: rates, how they share host memory, and iterations as measured, from result files.

`Machine.floor_s` and `physical_s` are by the arithmetic of the dry accelerator (`experiments/simdev/timed.h`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.simdev.build import arithmetic
from perfmodel.format import CODED, MIXED, SPLIT, Format
from perfmodel.hardware import HardwareProfile

RESULTS = Path(__file__).parents[1] / "results"
FILES = {"h200": ("nvidia-h200-2026-11-26", "results.json"), "h100": ("nvidia-h100-2026-11-26", "attached.json")}
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
    """Seconds that the host takes for a call, until a GPU says better.

    stretch: how many times as long it takes while the CPU lane updates.
    device_bandwidth: bytes per second of device memory, which operations read and write that have no time of their own.
    """

    copy_s: float = 8e-6
    event_s: float = 3e-6
    launch_s: float = 8e-6
    stats_s: float = 300e-6
    stretch: float = 1.75
    device_bandwidth: float = 3e12


@dataclass(frozen=True)
class Setting:
    """A row. share: of the state, for which there is device memory; None: the policy "cpu"."""

    name: str
    share: float | None
    format: Format
    contender: str
    """In the result files."""

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
        Setting("cpu", None, SPLIT, "CPU only"),
        Setting("tenth", 0.1, SPLIT, "adaptive, memory for 10%"),
        Setting("half", 0.5, SPLIT, "adaptive, memory for 50%"),
        Setting("int8 cpu", None, CODED, "CPU only, int8 state"),
        Setting("int8 tenth", 0.1, CODED, "adaptive, memory for 10%, int8 state"),
    )
}


@dataclass(frozen=True)
class Machine:
    """profile: as measured. beside: rates of the CPU in parameters, H2D and D2H in bytes per second, all three busy.

    threads: the CPU's rate by number of threads. measured: seconds of iterations by contender, attached and not.
    """

    profile: HardwareProfile
    beside: tuple[float, float, float]
    threads: Mapping[int, float]
    measured: Mapping[bool, Mapping[str, float]]

    @property
    def figures(self) -> list[float]:
        """Those of `timed::Machine`. Host memory goes by the measured split: in proportion to weight x demand."""
        p = self.profile
        cpu, h2d, d2h = self.beside
        duplex = p.h2d_bandwidth_duplex, p.d2h_bandwidth_duplex
        kept = h2d / duplex[0], d2h / duplex[1], cpu / p.cpu_update_rate
        total = cpu * _traffic(p, None) + h2d + d2h
        return [p.h2d_bandwidth, p.d2h_bandwidth, *duplex, *(each / kept[2] for each in kept), total]

    def cpu_rate(self, state: Format, threads: int) -> float:
        """Parameters per second of an update on the CPU alone, with so many threads."""
        counts = sorted(self.threads)
        below = max((n for n in counts if n <= threads), default=counts[0])
        above = min((n for n in counts if n >= threads), default=counts[-1])
        rate = self.threads[below]
        if above != below:
            rate += (self.threads[above] - rate) * (threads - below) / (above - below)
        # Of the calibration's own runs: the profile may have another figure for all threads.
        rate *= self.profile.cpu_update_rate / max(self.threads.values())
        return rate * {"split": self.profile.cpu_speed_split, "int8": self.profile.cpu_speed_int8}.get(state.name, 1.0)

    def calibrated(self, threads: int) -> HardwareProfile:
        """Return the profile as calibration measures it since: with no more threads than the CPU lane uses."""
        rate = self.cpu_rate(MIXED, threads)
        return self.profile.replace(cpu_threads=threads, cpu_update_rate=rate)

    def gpu_rate(self, state: Format) -> float:
        """Parameters per second of an update on the device."""
        speeds = {"split": self.profile.gpu_speed_split, "int8": self.profile.gpu_speed_int8}
        return self.profile.gpu_update_rate * speeds.get(state.name, 1.0)

    def measured_s(self, setting: Setting, attached: bool) -> float | None:
        """Seconds of an iteration as measured; None if it was not."""
        return self.measured[attached].get(setting.contender)

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
        key = tuple(self.figures), self.cpu_rate(state, self.profile.cpu_threads), _traffic(self.profile, state)
        moved = state.state_bytes * streamed
        values = state.value_bytes * cpu
        return _fluid_s(key, cpu, moved + values, moved + values * gradients)


def _traffic(profile: HardwareProfile, state: Format | None) -> float:
    """Bytes of host memory that an update of a parameter moves. state: None, of the format that is calibrated."""
    return (state or MIXED).update_traffic * profile.cpu_traffic_factor


@functools.cache
def _library() -> Any:
    lib = ctypes.CDLL(str(arithmetic()))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    lib.timed_new.restype, lib.timed_new.argtypes = pointer, [ctypes.POINTER(number)]
    lib.timed_delete.argtypes = [pointer]
    lib.timed_copy.argtypes = [pointer, ctypes.c_int, ctypes.c_int, number]
    lib.timed_compute.argtypes = [pointer, ctypes.c_int, number]
    lib.timed_mark.argtypes = [pointer, ctypes.c_int]
    lib.timed_wait.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    lib.timed_update.argtypes = [pointer, number, number, number]
    lib.timed_advance.argtypes = [pointer, number]
    lib.timed_at.restype, lib.timed_at.argtypes = number, [pointer, ctypes.c_int]
    return lib


class Asked:
    """A simulation that is asked what would be when. figures: those of `timed::Machine`."""

    def __init__(self, figures: list[float]) -> None:
        self._lib = _library()
        self._this = self._lib.timed_new((ctypes.c_double * len(figures))(*figures))

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
        return self._lib.timed_update(self._this, parameters, rate, traffic)

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
    folder, measured = FILES[name]
    results = json.loads((RESULTS / folder / "results.json").read_text())["checks"]
    calibration = results["calibration"]["figures"]
    beside = [calibration["figures"][f"{rate}_beside"]["value"] for rate in ("cpu_update_rate", *_LINKS)]
    contest = results.get("contest", {}) if measured == "results.json" else _read(folder, measured)
    figures = contest.get("figures", {})
    profile = HardwareProfile.from_json(_read(folder, "profile.json"))
    links = profile.h2d_bandwidth_duplex, profile.d2h_bandwidth_duplex
    kept = [rate / alone for rate, alone in zip(beside, (profile.cpu_update_rate, *links), strict=True)]
    fields = {field.name for field in dataclasses.fields(profile)}
    if "h2d_weight" in fields:  # as calibration measures them since; the versions that these machines ran have none
        profile = dataclasses.replace(profile, h2d_weight=kept[1] / kept[0], d2h_weight=kept[2] / kept[0])
    return Machine(
        profile,
        (beside[0], beside[1], beside[2]),
        {int(count): rate for count, rate in calibration["threads_tried"].items()},
        {attached: _iterations(figures.get(key, {})) for attached, key in ((True, "attached"), (False, "contenders"))},
    )


_LINKS = "h2d_bandwidth", "d2h_bandwidth"


def _read(folder: str, file: str) -> Any:
    return json.loads((RESULTS / folder / file).read_text())


def _iterations(contenders: Mapping[str, Any]) -> dict[str, float]:
    found = {name: each["iteration_s"] for name, each in contenders.items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None and math.isfinite(seconds)}
