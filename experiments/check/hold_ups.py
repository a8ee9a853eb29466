"""Do copies slow down forward and backward, and do copies of state delay other copies? That a step waits for nothing,
tests/cuda checks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dos.devices import Copy, Device, Job, pinned_zeros
from dos.devices.cuda import CudaDevice
from experiments.check.base import Bench, Size
from experiments.check.contest import Clock
from experiments.check.models import MEDIUM, emulated_device, fitted, prepare
from experiments.harness import Limit, medians, ratio, take_turns
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
QUEUED = 8
"""Copies of state that are queued before one for which compute waits."""
URGENT_SHARE = 4
"""How many times smaller that is."""
SAVED, BATCH = "a saved tensor", "the caller's batch"
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
    copies: dict[str, list[float]] = {way: [] for way in WAYS}

    def beside(way: str, number: int) -> Sequence[float]:
        """Seconds of forward and backward beside copies; how much longer the copies take is kept."""
        jobs = [job for op in WAYS[way] for job in start(op, min(AT_MOST, 1 + int(LONGER * alone_s / copy_s[op])))]
        found = seconds(jobs)
        copies[way].append(statistics.median((span := job.wait()).duration / copy_s[span.op] for job in jobs))
        return found

    def waiting(name: str, number: int) -> Sequence[float]:
        return [urgent.share_waited(name, lambda: start(Op.PREFETCH, QUEUED))]

    urgent = Urgent(device, bench.cuda, nbytes // URGENT_SHARE)
    contestants: dict[str, Callable[[int], Sequence[float]]] = {ALONE: lambda number: seconds([])}
    contestants |= {way: partial(beside, way) for way in WAYS}
    contestants |= {name: partial(waiting, name) for name in urgent.copies}
    # The first round always takes place, the others while there is time.
    turns = take_turns(contestants, range(ROUNDS[bench.size]), left=lambda: max(0.0, bench.left()))
    slower = {
        way: {
            part: ratio(*([times[i] for times in turns[name]] for name in (way, ALONE))) or math.nan
            for i, part in enumerate(("forward", "backward"))
        }
        for way in (ALONE, *WAYS)
    }
    bytes_per_s = {op.value: nbytes / seconds for op, seconds in copy_s.items()}
    longer = medians(copies)
    waited = medians({name: [share for (share,) in turns[name]] for name in urgent.copies})
    bench.note(parameters=job.numel, slower=slower, bytes_per_s=bytes_per_s, copies_longer=longer, waited=waited)
    for way in WAYS:
        parts = f"forward {slower[way]['forward']:.2f}x, backward {slower[way]['backward']:.2f}x"
        bench.say(f"{way}: {parts}, the copies themselves {longer[way]:.2f}x")
    for name, share in waited.items():
        bench.say(f"{name} waits for {share:.0%} of the state that was queued before it")
    if bench.cuda:
        bench.target(
            Limit.at_most("forward and backward beside copies over alone", max(slower[BOTH].values()), 1.1, BOTH)
        )
        for name, share in waited.items():
            bench.target(Limit.at_most(f"share of queued state that {name} waits for", share, 0.25))


class Urgent:
    """Copies to the device for which compute waits, by what is copied; each returns the seconds that it took."""

    def __init__(self, device: Device, cuda: bool, nbytes: int) -> None:
        host = pinned_zeros(device, nbytes, torch.uint8)
        there = device.allocate(nbytes)

        def saved() -> float:
            issued = time.perf_counter()
            return device.copy(Op.RESTORE, 0, [(there, host)]).wait().end - issued

        def batch() -> float:
            issued = time.perf_counter()
            there.copy_(host, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return time.perf_counter() - issued

        self.copies: dict[str, Callable[[], float]] = {SAVED: saved}
        if cuda:  # an emulated device has no queue of the caller's
            self.copies[BATCH] = batch
        self._alone_s = {what: statistics.median(copy() for _ in range(3)) for what, copy in self.copies.items()}

    def share_waited(self, what: str, queue: Callable[[], Sequence[Job]]) -> float:
        """The share of the jobs of `queue`, queued before, that goes first: 0 for none, 1 for all."""
        jobs = queue()
        seconds = self.copies[what]()
        in_all = sum(job.wait().duration for job in jobs)
        return max(0.0, seconds - self._alone_s[what]) / in_all
