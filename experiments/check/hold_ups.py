"""Does a step hold up the GPU, and do copies hold up forward and backward?"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dos import DOSAdam
from dos.devices import Copy, Device, Job, pinned_zeros
from dos.devices.cuda import CudaDevice
from experiments.check.base import Bench, Size, Target
from experiments.check.contest import Clock
from experiments.check.models import MEDIUM, SETTINGS, Batch, emulated_device, fitted, prepare
from experiments.gpt import GPT
from perfmodel import Op

MARK = "one DOSAdam.step()"
WAITS = ("Synchronize", "cudaFree", "cuMemFree", "cudaHostRegister", "cudaHostUnregister")
"""Parts of the names of CUDA calls that wait for the device; and copies that are not asynchronous."""
MOST = 300e6
"""Parameters that are enough for this."""
WARM_UP = 3
"""Iterations."""
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
    """Calls of a step that wait for the GPU; forward and backward alone and beside copies."""
    torch_device = prepare(bench)
    job = fitted(MEDIUM[bench.size], bench, most=MOST)
    size = job.numel // 12 + 1
    model, (batch,) = job.model(torch_device), job.batches(1, torch_device)
    device: Device = CudaDevice(torch_device) if bench.cuda else emulated_device(job, size)
    bench.note(parameters=job.numel)
    copies(bench, model, batch, device)
    if bench.cuda:
        for name, policy in (("all on the GPU", 0.0), ("a third streamed, the others on the host", "stride:3")):
            optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=size, **SETTINGS)
            optimizer.attach(model)
            waits(bench, name, model, batch, optimizer)
            optimizer.synchronize()
            del optimizer


def waits(bench: Bench, name: str, model: GPT, batch: Batch, optimizer: DOSAdam) -> None:
    """Profile a step, once state is where it stays, kernels are compiled and events exist."""

    def iterate() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        with record_function(MARK):
            optimizer.step()

    for _ in range(WARM_UP):
        iterate()
    path = bench.out / f"trace-{name.split()[0]}.json"
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        iterate()
        torch.cuda.synchronize()
    found.export_chrome_trace(str(path))
    text = path.read_text()
    path.unlink()
    path.with_suffix(".json.gz").write_bytes(gzip.compress(text.encode()))
    calls = calls_within(json.loads(text), MARK)
    waited = waiting(calls)
    bench.note(**{name: {"cuda_calls_in_step": dict(calls), "that_wait": waited, "trace": f"{path.name}.gz"}})
    title = "calls in step() that wait for the GPU"
    if calls:
        bench.target(Target.at_most(title, sum(waited.values()), 0, f"{name} {waited or ''}"))
    else:
        bench.target(Target.unmeasured(title, "at most 0", f"{name}: the profile shows no CUDA call at all"))


def calls_within(trace: Mapping[str, Any], mark: str) -> Counter[str]:
    """CUDA calls that the thread of the range `mark` has made while it was in it, by name.

    trace: as torch.profiler exports it. Work of other threads, such as the CPU lane, which waits for gradients, is not
    counted. Raises ValueError if there is no such range.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [e for e in events if e.get("name") == mark and e.get("cat") in ("user_annotation", "cpu_op")]
    if not marks:
        raise ValueError(f"the profile has no range {mark!r}")
    found: Counter[str] = Counter()
    for range_ in marks:
        begin, end = float(range_["ts"]), float(range_["ts"]) + float(range_["dur"])
        for event in events:
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and event.get("tid") == range_.get("tid"):
                found[event["name"]] += begin <= float(event["ts"]) <= end
    return +found


def waiting(calls: Mapping[str, int]) -> dict[str, int]:
    """Those of the calls that wait for the device."""
    return {
        name: count
        for name, count in calls.items()
        if any(part in name for part in WAITS)
        or (name.startswith(("cudaMemcpy", "cudaMemset")) and "Async" not in name)
    }


def copies(bench: Bench, model: GPT, batch: Batch, device: Device) -> None:
    """Forward and backward alone and beside copies on the optimizer's streams, in turns; ratios are of one round."""
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
    bench.note(slower=slower, bytes_per_s={op.value: nbytes / seconds for op, seconds in copy_s.items()})
    if bench.cuda:
        worst = max(slower[BOTH].values())
        bench.target(Target.at_most("forward and backward beside copies over alone", worst, 1.1, BOTH))
