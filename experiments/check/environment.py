"""Facts of this machine that a reader of the results may ask for, and whether its host memory can be pinned."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import torch

from dos.devices import pinned_zeros
from dos.devices.cuda import CudaDevice
from dos.machine.host_memory import available_bytes
from dos.report import gpu_facts, host_facts
from experiments.check.base import Bench, Size
from experiments.harness import Limit

ROOT = Path(__file__).parents[2]
PINNED = {Size.TINY: 1 << 20, Size.SMALL: 1 << 26, Size.FULL: 1 << 32}
"""Bytes."""
UNPINNED = "host memory could not be pinned: every speed figure of this run is spoilt"


def run(bench: Bench) -> None:
    """Look, and write down. What cannot be found is None."""
    found = host_facts()
    available = found["available_bytes"]
    bench.note(**found, **commit())
    if available is not None:
        bench.say(f"{available / 2**30:.1f} GiB of host memory available")
    if bench.cuda:
        look_at_gpu(bench)
        pin(bench)
    else:
        bench.note(gpu=None, note="no GPU that torch can use: the accelerator is emulated")


def look_at_gpu(bench: Bench) -> None:
    """Note the GPU's properties, and the cores and memory near it."""
    found = gpu_facts()
    bench.note(**found)
    kernel = found["gpu_kernel"]
    bench.target(Limit("the GPU kernel is Triton's", None, "triton", kernel == "triton", f"found {kernel}"))


def pin(bench: Bench) -> None:
    """Pin memory as the optimizer does, and copy it: how fast are both, and how long does a copy block the host?"""
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = min(PINNED[bench.size], (available_bytes() or PINNED[bench.size]) // 4)
    start = time.perf_counter()
    memory = pinned_zeros(CudaDevice(device), nbytes, torch.uint8)
    seconds = time.perf_counter() - start
    gib = nbytes / 2**30
    bench.note(pinned=memory.is_pinned(), pinning={"bytes": nbytes, "gib_per_s": gib / seconds})
    bench.say(f"{gib:.2f} GiB {'pinned' if memory.is_pinned() else 'NOT pinned'} at {gib / seconds:.1f} GiB/s")
    if not memory.is_pinned():
        bench.problem(UNPINNED)
    source = memory[: nbytes // 4]
    there = torch.empty(len(source), dtype=torch.uint8, device=device)
    for _ in range(2):  # the first is a rehearsal
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(source, non_blocking=True)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        total = time.perf_counter() - start
    share = (issued - start) / total
    bench.note(copy_to_gpu={"gib_per_s": len(source) / 2**30 / total, "host_share": share})
    bench.target(Limit.at_most("share of a copy from pinned memory that keeps the host", share, 0.1))


def commit() -> dict[str, object]:
    """The commit that is checked out, and whether files differ from it; None outside a checkout."""
    head = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changes = None if head is None else output_of("git", "-C", str(ROOT), "status", "--porcelain")
    return {"commit": head, "changed_files": None if changes is None else len(changes.splitlines())}


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
