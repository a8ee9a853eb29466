"""``python -m dos.report``: the facts of this machine that a report of a problem needs, to paste. Changes nothing.

It names no host, user or folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dos.devices import pinned_zeros
from dos.devices.cuda import CudaDevice
from dos.devices.pin_limit import leaks, remedy
from dos.devices.pinned import pinned_bytes
from dos.kernels.gpu_update import gpu_kernel_name
from dos.kernels.update import instruction_sets
from dos.machine.host_memory import available_bytes, container_bytes
from dos.machine.process import local_ranks, usable_cores
from dos.machine.profiles import cpu_model, find_profile
from dos.machine.threads import kernel_threads
from dos.planning.reading import MemoryReader

PINNED = 256 << 20
"""The bytes that are pinned to see whether the system allows it."""
_NVIDIA_SMI = (
    "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,clocks.max.sm,power.limit,persistence_mode,mig.mode.current"
)
_PACKAGES = (
    *("deep-optimizer-states", "torch", "triton", "numpy", "nvidia-ml-py", "transformers", "accelerate"),
    *("peft", "trl", "lightning", "pytorch-lightning", "torchao", "deepspeed", "bitsandbytes"),
)
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),  # the second is what later versions of torch call it
)


def host_facts() -> dict[str, Any]:
    """Return versions, cores and memory of the host, in bytes. A value that cannot be found is None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in _PACKAGES}
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "wsl": "yes" if "microsoft" in platform.release().lower() else "no",
        "packages": {name: installed.get(name) for name in _PACKAGES},
        "cuda_of_torch": torch.version.cuda,
        "rocm_of_torch": torch.version.hip,
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "cpu": cpu_model(),
        "cores_of_host": os.cpu_count(),
        "cores_usable": len(usable_cores()),
        "local_ranks": local_ranks(),
        "kernel_threads": kernel_threads(),
        "instruction_sets": instruction_sets(),
        "available_bytes": available_bytes(),
        "left_by_cgroups_bytes": container_bytes(),
        "host_memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "locked_memory_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "pinning_more_than_2_gib_fails": leaks(),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "numa": {node.name: _read(node / "cpulist") for node in nodes},
    }


def gpu_facts() -> dict[str, Any]:
    """Return the properties of the present GPU, memory in bytes, and the cores and memory near it."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_memory_free_bytes": torch.cuda.mem_get_info()[0],
        "gpu_shares_host_memory": bool(properties.is_integrated),
        "gpu_capability": list(torch.cuda.get_device_capability()),
        "gpus": torch.cuda.device_count(),
        "gpu_kernel": gpu_kernel_name(),
        "nvidia_smi": nvidia_smi(),
    }
    if getattr(properties, "pci_bus_id", None) is not None:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        pci = Path("/sys/bus/pci/devices") / address
        found |= {"gpu_numa_node": _read(pci / "numa_node"), "gpu_cores": _read(pci / "local_cpulist")}
    return found


def nvidia_smi() -> list[str] | None:
    """Return a line for each GPU: name, driver, memory, link, clock and power. None without the program."""
    command = ("nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()


def _device_facts() -> dict[str, Any]:
    """Return what DOSAdam would do with the present GPU: its source of free memory, its profile, what it may pin."""
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    wanted = min(PINNED, (available_bytes() or PINNED) // 4)
    pinned = pinned_bytes(pinned_zeros(device, wanted, torch.uint8))
    profile = find_profile(device.name)
    return {
        "free_memory_from": MemoryReader(device).read().source.value,
        "pinned": f"{pinned >> 20} of {wanted >> 20} MiB" + ("" if pinned == wanted else f": {remedy()}"),
        "profile": None if profile is None else dataclasses.asdict(profile),
    }


def facts() -> dict[str, Any]:
    """Return all facts."""
    found = host_facts()
    if not torch.cuda.is_available():
        return found | {"gpu": None, "nvidia_smi": nvidia_smi()}
    return found | gpu_facts() | _device_facts()


def as_text(found: Mapping[str, Any]) -> str:
    """Return a line for each fact, of with the entries of a mapping that are known; bytes in GiB or MiB."""
    lines = []
    for name, value in found.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {each}" for key, each in value.items() if each is not None) or None
        elif isinstance(value, list | tuple):
            value = "; ".join(map(str, value))
        elif name.endswith("_bytes") and value is not None:
            value = f"{value / 2**30:.2f} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"
        lines.append(f"{title}: {'not known or none' if value is None else value}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Return the exit status: 2 if the file of --explain cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m dos.report", description=__doc__)
    parser.add_argument("--explain", type=Path, metavar="FILE", help="a file with the output of optimizer.explain()")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    explained = None
    if options.explain is not None:
        try:
            explained = options.explain.read_text()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--explain: {error}")
    found = facts()
    if options.json:
        print(json.dumps(found | {"explain": explained}, indent=2))
    else:
        print(f"```\n{as_text(found)}\n```" + ("" if explained is None else f"\n\n```\n{explained.strip()}\n```"))
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
