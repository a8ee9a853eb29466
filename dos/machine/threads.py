"""How many threads the host's kernels use, and on which cores: those near the accelerator, shared by local ranks."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from dos.machine.process import local_ranks, usable_cores

logger = logging.getLogger(__name__)

_SYSFS = Path("/sys")
_DISPLAY = "0x03"  # PCI base class of display controllers; other functions of a card are not GPUs


class Cores(NamedTuple):
    """Where the host updates what belongs to one accelerator.

    cpus: logical CPUs, as the system numbers them. threads: of one rank's kernels on them.
    """

    cpus: frozenset[int]
    threads: int


_bound = threading.local()  # .threads: of the cores that this thread is bound to; .beside: whether it leaves one
_wanted = 0


def set_kernel_threads(count: int) -> None:
    """Use `count` threads for kernels from now on, such as a calibrated profile's `cpu_threads`; 0: choose again.

    Never more are used than there are cores for this process. Raises ValueError if it is negative.
    """
    global _wanted
    if count < 0:
        raise ValueError(f"count: expected at least 1, or 0 to choose again, found {count}")
    _wanted = count


def kernel_threads() -> int:
    """How many threads a kernel called by this thread uses.

    What `set_kernel_threads` has set, else `torch.get_num_threads()`, but no more than this rank's share of the cores.
    OMP_NUM_THREADS=1 from a launcher is ignored, because kernels that wait for memory need more threads than one.
    """
    if _wanted:
        return _beside(min(_wanted, len(usable_cores())))
    threads = torch.get_num_threads()
    share = getattr(_bound, "threads", 0)
    if "LOCAL_WORLD_SIZE" in os.environ:
        share = share or _share_of_process()
        if os.environ.get("OMP_NUM_THREADS") == "1" and threads == 1:
            if share > 1:
                _note_override(share)
            return _beside(share)
    threads = min(threads, share) if share else threads
    return threads if "OMP_NUM_THREADS" in os.environ else _beside(threads)


def leave_a_core() -> None:
    """From now on kernels called by this thread leave a core to the thread that issues forward and backward.

    Where there are more than two, and unless OMP_NUM_THREADS says how many threads there are to be.
    """
    _bound.beside = True


def _beside(threads: int) -> int:
    cores = getattr(_bound, "threads", 0) or _share_of_process()
    return min(threads, cores - 1) if getattr(_bound, "beside", False) and cores > 2 else threads


def cores_near(pci_address: str | None, sysfs: Path = _SYSFS) -> Cores | None:
    """The cores in the NUMA node of a PCI device such as "0000:3b:00.0"; None if it has none or none are usable.

    Each rank of the host gets an equal share of the node's cores, hardware threads of one core counted once.
    """
    devices = sysfs / "bus/pci/devices"
    try:
        device = devices / str(pci_address)
        node, vendor = _text(device / "numa_node"), _text(device / "vendor")
        if int(node) < 0:
            return None
        cpus = _parse_list(_text(device / "local_cpulist")) & usable_cores()
        nodes = [_text(d / "numa_node") for d in devices.iterdir() if _is_gpu(d, vendor)]
    except (OSError, ValueError):
        return None
    if not cpus:
        logger.info("no core near the device %s may be used, so its updates run on any core", pci_address)
        return None
    # Ranks beside this one have GPUs of their own, so no more of them are here than GPUs; slices of one GPU aside.
    ranks = local_ranks()
    beside = ranks if ranks > len(nodes) else max(1, min(ranks, nodes.count(node)))
    return Cores(cpus, max(1, physical_cores(cpus, sysfs) // beside))


def bind(near: Cores | None) -> None:
    """Run this thread, and threads that it starts, on these cores from now on. None: where it runs now."""
    if near is not None:
        os.sched_setaffinity(0, near.cpus)
        _bound.threads = near.threads


@contextmanager
def bound_to(near: Cores | None) -> Iterator[None]:
    """Run this thread on these cores meanwhile; threads that it starts stay there. None: where it runs now."""
    if near is None:
        yield
        return
    cpus, threads = os.sched_getaffinity(0), getattr(_bound, "threads", 0)
    bind(near)
    try:
        yield
    finally:
        _bound.threads = threads
        os.sched_setaffinity(0, cpus)


def physical_cores(cpus: frozenset[int], sysfs: Path = _SYSFS) -> int:
    """How many cores these logical CPUs are: hardware threads of one core count once."""
    try:
        return len({_text(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus})
    except OSError:
        return len(cpus)


@functools.cache
def _share_of_process() -> int:
    """The cores for this rank, if its threads are not bound."""
    cpus, ranks = usable_cores(), local_ranks()
    # A mask that small was set by the launcher for this rank alone.
    own = len(cpus) <= (os.cpu_count() or 1) // ranks
    return max(1, physical_cores(cpus) // (1 if own else ranks))


@functools.cache
def _note_override(threads: int) -> None:
    logger.warning(
        "OMP_NUM_THREADS=1, which launchers such as torchrun set, does not hold for optimizer updates on the host: "
        "they use %d threads; set OMP_NUM_THREADS to another number to choose it",
        threads,
    )


def _is_gpu(device: Path, vendor: str) -> bool:
    return _text(device / "vendor") == vendor and _text(device / "class").startswith(_DISPLAY)


def _parse_list(text: str) -> frozenset[int]:
    """The numbers that a list such as "0-3,8" of the Linux kernel names."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _text(path: Path) -> str:
    return path.read_text().strip()
