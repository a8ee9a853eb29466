"""Host memory: how much is available, checked before it is allocated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

from dos.machine.process import local_ranks

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")

SHARE_OF_HOST = 0.9
"""The share of available host memory that state may take where users do not say and a disk has the rest."""


def available_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, of the machine or of the container if that is less.

    None where neither can be read.
    """
    kibibytes = _field(_PROC / "meminfo", "MemAvailable:")
    machine = None if kibibytes is None else 1024 * kibibytes
    return min([*([] if machine is None else [machine]), *_of_container(machine)], default=None)


def check_host_memory(nbytes: int, *, processes: int = 1, spills: bool = False) -> None:
    """Raise MemoryError if state of `nbytes` does not fit in host memory, for each of `processes` on this host.

    Call it before the state is allocated: Linux grants allocations that it cannot serve, and kills the process when the
    memory is used. Garbage is collected first.

    spills: whether there is a disk for state that does not fit.
    """
    available = available_bytes()
    if available is not None and nbytes * processes > available:
        gc.collect()
        available = available_bytes()
    there = "an unknown amount" if available is None else _gib(available)
    needed = _gib(nbytes) if processes == 1 else f"{_gib(nbytes)} for each of {processes} processes"
    logger.info("optimizer state (DOSAdam): %s of host memory needed, %s available", needed, there)
    if available is not None and nbytes * processes > available:
        disk = "less host_memory, so that more rests on disk" if spills else "a folder for what does not fit, disk="
        raise MemoryError(
            f"optimizer state (DOSAdam) needs {needed} of host memory and {_gib(available)} are available; use fewer "
            f"or smaller processes per host, freeze parameters, give the machine or container more memory, choose "
            f"{disk}, or, if all state fits on the device, policy='resident', with which it never leaves (`python -m "
            "perfmodel` says beforehand what a model needs)"
        )


def host_share() -> int:
    """Return the bytes of host memory that state of this process may take where users do not say."""
    available = available_bytes()
    if available is None:
        raise MemoryError("it is not known how much memory the host has; say how much state may take: host_memory=")
    return int(SHARE_OF_HOST * available) // local_ranks()


def left_of_share(share: int) -> int:
    """Return the share, or less if other programs have taken so much memory since that it is not available."""
    available = available_bytes()
    return share if available is None or available >= share else host_share()


def _of_container(machine: int | None) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves, from its own to the root.

    Page cache that Linux can release counts as left. Its size takes long to read, and is not read for a group that
    leaves more than the machine has.
    """
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":  # version 2
            mount, limit, usage, cache = _CGROUP, "memory.max", "memory.current", ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, limit, usage = _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_active_file", "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit():
                left = int(most) - int(used)
                if machine is None or left < machine:
                    left += sum(_field(folder / "memory.stat", name) or 0 for name in cache)
                yield max(0, left)
            if folder == mount:  # also in a container, which sees its group here and not under its path
                break


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of lines `name number`; None if there is none."""
    for line in _read(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1:] and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
