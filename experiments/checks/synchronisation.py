"""Does `step()` wait for the GPU? Looks for it in a profile of one step."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dos import DOSAdam, EmulatedDevice
from experiments.checks.base import Bench, Skipped, Target
from experiments.checks.machine import machine_for
from experiments.checks.training import MEDIUM, SETTINGS, Job, fitted, prepare

MARK = "one DOSAdam.step()"
WAITS = ("Synchronize", "cudaFree", "cuMemFree", "cudaHostRegister", "cudaHostUnregister")
"""Parts of the names of CUDA calls that wait for the device; and copies that are not asynchronous."""
MOST = 200e6
"""Parameters that are enough for this."""
WARM_UP = 3
"""Iterations."""


def run(bench: Bench) -> None:
    """One step, attached, with all state on the GPU, and one with some streamed and some on the host."""
    device = prepare(bench)
    job = fitted(MEDIUM[bench.size], bench.settings, most=MOST)
    size = job.numel // 12 + 1
    machine = machine_for(bench, job, size)
    for name, policy in (("all on the GPU", 0.0), ("a third streamed, the others on the host", "stride:3")):
        machine.begin()
        look(bench, name, policy, job, size, device, machine.device)
    if not bench.cuda:
        raise Skipped("no GPU: there is nothing to wait for (a profile was taken and read all the same)")


def look(
    bench: Bench,
    name: str,
    policy: str | float,
    job: Job,
    subgroup_size: int,
    device: torch.device,
    emulated: EmulatedDevice | None,
) -> None:
    """Profile a step under one policy, once state is where it stays, kernels are compiled and events exist."""
    model, (batch,) = job.model(device), job.batches(1, device)
    optimizer = DOSAdam(
        model.parameters(),
        policy=policy,
        subgroup_size=subgroup_size,
        device=emulated,
        **SETTINGS,
    )
    optimizer.attach(model)

    def iterate() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        with record_function(MARK):
            optimizer.step()

    for _ in range(WARM_UP):
        iterate()
    path = bench.out / f"trace-{str(policy).replace(':', '-')}.json"
    profile_one(iterate, path, bench.cuda)
    optimizer.synchronize()
    calls = calls_within(json.loads(path.read_text()), MARK)
    with path.open("rb") as trace, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(trace, packed)
    path.unlink()
    waits = waiting(calls)
    bench.note(**{name: {"cuda_calls_in_step": dict(calls), "that_wait": waits, "trace": f"{path.name}.gz"}})
    title = "calls in step() that wait for the GPU"
    if bench.cuda and calls:
        bench.target(Target.at_most(title, sum(waits.values()), 0, f"{name} {waits or ''}"))
    elif bench.cuda:
        bench.target(Target.unmeasured(title, "at most 0", f"{name}: the profile shows no CUDA call at all"))


def profile_one(iterate: Callable[[], None], path: Path, cuda: bool) -> None:
    """Profile one iteration into a Chrome trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as found:
        iterate()
        if cuda:
            torch.cuda.synchronize()
    found.export_chrome_trace(str(path))


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
