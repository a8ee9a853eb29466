"""Host memory: is there as much as is said, can it be pinned, how fast, and do copies run by themselves then?"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from dos.devices import pinned_zeros
from dos.devices.cuda import CudaDevice
from dos.machine.host_memory import available_bytes
from experiments.checks.base import Bench, Size, Target
from experiments.checks.training import prepare
from experiments.checks.vitals import huge_page_bytes

PINNED = {Size.TINY: 1 << 20, Size.SMALL: 1 << 26, Size.FULL: 1 << 32}
"""Bytes."""
COPIED = {Size.TINY: 1 << 20, Size.SMALL: 1 << 24, Size.FULL: 1 << 30}
"""Bytes of a copy to the GPU."""
ENOUGH = 48 << 30
"""Bytes that a GPU's checks have use for. Where less is available, more may come when it is used."""
KEPT = 512 << 20
"""Bytes that are left available by `touch`."""
_STEP = 256 << 20
_PATIENCE_S = 1.0

UNPINNED = "host memory could not be pinned: every speed figure of this run is spoilt"


def run(bench: Bench) -> None:
    """Use as much host memory as models shall have, once; then pin some and copy it."""
    device = prepare(bench)
    wanted = bench.settings.host_bytes or (ENOUGH if bench.size is Size.FULL and bench.cuda else 0)
    before = available_bytes()
    if before is not None and before < wanted:
        touched = touch(wanted, lambda: bench.left() > 0)
        bench.note(touched_bytes=touched)
    bench.note(wanted_bytes=wanted, available_bytes_at_first=before, available_bytes=available_bytes())
    pin(bench, device)


def touch(wanted: int, go_on: Callable[[], bool], available: Callable[[], int | None] = available_bytes) -> int:
    """Write to so many bytes, and free them again; how many it were.

    The memory of a virtual machine may grow while it is used. It ends where nothing is left and nothing comes.
    """
    held: list[np.ndarray] = []
    while len(held) * _STEP < wanted and go_on():
        deadline = time.monotonic() + _PATIENCE_S
        while (available() or 0) < KEPT + _STEP:
            if time.monotonic() > deadline:
                return len(held) * _STEP
            time.sleep(0.02)
        pages = np.frombuffer(mmap.mmap(-1, _STEP), dtype=np.uint8)
        pages[:: mmap.PAGESIZE] = 1
        held.append(pages)
    return len(held) * _STEP


def pin(bench: Bench, device: torch.device) -> None:
    """Pin memory as the optimizer does, and see what that takes and gives."""
    nbytes = min(PINNED[bench.size], (available_bytes() or PINNED[bench.size]) // 4)
    huge = huge_page_bytes()
    start = time.perf_counter()
    if bench.cuda:
        memory = pinned_zeros(CudaDevice(device), nbytes, torch.uint8)
    else:
        memory = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)
    seconds = time.perf_counter() - start
    huge_now = huge_page_bytes()
    pinned = memory.is_pinned() if bench.cuda else None
    bench.note(
        pinned=pinned,
        pinning={
            "bytes": nbytes,
            "seconds": seconds,
            "gib_per_s": nbytes / 2**30 / seconds,
            "huge_page_bytes": None if huge is None or huge_now is None else huge_now - huge,
        },
    )
    if not bench.cuda:
        return
    if not pinned:
        bench.problem(UNPINNED)
    with suppress(torch.OutOfMemoryError):
        copies(bench, memory[: COPIED[bench.size]], device)
    start = time.perf_counter()
    del memory
    bench.note(unpinning_s=time.perf_counter() - start)


def copies(bench: Bench, memory: Tensor, device: torch.device) -> None:
    """Copy to the GPU from pinned and from ordinary memory: how fast, and for how long that keeps the host."""
    there = torch.empty(len(memory), dtype=torch.uint8, device=device)
    found = {}
    for name, source in (("pinned", memory), ("pageable", torch.ones(len(memory), dtype=torch.uint8))):
        for _ in range(2):  # the first is a rehearsal
            torch.cuda.synchronize()
            start = time.perf_counter()
            there.copy_(source, non_blocking=True)
            issued = time.perf_counter()
            torch.cuda.synchronize()
            total = time.perf_counter() - start
            found[name] = {"gib_per_s": len(memory) / 2**30 / total, "host_share": (issued - start) / total}
    bench.note(copies_to_gpu=found)
    bench.target(
        Target.at_most("share of a copy from pinned memory that keeps the host", found["pinned"]["host_share"], 0.1)
    )
