"""Runs updates and copies on this machine and takes their time: medians with their spread."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.devices import Device, Job, pinned_zeros
from dos.kernels.update import AdamArrays, AdamStep, adam_update
from perfmodel import Lane, Op, Span
from perfmodel.format import CODED, MASTER, MIXED, REST, SPLIT, Format

Exchange = Callable[[Any], list[Any]]
"""Gives every rank what each of them passed; returns once all have called."""

SMALL = 256
"""How many times smaller the jobs are that show fixed costs; nothing measured has fewer elements."""

_STEP = AdamStep(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
_BATCH = 4  # jobs queued at once, as the engine does
_BANDWIDTHS = {Op.PREFETCH: "h2d_bandwidth", Op.FLUSH: "d2h_bandwidth"}


@dataclass(frozen=True)
class Figure:
    """The median of some runs and their spread, the interquartile range over the median."""

    value: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
        return cls(middle, (high - low) / middle)

    def rate(self, amount: float) -> Figure:
        """Of a figure in seconds: how much is done in a second if `amount` is done meanwhile."""
        return Figure(amount / self.value, self.spread)


@dataclass(frozen=True)
class Effort:
    """How long to measure, and on how much.

    seconds: spent on each figure at least. repeats: of each figure at least, besides the warm-up.
    host_numel, device_numel: parameters updated at once on the host and on the device, far more than caches hold.
    copy_bytes: bytes of one transfer.
    emulated_s: seconds that one update or transfer of an emulated device may last.
    formats: whether updates are measured in all formats of the state, or in mixed precision alone.
    """

    seconds: float
    repeats: int
    host_numel: int
    device_numel: int
    copy_bytes: int
    emulated_s: float = 0.0
    formats: bool = True


def _arrays(zeros: Callable[[int, torch.dtype], Tensor], numel: int, formats: bool) -> dict[Format, AdamArrays]:
    """What updates of so many parameters read and write, in mixed precision and, if wanted, in the other formats.

    They share what has the same meaning, so that each finds numbers of usual size.
    """
    low = getattr(torch, MIXED.values)
    state = {field.name: zeros(numel, getattr(torch, field.type)) for field in MIXED.fields}
    gradient = zeros(numel, low).fill_(1e-3)  # so that its pages exist: nothing else writes to it
    parameter = zeros(numel, low)
    mixed = AdamArrays(gradient, state.pop(MASTER), **state, out=parameter)
    if not formats:
        return {MIXED: mixed}
    split = AdamArrays(gradient, parameter, **state, rest=zeros(numel, torch.int16))
    codes = {f.name: zeros(numel // f.block, getattr(torch, f.type)) for f in CODED.fields if f.name != REST}
    return {MIXED: mixed, SPLIT: split, CODED: split._replace(**codes)}


def _update(arrays: AdamArrays, numel: int, threads: int = 0) -> None:
    adam_update(arrays.slice(0, numel), step=_STEP, threads=threads)


class Bench:
    """The memory that is measured on, and the measurements. All figures are means over the ranks."""

    def __init__(self, device: Device | None, effort: Effort, exchange: Exchange) -> None:
        self._effort = effort
        self._exchange = exchange
        self._device = device
        self._held: list[Tensor] = []
        self._granted: dict[int, list[float]] = defaultdict(list)
        self._host = _arrays(self._host_zeros, effort.host_numel, effort.formats)
        if device is None:
            return
        try:
            self._on_device = _arrays(self._device_zeros, effort.device_numel, effort.formats)
            numel = effort.copy_bytes // 4
            # Destination and source.
            here, there = (self._host_zeros(numel, torch.float32) for _ in range(2))
            self._ends = {
                Op.PREFETCH: (self._device_zeros(numel, torch.float32), here.fill_(1.0)),
                Op.FLUSH: (there, self._device_zeros(numel, torch.float32)),
            }
        except torch.OutOfMemoryError:
            self.close()
            raise
        for job in device.fence():
            job.wait()  # the zeros are written before other streams use them

    def close(self) -> None:
        """Give the device's memory back."""
        if self._device is not None:
            while self._held:
                self._device.free(self._held.pop())

    def cpu_update(self, threads: Sequence[int]) -> dict[int, Figure]:
        """Parameters/s by number of threads. They take turns, so that a change of load meets all of them."""
        counts = list(dict.fromkeys(threads))
        seconds = len(counts) * self._effort.seconds
        runs = self._runs(lambda: [[self._update_host(n).duration] for n in counts], len(counts), seconds)
        return {n: self._agree(Figure.of(s)).rate(self._effort.host_numel) for n, s in zip(counts, runs, strict=True)}

    def cpu_speeds(self, threads: int) -> dict[str, Figure]:
        """How many times as fast as in mixed precision the CPU updates in each other format. They take turns."""
        return self._speeds("cpu", lambda: [self._update_host(threads, kept).duration for kept in self._host])

    def cpu_share(self, threads: int) -> float:
        """Of the time that so many threads wanted to run, the share for which other programs let them."""
        return min(f.value for f in self._exchange(Figure.of(self._granted[threads])))

    def copies(self) -> dict[str, Figure]:
        """Bytes/s of each direction alone, and seconds of fixed cost of a copy: the mean of both directions."""
        figures, fixed = {}, []
        for op, name in _BANDWIDTHS.items():
            rate, fixed_s = self._fit(partial(self._copy, op), self._effort.copy_bytes // 4)
            figures[name] = Figure(4 * rate.value, rate.spread)
            fixed.append(fixed_s)
        return {**figures, "copy_latency_s": _mean(fixed)}

    def duplex(self, alone: dict[str, Figure]) -> dict[str, Figure]:
        """Bytes/s of each direction while both run; the fixed cost of a copy counted apart, as alone."""
        alone_s = self._copy_seconds(alone)
        seconds = self._together(max(alone_s.values()))
        return {
            f"{name}_duplex": Figure(alone[name].value * alone_s[op] / seconds[op].value, seconds[op].spread)
            for op, name in _BANDWIDTHS.items()
        }

    def beside(self, alone: dict[str, Figure], threads: int) -> dict[str, Figure]:
        """Parameters/s of the CPU update and bytes/s each way while all three run; fixed costs included."""
        seconds = self._together(max(self._copy_seconds(alone).values()), threads)
        copies = {f"{name}_beside": seconds[op].rate(self._effort.copy_bytes) for op, name in _BANDWIDTHS.items()}
        return {"cpu_update_rate_beside": seconds[Op.UPDATE].rate(self._effort.host_numel)} | copies

    def device_update(self) -> dict[str, Figure]:
        """Parameters/s, and seconds of fixed cost of a launch."""

        def launch(numel: int) -> Job:
            return self._launch(MIXED, numel)

        rate, fixed = self._fit(launch, self._effort.device_numel)
        return {"gpu_update_rate": rate, "launch_latency_s": fixed}

    def device_speeds(self, alone: dict[str, Figure]) -> dict[str, Figure]:
        """How many times as fast as in mixed precision the device updates in each other format; fixed costs apart."""
        fixed = alone["launch_latency_s"].value

        def run() -> list[float]:
            jobs = [self._launch(kept, self._effort.device_numel) for kept in self._on_device]
            seconds = [job.wait().duration for job in jobs]
            return [max(s - fixed, s / 2) for s in seconds]

        return self._speeds("gpu", run)

    @property
    def _accelerator(self) -> Device:
        assert self._device is not None, "measured only with a device"
        return self._device

    def _host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._device is None:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        return pinned_zeros(self._device, numel, dtype)

    def _device_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._held.append(self._accelerator.allocate(numel * dtype.itemsize))
        return self._held[-1].view(dtype).zero_()

    def _launch(self, kept: Format, numel: int) -> Job:
        arrays = self._on_device[kept]
        return self._accelerator.launch(0, lambda: _update(arrays, numel), numel, state_format=kept.name)

    def _update_host(self, threads: int, kept: Format = MIXED) -> Span:
        numel, device = self._effort.host_numel, self._device
        update: AbstractContextManager[float] = nullcontext(time.perf_counter())
        if device is not None:
            update = device.host_update(numel, int(numel * kept.update_traffic), kept.name)
        with update as start:
            wall, used = time.perf_counter(), time.process_time()
            _update(self._host[kept], numel, threads)
            wall, used = time.perf_counter() - wall, time.process_time() - used
        self._granted[threads].append(used / (wall * threads))
        return Span(Lane.CPU, Op.UPDATE, 0, start, time.perf_counter())

    def _copy(self, op: Op, numel: int) -> Job:
        """As the engine copies a subgroup's state: all tensors in one job."""
        destination, source = (end[:numel].chunk(len(MIXED.fields)) for end in self._ends[op])
        return self._accelerator.copy(op, 0, list(zip(destination, source, strict=True)))

    def _copy_seconds(self, alone: dict[str, Figure]) -> dict[Op, float]:
        fixed, nbytes = alone["copy_latency_s"].value, self._effort.copy_bytes
        return {op: fixed + nbytes / alone[name].value for op, name in _BANDWIDTHS.items()}

    def _fit(self, issue: Callable[[int], Job], numel: int) -> tuple[Figure, Figure]:
        """Elements/s and the fixed cost in seconds: the line of time against size through a large and a small job."""
        small = numel // SMALL
        many, few = (self._timed(partial(_durations, partial(issue, n))) for n in (numel, small))
        fixed = (few.value * numel - many.value * small) / (numel - small)
        fixed = min(max(fixed, 0.0), many.value / 2)
        return Figure(numel / (many.value - fixed), many.spread), Figure(fixed, few.spread)

    def _together(self, copy_s: float, threads: int | None = None) -> dict[Op, Figure]:
        """Seconds of a copy each way, and with `threads` of a CPU update, while all of them run.

        copy_s: about what the slower copy takes.
        """
        stop = threading.Event()

        def keep_copying(op: Op) -> list[Span]:
            spans, queue = [], deque[Job]()
            while not stop.is_set():
                while len(queue) < _BATCH:
                    queue.append(self._copy(op, self._effort.copy_bytes // 4))
                spans.append(queue.popleft().wait())
            return spans + [job.wait() for job in queue]

        self._exchange(None)
        rounds = self._effort.repeats + 2  # the first and the last may have been alone for a while
        updates: list[Span] = []
        with ThreadPoolExecutor(len(self._ends)) as pool:
            copies = {op: pool.submit(keep_copying, op) for op in self._ends}
            try:
                end = time.perf_counter() + max(self._effort.seconds, rounds * copy_s)
                while threads is not None and (len(updates) < rounds or time.perf_counter() < end):
                    updates.append(self._update_host(threads))
                time.sleep(max(0.0, end - time.perf_counter()))
            finally:
                stop.set()
        spans = {op: future.result() for op, future in copies.items()}
        if threads is not None:
            spans[Op.UPDATE] = updates
        begin, end = max(of_op[0].start for of_op in spans.values()), min(of_op[-1].end for of_op in spans.values())
        beside = {op: [s.duration for s in of_op if begin <= s.start and s.end <= end] for op, of_op in spans.items()}
        return {op: self._agree(Figure.of(beside[op] or [s.duration for s in spans[op]])) for op in spans}

    def _timed(self, run: Callable[[], list[float]]) -> Figure:
        """Seconds of one job, of which `run` does some."""
        return self._agree(Figure.of(self._runs(lambda: [run()], 1, self._effort.seconds)[0]))

    def _speeds(self, lane: str, run: Callable[[], list[float]]) -> dict[str, Figure]:
        """By field of HardwareProfile. run: gives the seconds of an update in each format, mixed precision first.

        They are compared within a round, so that a change of load between rounds cancels out.
        """

        def ratios() -> list[list[float]]:
            mixed, *others = run()
            return [[mixed / seconds] for seconds in others]

        names = [f"{lane}_speed_{kept.name}" for kept in self._host if kept is not MIXED]
        samples = self._runs(ratios, len(names), self._effort.seconds)
        return {name: self._agree(Figure.of(list_)) for name, list_ in zip(names, samples, strict=True)}

    def _runs(self, run: Callable[[], list[list[float]]], kinds: int, seconds: float) -> list[list[float]]:
        """Rounds of so many seconds, begun by all ranks together; what `run` gives, in a list for each kind."""
        self._exchange(None)
        run()  # warm-up: first touch, compilation, threads
        samples: list[list[float]] = [[] for _ in range(kinds)]
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < self._effort.repeats or time.perf_counter() < end:
            for list_, more in zip(samples, run(), strict=True):
                list_ += more
            rounds += 1
        return samples

    def _agree(self, figure: Figure) -> Figure:
        return _mean(self._exchange(figure))


def _mean(figures: Sequence[Figure]) -> Figure:
    """With the largest spread."""
    return Figure(statistics.fmean(f.value for f in figures), max(f.spread for f in figures))


def _durations(issue: Callable[[], Job]) -> list[float]:
    """Seconds of each of some jobs, all queued before the first is waited for."""
    jobs = [issue() for _ in range(_BATCH)]
    return [job.wait().duration for job in jobs]
