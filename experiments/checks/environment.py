"""What this machine is: everything that a reader of the results may ask about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dos.kernels.gpu_update import gpu_kernel_name
from dos.kernels.update import instruction_sets
from dos.machine.host_memory import available_bytes
from dos.machine.process import local_ranks, usable_cores
from dos.machine.profiles import cpu_model
from dos.machine.threads import kernel_threads
from experiments.checks.base import Bench

_ROOT = Path(__file__).parents[2]
_NVIDIA_SMI = (
    "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,clocks.max.sm,power.limit,persistence_mode,mig.mode.current"
)
_PACKAGES = ("torch", "triton", "numpy", "scipy", "nvidia-ml-py", "torchao", "deepspeed", "bitsandbytes")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "LOCAL_WORLD_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",  # what later versions of torch call it
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def run(bench: Bench) -> None:
    """Look, and write down. What cannot be found is None."""
    bench.note(
        python=sys.version,
        platform=platform.platform(),
        packages={name: version(name) for name in _PACKAGES},
        cuda_of_torch=torch.version.cuda,
        variables={name: os.environ.get(name) for name in _VARIABLES},
        cpu=cpu_model(),
        cores_of_host=os.cpu_count(),
        cores_usable=len(usable_cores()),
        local_ranks=local_ranks(),
        kernel_threads=kernel_threads(),
        instruction_sets=instruction_sets(),
        host_memory_available_bytes=available_bytes(),
        host_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        locked_memory_limit_bytes=locked_memory(),
        huge_pages=read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        numa=numa(),
    )
    bench.note(**commit())
    if not bench.cuda:
        bench.note(gpu=None, note="no GPU that torch can use: the accelerator is emulated")
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    bench.note(
        gpu=properties.name,
        gpu_memory_bytes=properties.total_memory,
        gpu_memory_free_bytes=torch.cuda.mem_get_info()[0],
        gpu_capability=list(torch.cuda.get_device_capability()),
        gpu_multiprocessors=properties.multi_processor_count,
        gpus=torch.cuda.device_count(),
        gpu_kernel=gpu_kernel_name(),
        nvidia_smi=nvidia_smi(),
    )
    if getattr(properties, "pci_bus_id", None) is not None:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        pci = Path("/sys/bus/pci/devices") / address
        bench.note(
            gpu_pci_address=address, gpu_numa_node=read(pci / "numa_node"), gpu_cores=read(pci / "local_cpulist")
        )


def commit() -> dict[str, object]:
    """The commit that is checked out, and whether files differ from it; None outside a checkout."""
    head = said("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changes = None if head is None else said("git", "-C", str(_ROOT), "status", "--porcelain")
    return {"commit": head, "changed_files": None if changes is None else len(changes.splitlines())}


def gpu_name() -> str | None:
    """Of the GPU that torch uses; None if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def locked_memory() -> int | None:
    """Bytes that may be pinned; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def numa() -> dict[str, str | None]:
    """The cores of each node."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {node.name: read(node / "cpulist") for node in nodes}


def nvidia_smi() -> list[str] | None:
    """A line for each GPU, with the fields of _NVIDIA_SMI."""
    text = said("nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader")
    return None if text is None else text.splitlines()


def said(*command: str) -> str | None:
    """What a command prints; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
