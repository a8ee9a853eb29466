"""Times updates and copies on this machine: medians with their spread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from dos.calibration.rounds import Figure, Link, Rounds
from dos.devices import Device, Job, pinned_zeros
from dos.devices.pinned import lazy_zeros
from dos.kernels.update import AdamArrays, AdamBatch, AdamStep, adam_update, prepare
from perfmodel import Lane, Op, Span
from perfmodel.format import BLOCK, CODED, MASTER, MIXED, REST, SPLIT, Format

SMALL = 256
"""How many times smaller the jobs are that show fixed costs; nothing measured has fewer elements."""

_STEP = AdamStep(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
BATCH = 4
"""The number of jobs queued at once, as the engine does."""
HOST_WORK_S = 0.02
"""In which the host repeats small work, alone and beside updates; more passes of `small_work` than noise outlasts."""
BANDWIDTHS = {Op.PREFETCH: "h2d_bandwidth", Op.FLUSH: "d2h_bandwidth"}


def _arrays(zeros: Callable[[int, torch.dtype], Tensor], numel: int, formats: bool) -> dict[Format, AdamArrays]:
    """Return the tensors of updates of `numel` parameters in mixed precision and, if wanted, in all formats.

    Formats share tensors of the same meaning, so that each update reads numbers of usual size.
    """
    low = getattr(torch, MIXED.values)
    state = {field.name: zeros(numel, getattr(torch, field.type)) for field in MIXED.fields}
    gradient = zeros(numel, low).fill_(1e-3)  # allocates its pages: no update writes to it
    parameter = zeros(numel, low)
    mixed = AdamArrays(gradient, state.pop(MASTER), **state, out=parameter)
    if not formats:
        return {MIXED: mixed}
    split = AdamArrays(gradient, parameter, **state, rest=zeros(numel, torch.int16))
    codes = {f.name: zeros(numel // f.block, getattr(torch, f.type)) for f in CODED.fields if f.name != REST}
    return {MIXED: mixed, SPLIT: split, CODED: split._replace(**codes)}


def host_zeros(device: Device | None, numel: int, dtype: torch.dtype) -> Tensor:
    """Return 1-D zeros on a page boundary, pinned for the device if there is one."""
    return lazy_zeros(numel, dtype) if device is None else pinned_zeros(device, numel, dtype)


def small_work() -> Callable[[], None]:
    """Return a function that runs a pass of small modules forward and backward: work of Python and PyTorch alone."""
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)) for _ in range(24)]
    model, batch = torch.nn.Sequential(*layers), torch.randn(4, 16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return lambda: model(batch).sum().backward()


def pass_s(work: Callable[[], None], least_s: float) -> float:
    """Return the seconds of a pass of `work`, repeated for at least so long."""
    begin, passes = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < least_s or not passes:
        work()
        passes += 1
    return seconds / passes


class Bench:
    """The measurements, and the memory that they use. All figures are means over the ranks."""

    def __init__(self, device: Device | None, rounds: Rounds) -> None:
        self._rounds = rounds
        self._effort = effort = rounds.effort
        self._device = device
        self._granted: dict[int, list[float]] = defaultdict(list)
        self._host = _arrays(partial(host_zeros, device), effort.host_numel, effort.formats)
        if device is None:
            return
        self._on_device = _arrays(self._device_zeros, effort.device_numel, effort.formats)
        numel = effort.copy_bytes // 4
        # Destination and source.
        here, there = (host_zeros(device, numel, torch.float32) for _ in range(2))
        self._ends = {
            Op.PREFETCH: (self._device_zeros(numel, torch.float32), here.fill_(1.0)),
            Op.FLUSH: (there, self._device_zeros(numel, torch.float32)),
        }
        for job in device.fence():
            job.wait()  # the zeros are written before other streams use them

    def cpu_update(self, threads: Sequence[int]) -> dict[int, Figure]:
        """Measure parameters/s by number of threads, in turns, so that a change of load affects all of them."""
        counts = list(dict.fromkeys(threads))
        seconds = self._rounds.timed(lambda: [[self.update_host(n).duration] for n in counts], len(counts))
        return {n: each.rate(self._effort.host_numel) for n, each in zip(counts, seconds, strict=True)}

    def cpu_turn(self, threads: int) -> Figure:
        """Measure the fixed cost of an update on the CPU in seconds."""
        numel = self._effort.host_numel
        small = max(BLOCK, numel // SMALL)
        return self._rounds.fit(lambda n: [self.update_host(threads, numel=n)], numel, small)[1]

    def cpu_speeds(self, threads: int) -> dict[str, Figure]:
        """Measure how many times as fast as in mixed precision the CPU updates in each other format, in turns."""
        return self._speeds("cpu", lambda: [self.update_host(threads, kept).duration for kept in self._host])

    def host_slowdown(self, threads: int) -> dict[str, Figure]:
        """Measure how many times as long small work of the host takes beside updates with this number of threads."""
        work = small_work()

        def slower() -> list[list[float]]:
            alone_s, done = pass_s(work, HOST_WORK_S), threading.Event()

            def repeat() -> None:
                while not done.is_set():
                    adam_update(self._host[MIXED], step=_STEP, threads=threads)

            with ThreadPoolExecutor(1) as pool:
                updates = pool.submit(repeat)
                beside_s = pass_s(work, HOST_WORK_S)
                done.set()
                updates.result()
            return [[max(1.0, beside_s / alone_s)]]

        return {"host_slowdown": self._rounds.timed(slower)[0]}

    def cpu_share(self, threads: int) -> float:
        """Return the share of CPU time that this number of threads got from other programs, of the time they wanted."""
        return min(f.value for f in self._rounds.exchange(Figure.of(self._granted[threads])))

    @property
    def link(self) -> Link:
        """The measurements of copies."""
        nbytes = self._effort.copy_bytes
        update = "cpu_update_rate_beside"
        return Link(self._rounds, BANDWIDTHS, "copy_latency_s", update, nbytes, nbytes // SMALL, self._transfer)

    def device_update(self) -> dict[str, Figure]:
        """Measure parameters/s on the device, and the fixed cost of a launch in seconds."""
        numel = self._effort.device_numel
        rate, fixed = self._rounds.fit(lambda n: self._updates([MIXED] * BATCH, n), numel, numel // SMALL)
        return {"gpu_update_rate": rate, "launch_latency_s": fixed}

    def device_speeds(self, alone: dict[str, Figure]) -> dict[str, Figure]:
        """Measure how many times as fast as in mixed precision the device updates in each other format.

        Without the fixed cost of a launch.
        """
        fixed = alone["launch_latency_s"].value

        def run() -> list[float]:
            spans = self._updates(list(self._on_device), self._effort.device_numel)
            return [max(span.duration - fixed, span.duration / 2) for span in spans]

        return self._speeds("gpu", run)

    def update_host(self, threads: int, kept: Format = MIXED, numel: int | None = None) -> Span:
        """Run an update with this number of threads, of state in this format; return its span.

        numel: parameters, by default those of the effort.
        """
        numel, device = self._effort.host_numel if numel is None else numel, self._device
        update: AbstractContextManager[float] = nullcontext(time.perf_counter())
        if device is not None:
            update = device.host_update(numel, int(numel * kept.update_traffic), kept.name)
        with update as start:
            wall, used = time.perf_counter(), time.process_time()
            adam_update(self._host[kept].slice(0, numel), step=_STEP, threads=threads)
            wall, used = time.perf_counter() - wall, time.process_time() - used
        self._granted[threads].append(used / (wall * threads))
        return Span(Lane.CPU, Op.UPDATE, 0, start, time.perf_counter())

    @property
    def _accelerator(self) -> Device:
        assert self._device is not None, "measured only with a device"
        return self._device

    def _device_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._accelerator.allocate(numel * dtype.itemsize).view(dtype).zero_()

    def _updates(self, formats: Sequence[Format], numel: int) -> list[Span]:
        """Run updates of state in these formats one after the other, and keep the device from waiting for the host."""
        device = self._accelerator
        # Launching an update takes the host as long as millions of parameters take the device, which would idle between
        # its start and its end (seen on an H200: a rate of 1.8e11, where its memory allows 1.4e11).
        ahead = self._copy(Op.PREFETCH, self._effort.copy_bytes, 1) if device.queues else []
        jobs = []
        for kept in formats:
            # As the engine does, before the device records the start.
            update = prepare([AdamBatch([self._on_device[kept].slice(0, numel)])], [_STEP])
            jobs.append(device.launch(0, update, numel, ahead, state_format=kept.name))
        return [job.wait() for job in jobs]

    def _transfer(self, op: Op, nbytes: int) -> list[Span]:
        """Run several copies, all of which are queued before the wait for the first; return their spans."""
        return [job.wait() for job in self._copy(op, nbytes, BATCH)]

    def _copy(self, op: Op, nbytes: int, count: int) -> list[Job]:
        """Queue copies as the engine copies a subgroup's state: all tensors in one job."""
        destination, source = (end[: nbytes // 4].chunk(len(MIXED.fields)) for end in self._ends[op])
        copies = list(zip(destination, source, strict=True))
        return [self._accelerator.copy(op, 0, copies) for _ in range(count)]

    def _speeds(self, lane: str, run: Callable[[], list[float]]) -> dict[str, Figure]:
        """Return speeds by field of HardwareProfile.

        run: returns the seconds of an update in each format, mixed precision first. Formats are compared within a
        round, so that a change of load between rounds cancels out.
        """

        def ratios() -> list[list[float]]:
            mixed, *others = run()
            return [[mixed / seconds] for seconds in others]

        names = (f"{lane}_speed_{kept.name}" for kept in self._host if kept is not MIXED)
        return dict(zip(names, self._rounds.timed(ratios), strict=True))
