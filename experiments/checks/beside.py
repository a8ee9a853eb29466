"""How much slower are forward and backward while data is copied to and from the GPU, and copies while it computes?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from dos.devices import Copy, Device, Job, pinned_zeros
from dos.devices.cuda import CudaDevice
from experiments.checks.base import Bench, Size, Target
from experiments.checks.contest import Clock
from experiments.checks.machine import machine_for
from experiments.checks.training import MEDIUM, Batch, fitted, prepare
from experiments.gpt import GPT
from perfmodel import Op, Span

COPIED = {Size.TINY: 1 << 14, Size.SMALL: 1 << 18, Size.FULL: 1 << 26}
"""Bytes of one copy."""
ROUNDS = {Size.TINY: 1, Size.SMALL: 2, Size.FULL: 5}
MOST = 400e6
"""Parameters that are enough for this."""
LONGER = 1.2
"""By this factor the copies take longer than what they run beside."""
AT_MOST = 200
"""Copies each way."""

ALONE, BOTH = "alone", "copies both ways"
WAYS = {"copies to the GPU": (Op.PREFETCH,), "copies to the host": (Op.FLUSH,), BOTH: (Op.PREFETCH, Op.FLUSH)}


def run(bench: Bench) -> None:
    """Forward and backward alone and beside copies, in turns; ratios are of one round."""
    torch_device = prepare(bench)
    job = fitted(MEDIUM[bench.size], bench.settings, most=MOST)
    emulated = machine_for(bench, job, job.numel // 12 + 1).device
    device: Device = CudaDevice(torch_device) if emulated is None else emulated
    model, (batch,) = job.model(torch_device), job.batches(1, torch_device)
    clock, lanes = Clock(bench.cuda), Copies(device, COPIED[bench.size])
    for _ in range(2):
        alone_s = sum(timed(model, batch, clock, [])[:2])
    copy_s = {op: statistics.median(span.duration for span in lanes.wait(lanes.start(op, 4))) for op in lanes.pairs}
    times: dict[str, list[tuple[float, float]]] = {ALONE: [], **{way: [] for way in WAYS}}
    rates: dict[str, list[float]] = {}
    for round_ in range(ROUNDS[bench.size]):
        if round_ and bench.left() < 0:
            break
        forward, backward, _ = timed(model, batch, clock, [])
        times[ALONE].append((forward, backward))
        for way, ops in WAYS.items():
            count = {op: min(AT_MOST, 1 + int(LONGER * alone_s / copy_s[op])) for op in ops}
            jobs = [copy for op in ops for copy in lanes.start(op, count[op])]
            forward, backward, spans = timed(model, batch, clock, jobs)
            times[way].append((forward, backward))
            for op in ops:
                durations = [span.duration for span in spans if span.op is op]
                rate = lanes.nbytes / statistics.median(durations)
                rates.setdefault(f"{way}: {op.value}", []).append(rate)
        slower = {way: [ratios(times[ALONE], found, part) for part in (0, 1)] for way, found in times.items()}
        bench.note(
            parameters=job.numel,
            seconds={way: {"forward": [f for f, _ in t], "backward": [b for _, b in t]} for way, t in times.items()},
            slower={way: {"forward": forward, "backward": backward} for way, (forward, backward) in slower.items()},
            bytes_per_s={op.value: lanes.nbytes / seconds for op, seconds in copy_s.items()},
            bytes_per_s_beside={name: statistics.median(found) for name, found in rates.items()},
        )
    if bench.cuda:
        worst = max(slower[BOTH])
        bench.target(Target.at_most("forward and backward beside copies over alone", worst, 1.1, BOTH))


def timed(model: GPT, batch: Batch, clock: Clock, jobs: Sequence[Job]) -> tuple[float, float, list[Span]]:
    """Seconds of forward and of backward, and when the copies that were started before them ran."""
    marks = [clock.mark()]
    loss = model(*batch)
    marks.append(clock.mark())
    loss.backward()
    marks.append(clock.mark())
    spans = [job.wait() for job in jobs]
    clock.wait()
    model.zero_grad()
    forward, backward = clock.between(marks)
    return forward, backward, spans


def ratios(alone: Sequence[tuple[float, float]], found: Sequence[tuple[float, float]], part: int) -> float:
    """Median over the rounds of how many times as long as alone."""
    return statistics.median(f[part] / a[part] for a, f in zip(alone, found, strict=True))


class Copies:
    """Copies of `nbytes` on the optimizer's own streams, each way between memory of its own."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        host = [pinned_zeros(device, nbytes, torch.uint8) for _ in range(2)]
        there = [device.allocate(nbytes) for _ in range(2)]
        self.pairs: dict[Op, Copy] = {Op.PREFETCH: (there[0], host[0]), Op.FLUSH: (host[1], there[1])}

    def start(self, op: Op, count: int) -> list[Job]:
        """So many, one after the other, beside whatever else runs."""
        return [self._device.copy(op, 0, [self.pairs[op]]) for _ in range(count)]

    @staticmethod
    def wait(jobs: Sequence[Job]) -> list[Span]:
        """When they ran, once they have."""
        return [job.wait() for job in jobs]
