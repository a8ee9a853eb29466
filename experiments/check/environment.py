"""Facts of this machine that a reader of the results may ask for, and whether its host memory can be pinned."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dos.devices import pinned_zeros
from dos.devices.cuda import CudaDevice
from dos.kernels.gpu_update import gpu_kernel_name
from dos.kernels.update import instruction_sets
from dos.machine.host_memory import available_bytes
from dos.machine.process import local_ranks, usable_cores
from dos.machine.profiles import cpu_model
from dos.machine.threads import kernel_threads
from experiments.check.base import Bench, Size
from experiments.harness import Limit

ROOT = Path(__file__).parents[2]
PINNED = {Size.TINY: 1 << 20, Size.SMALL: 1 << 26, Size.FULL: 1 << 32}
"""Bytes."""
UNPINNED = "host memory could not be pinned: every speed figure of this run is spoilt"

_NVIDIA_SMI = (
    "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,clocks.max.sm,power.limit,persistence_mode,mig.mode.current"
)
_PACKAGES = ("torch", "triton", "numpy", "scipy", "nvidia-ml-py", "torchao", "deepspeed", "bitsandbytes")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),  # the second is what later versions of torch call it
)


def run(bench: Bench) -> None:
    """Look, and write down. What cannot be found is None."""
    available = available_bytes()
    installed = importlib.metadata.distributions()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    bench.note(
        python=sys.version,
        platform=platform.platform(),
        packages=dict.fromkeys(_PACKAGES) | {d.name: d.version for d in installed if d.name in _PACKAGES},
        cuda_of_torch=torch.version.cuda,
        rocm_of_torch=torch.version.hip,
        variables={name: os.environ.get(name) for name in _VARIABLES},
        cpu=cpu_model(),
        cores_of_host=os.cpu_count(),
        cores_usable=len(usable_cores()),
        local_ranks=local_ranks(),
        kernel_threads=kernel_threads(),
        instruction_sets=instruction_sets(),
        available_bytes=available,
        host_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        locked_memory_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        huge_pages=read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        numa={node.name: read(node / "cpulist") for node in nodes},
        **commit(),
    )
    if available is not None:
        bench.say(f"{available / 2**30:.1f} GiB of host memory available")
    if bench.cuda:
        look_at_gpu(bench)
        pin(bench)
    else:
        bench.note(gpu=None, note="no GPU that torch can use: the accelerator is emulated")


def look_at_gpu(bench: Bench) -> None:
    """Note the GPU's properties, and the cores and memory near it."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    kernel = gpu_kernel_name()
    bench.note(
        gpu=properties.name,
        gpu_memory_bytes=properties.total_memory,
        gpu_memory_free_bytes=torch.cuda.mem_get_info()[0],
        gpu_shares_host_memory=bool(properties.is_integrated),
        gpu_capability=list(torch.cuda.get_device_capability()),
        gpus=torch.cuda.device_count(),
        gpu_kernel=kernel,
        nvidia_smi=nvidia_smi(),
    )
    bench.target(Limit("the GPU kernel is Triton's", None, "triton", kernel == "triton", f"found {kernel}"))
    if getattr(properties, "pci_bus_id", None) is not None:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        pci = Path("/sys/bus/pci/devices") / address
        bench.note(gpu_numa_node=read(pci / "numa_node"), gpu_cores=read(pci / "local_cpulist"))


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


def nvidia_smi() -> list[str] | None:
    """A line for each GPU, with the fields of _NVIDIA_SMI."""
    text = output_of("nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader")
    return None if text is None else text.splitlines()


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
