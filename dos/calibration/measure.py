"""Measures this machine: the rates of the host, the links and the accelerator in its profile."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dos.calibration.bench import BATCH, SMALL, Bench
from dos.calibration.disk import LEAST_BYTES, UPDATE_BESIDE, DiskBench, unexplained
from dos.calibration.rounds import Effort, Exchange, Figure, Link, Rounds
from dos.calibration.sharing import UNCONTENDED, shares
from dos.devices import Device
from dos.machine.profiles import BUSY, NOT_MEASURED, ROUGH
from dos.machine.threads import lane_threads
from perfmodel import Op
from perfmodel.format import BLOCK, MIXED
from perfmodel.hardware import RATES, SPEEDS, WEIGHTS, HardwareProfile, Provenance, ThreadRates

Progress = Callable[[str, float], None]
"""A function of the label of the next measurement, and the share of all that is done."""

ENOUGH_CPU = 0.8
"""The least share of the CPU time that it wanted with which a measurement is trusted."""

WITHIN = 0.03
"""The share by which fewer threads may be slower and are still preferred."""

FULL = Effort(
    seconds=3.0,
    repeats=5,
    host_numel=2**26,
    device_numel=2**26,
    copy_bytes=2**28,
    emulated_s=0.05,
    disk_bytes=2**28,
    limit_s=40.0,
)
QUICK = Effort(
    seconds=0.3, repeats=3, host_numel=2**26, device_numel=2**24, copy_bytes=2**26, emulated_s=0.05, limit_s=12.0
)
MINIMUM = Effort(
    seconds=0.05, repeats=2, host_numel=2**24, device_numel=2**22, copy_bytes=2**25, emulated_s=0.01, formats=False
)


SLOW_CORE, SLOW_LINK = 2e8, 4e9
"""Parameters/s of one thread, and bytes/s, on machines for which the limit of an effort still holds."""


class Stage(NamedTuple):
    """A stage of a measurement. parts: the figures that `run` times one after the other."""

    label: str
    parts: int
    run: Callable[[], dict[str, Figure]]


@dataclass(frozen=True)
class Measurement:
    """The figures that were measured, per rank.

    figures: by field of HardwareProfile; with an accelerator also `cpu_update_rate_beside`, `h2d_bandwidth_beside` and
        `d2h_bandwidth_beside`, those three at once, and those of updates and copies one way, `..._beside_h2d`,
        `..._beside_d2h` and `..._beside_update`; with a disk `cpu_update_rate_beside_disk`,
        `disk_read_bandwidth_beside` and `disk_write_bandwidth_beside`, those three at once.
    trials: parameters/s of the CPU update by number of threads.
    beside: with an accelerator, by number of threads the figures that depend on it: `host_bandwidth`, `host_slowdown`
        unless that is emulated or the effort least, and `h2d_weight` and `d2h_weight` where updates and copies slowed
        each other down.
    threads: the number chosen.
    cpu_share: the share of CPU time that these threads got from other programs, of the time they wanted; 1 on an
        emulated device, whose host mostly waits.
    notes: remarks on the figures, a sentence each.
    """

    figures: dict[str, Figure]
    trials: dict[int, Figure]
    threads: int
    cpu_share: float
    notes: Sequence[str] = ()
    beside: Mapping[int, dict[str, Figure]] = dataclasses.field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether other programs took so much of the CPU that the rates are too low."""
        return self.cpu_share < ENOUGH_CPU

    def profile(self, base: HardwareProfile, machine: str, ranks: int = 1, note: str = "") -> HardwareProfile:
        """Return the measured profile of a host with `ranks`; figures that were not measured are those of `base`."""
        fields = [f.name for f in dataclasses.fields(base)]
        values: dict[str, Any] = {name: figure.value for name, figure in self.figures.items() if name in fields}
        parts = [note, *self.notes]
        missing = [name for name in RATES + WEIGHTS + SPEEDS if name not in values and name != "cpu_traffic_factor"]
        if missing:
            parts.append(f"{NOT_MEASURED} {base.name!r}: {', '.join(missing)}")
        if self.busy:
            parts.insert(0, f"{BUSY}: got {self.cpu_share:.0%} of the CPU time it wanted")
        return dataclasses.replace(
            base,
            **values | {"host_bandwidth": values["host_bandwidth"] * ranks},
            name="measured",
            ranks_per_host=ranks,
            cpu_traffic_factor=1.0,
            cpu_threads=self.threads,
            by_threads=tuple(self._by_threads(n, base, ranks) for n in self.beside),
            provenance=Provenance("measured", date.today().isoformat(), machine, "; ".join(filter(None, parts))),
        )

    def _by_threads(self, threads: int, base: HardwareProfile, ranks: int) -> ThreadRates:
        found = self.beside[threads]
        others = (found[name].value if name in found else getattr(base, name) for name in (*WEIGHTS, "host_slowdown"))
        return ThreadRates(threads, self.trials[threads].value, found["host_bandwidth"].value * ranks, *others)


def base_profile(device: Device | None) -> HardwareProfile:
    """Return the profile for figures that are not measured."""
    known = None if device is None else device.known_profile
    return known or HardwareProfile.builtin("unknown")


def name_of(device: Device | None) -> str:
    """Return the accelerator's name in profiles."""
    return "no accelerator" if device is None else device.name


def measure_minimum(device: Device | None) -> HardwareProfile:
    """Measure a rough profile in under 2 s, for a first step on a machine that was never calibrated.

    It is of this rank with as many threads as the CPU lane takes by itself; the memory of the measurement is released.
    Updates are not measured in each format of the state. Without enough device memory, or without a device, only the
    host is measured.
    """
    note = f"{ROUGH}; `python -m dos.calibrate` does better"
    threads = [lane_threads()]
    try:
        found = measure(device, MINIMUM, threads)
    except torch.OutOfMemoryError:
        found = measure(None, MINIMUM, threads)
    return found.profile(base_profile(device), name_of(device), note=note)


def believed_share(share: float, threads: int, rates: Mapping[int, float]) -> float:
    """Return the share of CPU time, or 1 if it cannot be true.

    Without the tick of a timer, as in a virtual machine that had run 16 threads, Linux counts the time of the calling
    thread alone while the others run. Then more threads have updated faster than their time allows.

    rates: parameters/s by number of threads.
    """
    gained = rates[threads] / rates[1] if 1 in rates else 0.0
    return share if share * threads > UNCONTENDED * gained else 1.0


def choose_threads(rates: dict[int, float]) -> int:
    """Return the fewest threads within 3% of the best rate."""
    return min(threads for threads, rate in rates.items() if rate >= (1 - WITHIN) * max(rates.values()))


def measure(
    device: Device | None,
    effort: Effort,
    threads: Sequence[int],
    *,
    exchange: Exchange = lambda value: [value],
    progress: Progress = lambda label, done: None,
    ranks: int = 1,
    disk: Sequence[Path] = (),
) -> Measurement:
    """Measure the host, and the device and the disk if there are any.

    threads: numbers of threads to try. exchange: among ranks that measure together, of which every figure is the mean.
    ranks: the number that share the host's memory. disk: folders for state on disk.

    Raises torch.OutOfMemoryError if the device has no memory to measure with, OSError if a folder cannot be used.
    """
    lanes = 1 if device is None else 2
    emulated = device is not None and device.known_profile is not None
    slows = effort.formats and not emulated  # in a moment it cannot be told from noise
    each = 0 if device is None else 3 + slows
    parts = lanes * effort.formats + len(set(threads)) * (1 + each) + (0 if device is None else 9)
    all_parts = parts + (6 if disk else 0)
    rounds = Rounds(_fitted(effort, device, ranks, effort.limit_s / parts), exchange)
    rounds.limit(effort.limit_s * all_parts / parts, all_parts)  # a disk takes time of its own
    with closing(DiskBench(disk, device, rounds, ranks)) if disk else nullcontext() as on_disk:
        progress("CPU update", 0.0)
        bench = Bench(device, rounds)
        course = _Course(bench, rounds, bench.cpu_update(threads), slows)
        for stage in course.stages(device is not None, on_disk):
            progress(stage.label, 1 - rounds.parts / all_parts)
            left = rounds.parts - stage.parts
            course.figures |= stage.run()
            assert rounds.parts == left, stage.label
        assert not rounds.parts, "all that was counted has been measured"
        notes = [on_disk.note()] if on_disk is not None else []
    figures, rates, chosen = course.figures, course.rates, course.chosen
    figures["host_bandwidth"] = _host_bandwidth(figures)
    by_count = {n: figure.value for n, figure in rates.items()}
    share = 1.0 if emulated else believed_share(bench.cpu_share(chosen), chosen, by_count)
    found = Measurement(figures, rates, chosen, share, beside=course.by_threads)
    if on_disk is not None:
        notes.append(unexplained(figures, found.profile(base_profile(device), "")))
    return dataclasses.replace(found, notes=[note for note in notes if note])


class _Course:
    """The figures of one measurement so far, and the stages that add to them.

    trials: rates of updates by number of threads, with their fixed costs; rates: without these, once they are known.
    slows: whether it is measured how much longer the host's other work takes beside updates.
    chosen: the number of threads of the CPU lane. by_threads: as `Measurement.beside`.
    """

    def __init__(self, bench: Bench, rounds: Rounds, trials: dict[int, Figure], slows: bool) -> None:
        self.chosen = choose_threads({n: figure.value for n, figure in trials.items()})
        self.figures, self.rates = {"cpu_update_rate": trials[self.chosen]}, dict(trials)
        self.by_threads: dict[int, dict[str, Figure]] = {}
        self._bench, self._rounds, self._trials, self._slows = bench, rounds, trials, slows

    def stages(self, with_device: bool, on_disk: DiskBench | None) -> Iterator[Stage]:
        """Return what is measured after the trials, in this order."""
        bench, formats = self._bench, self._rounds.effort.formats
        if formats:
            yield Stage("CPU updates by format", 1, lambda: bench.cpu_speeds(self.chosen))
        if with_device:
            yield Stage("short CPU updates", 2, self._turns)
            yield from self._copies("copies", bench.link)
            for n in self._trials:
                yield Stage(f"beside updates by {n} threads", 3 + self._slows, partial(self._beside_updates, n))
            yield Stage("device updates", 2, bench.device_update)
            if formats:
                yield Stage("device updates by format", 1, lambda: bench.device_speeds(self.figures))
        if on_disk is not None:
            link = on_disk.link
            yield from self._copies("disk", link)
            yield Stage("disk beside CPU updates", 1, lambda: self._beside(link, self.chosen, link.ways[-1]))

    def _turns(self) -> dict[str, Figure]:
        fixed = self._bench.cpu_turn(self.chosen)
        for n, with_fixed in self._trials.items():
            self.rates[n] = with_fixed.without(fixed, self._rounds.effort.host_numel)
        return {"turn_latency_s": fixed, "cpu_update_rate": self.rates[self.chosen]}

    def _copies(self, name: str, link: Link) -> Iterator[Stage]:
        yield Stage(name, 4, link.alone)
        yield Stage(f"{name} both ways", 1, lambda: link.duplex(self.figures))

    def _beside(self, link: Link, threads: int, ways: tuple[Op, ...]) -> dict[str, Figure]:
        numel = self._rounds.effort.host_numel
        return link.beside(self.figures, lambda: [self._bench.update_host(threads)], numel, ways)

    def _beside_updates(self, threads: int) -> dict[str, Figure]:
        link = self._bench.link
        found = {name: rate for ways in link.ways for name, rate in self._beside(link, threads, ways).items()}
        # Of rates with fixed costs, as those beside each other are.
        shared = shares(self.figures | {"cpu_update_rate": self._trials[threads]} | found, link)
        total = _host_bandwidth(self.figures | {"cpu_update_rate": self.rates[threads]} | shared)
        late = self._bench.host_slowdown(threads) if self._slows else {}
        self.by_threads[threads] = shared | late | {"host_bandwidth": total}
        return found | shared | late if threads == self.chosen else {}


def _fitted(effort: Effort, device: Device | None, ranks: int, figure_s: float) -> Effort:
    """Return the effort reduced to the memory, to `figure_s` for a figure, and on an emulated device to `emulated_s`.

    figure_s: seconds; infinite: no limit.
    """
    host, on_device = effort.host_numel, effort.device_numel
    copied, on_disk = effort.copy_bytes, effort.disk_bytes
    if figure_s < math.inf:
        run_s = figure_s / (effort.repeats + 1)
        host, copied = min(host, int(run_s * SLOW_CORE)), min(copied, int(run_s * SLOW_LINK / BATCH))
    rates, seconds = None if device is None else device.known_profile, effort.emulated_s
    if rates is not None:
        host = min(host, int(seconds * rates.cpu_update_rate))
        on_device = min(on_device, int(seconds * rates.gpu_update_rate))
        copied = min(copied, int(seconds * min(rates.h2d_bandwidth, rates.d2h_bandwidth)))
        on_disk = min(on_disk, int(seconds * min(rates.disk_read_bandwidth, rates.disk_write_bandwidth)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    host = min(host, int(memory / (8 * MIXED.held_bytes)))
    if device is not None:
        free = device.memory().free
        on_device, copied = min(on_device, int(free / (4 * MIXED.held_bytes))), min(copied, free // 8)
    return dataclasses.replace(
        effort,
        host_numel=max(host, SMALL) // BLOCK * BLOCK,
        device_numel=max(on_device, 2 * SMALL) // BLOCK * BLOCK,
        copy_bytes=max(copied, 8 * SMALL),
        disk_bytes=max(on_disk, LEAST_BYTES),
    )


def _host_bandwidth(figures: dict[str, Figure]) -> Figure:
    """Return the bytes/s of host memory that one rank reaches.

    With copies it is the one that explains how updates and copies slowed each other down (`sharing.shares`), else the
    bytes/s of the CPU update alone (`MIXED.update_traffic` per parameter). It is never less than the bytes/s of the CPU
    update or of copies (one byte each) alone, or of CPU update, reads and writes together, because the model would slow
    them down even then. `cpu_traffic_factor` stays 1.
    """
    combinations = [
        ("cpu_update_rate",),
        ("h2d_bandwidth_duplex", "d2h_bandwidth_duplex"),
        ("host_bandwidth",),
        (UPDATE_BESIDE, "disk_read_bandwidth_beside", "disk_write_bandwidth_beside"),
    ]

    def traffic(names: Iterable[str]) -> float:
        return sum(figures[n].value * (MIXED.update_traffic if n.startswith("cpu") else 1) for n in names)

    best = max((names for names in combinations if figures.keys() >= set(names)), key=traffic)
    return Figure(traffic(best), max(figures[n].spread for n in best))
