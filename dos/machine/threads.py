"""The threads of the host's kernels, and their cores: the ones near the accelerator, divided among local ranks."""

from __future__ import annotations

import functools
import logging
import os
import sys
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
    """The cores on which the host updates the parameters of one accelerator.

    cpus: logical CPUs, as the system numbers them. threads: the number of threads of one rank's kernels on them.
    """

    cpus: frozenset[int]
    threads: int


SWITCH_S = 1e-4
"""The seconds for which a thread keeps Python's lock beside others that want it, while `step()` issues work."""

_bound = threading.local()
"""Of this thread: .threads, on the cores that it is bound to; .leaves_cores, whether it does; .planned, by a plan."""
_wanted = 0


def set_kernel_threads(count: int) -> None:
    """Use `count` threads for kernels from now on, such as a calibrated profile's `cpu_threads`; 0: choose again.

    No more threads are used than this process has cores. Raises ValueError if `count` is negative.
    """
    global _wanted
    if count < 0:
        raise ValueError(f"count: expected at least 1, or 0 to choose again, found {count}")
    _wanted = count


def use_threads(count: int) -> None:
    """Use `count` threads in kernels that this thread calls from now on, as a plan says; 0: no plan says it."""
    _bound.planned = count


def lane_threads(*, chosen: bool = False) -> int:
    """Return the number of threads of the CPU lane's kernels where no plan says one.

    chosen: only if the user has chosen it, so that it holds whatever a plan says; else 0.
    """
    if chosen and not (_wanted or _chosen_by_omp()):
        return 0
    threads = kernel_threads()
    return threads if _chosen_by_omp() and not _wanted else min(threads, most_beside(_share_of_process()))


def _chosen_by_omp() -> bool:
    """Return whether OMP_NUM_THREADS is set, and not by a launcher."""
    omp = os.environ.get("OMP_NUM_THREADS")
    return omp is not None and not (omp == "1" and "LOCAL_WORLD_SIZE" in os.environ)


def kernel_threads() -> int:
    """Return the number of threads that a kernel uses if this thread calls it.

    It is the number of `set_kernel_threads`, else of OMP_NUM_THREADS, else of `use_threads`, else
    `torch.get_num_threads()`, but at most this rank's share of the cores. OMP_NUM_THREADS=1 from a launcher is ignored,
    because kernels that wait for memory need more than one thread.
    """
    if _wanted:
        return _limited(min(_wanted, len(usable_cores())))
    planned = getattr(_bound, "planned", 0)
    if planned and not _chosen_by_omp():
        return _limited(min(planned, len(usable_cores())))
    threads = torch.get_num_threads()
    share = getattr(_bound, "threads", 0)
    if "LOCAL_WORLD_SIZE" in os.environ:
        share = share or _share_of_process()
        if os.environ.get("OMP_NUM_THREADS") == "1" and threads == 1:
            if share > 1:
                _note_override(share)
            return _limited(share)
    threads = min(threads, share) if share else threads
    return threads if "OMP_NUM_THREADS" in os.environ else _limited(threads)


def leave_cores() -> None:
    """Leave cores to the threads that issue work, in kernels that this thread calls from now on.

    As many as `most_beside` says, unless OMP_NUM_THREADS sets the number of threads.
    """
    _bound.leaves_cores = True


def most_beside(cores: int) -> int:
    """Return the most threads of a kernel beside forward and backward: a quarter of the cores is for the caller,
    autograd, the driver, and the threads that wait for copies.

    With 15 of 16 cores an iteration took 376 ms where 12 take 330 (H200, `policy="cpu"`), although the kernel by itself
    is 6% slower. Where there are two cores or one, each is used.
    """
    return cores - max(1, cores // 4) if cores > 2 else cores


def _limited(threads: int) -> int:
    cores = getattr(_bound, "threads", 0) or _share_of_process()
    return min(threads, most_beside(cores)) if getattr(_bound, "leaves_cores", False) else threads


def cores_near(pci_address: str | None, sysfs: Path = _SYSFS) -> Cores | None:
    """Return the cores in the NUMA node of a PCI device such as "0000:3b:00.0"; None if it has no usable cores.

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
    # Each rank has a GPU of its own, so no more ranks are here than GPUs, unless GPUs are divided into slices.
    ranks = local_ranks()
    beside = ranks if ranks > len(nodes) else max(1, min(ranks, nodes.count(node)))
    return Cores(cpus, max(1, physical_cores(cpus, sysfs) // beside))


def bind(near: Cores | None) -> None:
    """Run this thread, and threads that it starts, on these cores from now on. None changes nothing."""
    if near is not None:
        os.sched_setaffinity(0, near.cpus)
        _bound.threads = near.threads


@contextmanager
def bound_to(near: Cores | None) -> Iterator[None]:
    """Run this thread on these cores within the context; threads that it starts stay there. None changes nothing."""
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
    """Return the number of cores of these logical CPUs; hardware threads of one core count once."""
    try:
        return len({_text(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus})
    except OSError:
        return len(cpus)


@functools.cache
def _share_of_process() -> int:
    """Return the number of cores for this rank, if its threads are not bound."""
    cpus, ranks = usable_cores(), local_ranks()
    # The launcher has set so small a mask for this rank alone.
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
    """Return the numbers in a list of the Linux kernel, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _text(path: Path) -> str:
    return path.read_text().strip()


@contextmanager
def switching_often() -> Iterator[None]:
    """Let this thread give up Python's lock often meanwhile, if others want it.

    By default it keeps the lock for 5 ms, in which the CPU lane's next update or upload cannot be prepared: as long as
    an update of 25 million parameters.
    """
    before = sys.getswitchinterval()
    if before <= SWITCH_S:  # as the user, or another optimizer's step, has set it
        yield
        return
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
