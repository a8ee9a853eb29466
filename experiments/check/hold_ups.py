"""Do copies hold up forward and backward? That a step waits for nothing is what tests/cuda checks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from dos.devices import Copy, Device, Job, pinned_zeros
from dos.devices.cuda import CudaDevice
from experiments.check.base import Bench, Size, Target
from experiments.check.contest import Clock
from experiments.check.models import MEDIUM, emulated_device, fitted, prepare
from perfmodel import Op

MOST = 300e6
"""Parameters that are enough for this."""
COPIED = {Size.TINY: 1 << 14, Size.SMALL: 1 << 18, Size.FULL: 1 << 26}
"""Bytes of one copy."""
ROUNDS = {Size.TINY: 1, Size.SMALL: 2, Size.FULL: 5}
LONGER = 1.2
"""By this factor the copies take longer than what they run beside."""
AT_MOST = 200
"""Copies each way."""
ALONE, BOTH = "alone", "copies both ways"
WAYS = {"copies to the GPU": (Op.PREFETCH,), "copies to the host": (Op.FLUSH,), BOTH: (Op.PREFETCH, Op.FLUSH)}


def run(bench: Bench) -> None:
    """Forward and backward alone and beside copies on the optimizer's streams, in turns; ratios are of one round."""
    torch_device = prepare(bench)
    job = fitted(MEDIUM[bench.size], bench, most=MOST)
    model, (batch,) = job.model(torch_device), job.batches(1, torch_device)
    device: Device = CudaDevice(torch_device) if bench.cuda else emulated_device(job, job.numel // 12 + 1)
    nbytes, clock = COPIED[bench.size], Clock(bench.cuda)
    host = [pinned_zeros(device, nbytes, torch.uint8) for _ in range(2)]
    there = [device.allocate(nbytes) for _ in range(2)]
    pairs: dict[Op, Copy] = {Op.PREFETCH: (there[0], host[0]), Op.FLUSH: (host[1], there[1])}

    def start(op: Op, count: int) -> list[Job]:
        return [device.copy(op, 0, [pairs[op]]) for _ in range(count)]

    def seconds(jobs: Sequence[Job]) -> tuple[float, float]:
        """Of forward and of backward, beside copies that have been started."""
        marks = [clock.mark()]
        loss = model(*batch)
        marks.append(clock.mark())
        loss.backward()
        marks.append(clock.mark())
        for job in jobs:
            job.wait()
        clock.wait()
        model.zero_grad()
        forward, backward = clock.between(marks)
        return forward, backward

    alone_s = min(sum(seconds([])) for _ in range(2))
    copy_s = {op: statistics.median(job.wait().duration for job in start(op, 4)) for op in pairs}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in (ALONE, *WAYS)}
    for round_ in range(ROUNDS[bench.size]):
        if round_ and bench.left() < 0:
            break
        times[ALONE].append(seconds([]))
        for way, ops in WAYS.items():
            jobs = [job for op in ops for job in start(op, min(AT_MOST, 1 + int(LONGER * alone_s / copy_s[op])))]
            times[way].append(seconds(jobs))
    slower = {
        way: {
            part: statistics.median(f[i] / a[i] for a, f in zip(times[ALONE], found, strict=True))
            for i, part in enumerate(("forward", "backward"))
        }
        for way, found in times.items()
    }
    bytes_per_s = {op.value: nbytes / seconds for op, seconds in copy_s.items()}
    bench.note(parameters=job.numel, slower=slower, bytes_per_s=bytes_per_s)
    for way in WAYS:
        bench.say(f"{way}: forward {slower[way]['forward']:.2f}x, backward {slower[way]['backward']:.2f}x")
    if bench.cuda:
        worst = max(slower[BOTH].values())
        bench.target(Target.at_most("forward and backward beside copies over alone", worst, 1.1, BOTH))
