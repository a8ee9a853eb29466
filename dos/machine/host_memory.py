"""Host memory: how much is available, checked before it is allocated, and before its addresses are mapped."""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dos.machine.process import local_ranks

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")

_NO_LIMIT = 1 << 60
"""Bytes from which on a limit is none: version 1 of control groups writes a number close to 2^63."""
SHARE_OF_HOST = 0.9
"""The share of available host memory that state may take where users do not say and a disk has the rest."""


class MappingLimit(NamedTuple):
    """A limit of the memory that this process may map, used or not. name: as the user sets it. In bytes."""

    name: str
    most: int
    left: int


def available_bytes() -> int | None:
    """Return the bytes that can be mapped and used without swapping.

    The least of what the machine has, what the container may use, and what the limits of this process allow (`ulimit`).
    None where none can be read.
    """
    known = [_memory_bytes(), *(limit.left for limit in _mapping_limits())]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def _memory_bytes() -> int | None:
    """Return the bytes that can be used without swapping, of the machine or of the container if that is less."""
    kibibytes = _field(_PROC / "meminfo", "MemAvailable:")
    machine = None if kibibytes is None else 1024 * kibibytes
    return min([*([] if machine is None else [machine]), *_of_container(machine)], default=None)


def container_bytes() -> int | None:
    """Return the bytes that the control groups of this process leave; None where none limits it, or is readable."""
    return min(_of_container(None), default=None)


def check_host_memory(nbytes: int, *, processes: int = 1, spills: bool = False, mapped: int = 0) -> None:
    """Raise MemoryError if state of `nbytes` does not fit in host memory, for each of `processes` on this host.

    Call it before the state is allocated: Linux grants allocations that it cannot serve, and kills the process when the
    memory is used. Garbage is collected first.

    spills: whether there is a disk for state that does not fit. mapped: bytes of it that this process has mapped.
    """
    check_mapping(nbytes - mapped)
    available = _shared_bytes()
    if available is not None and nbytes * processes > available:
        gc.collect()
        available = _shared_bytes()
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


def check_mapping(nbytes: int) -> None:
    """Raise MemoryError if this process may not map `nbytes` more. Garbage is collected first."""
    tight = [limit for limit in _mapping_limits() if nbytes > limit.left]
    if tight:
        gc.collect()
        tight = [limit for limit in _mapping_limits() if nbytes > limit.left]
    if tight:
        least = min(tight, key=lambda limit: limit.left)
        raise MemoryError(
            f"optimizer state (DOSAdam) needs {_gib(nbytes)} more of address space, which counts before it is used, "
            f"and {_gib(least.left)} are left of {_gib(least.most)}; raise {least.name}, freeze parameters, or choose "
            "state_format='int8'"
        )


def _shared_bytes() -> int | None:
    """Return the bytes that this process and others can use, whatever this process may map."""
    available = available_bytes()
    limited = any(available is None or limit.left <= available for limit in _mapping_limits())
    return _memory_bytes() if limited else available


def _mapping_limits() -> Iterator[MappingLimit]:
    """Yield the limits of what this process maps: memory counts from `mmap` on, before it is used."""
    for kind, field, name in (
        (resource.RLIMIT_AS, "VmSize:", "the limit of address space (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData:", "the limit of data (ulimit -d)"),
    ):
        most, _ = resource.getrlimit(kind)
        used = None if most == resource.RLIM_INFINITY else _field(_PROC / "self/status", field)
        if used is not None:
            yield MappingLimit(name, most, max(0, most - 1024 * used))
    if _read(_PROC / "sys/vm/overcommit_memory").strip() == "2":
        fields = [_field(_PROC / "meminfo", name) for name in ("CommitLimit:", "Committed_AS:")]
        if fields[0] is not None and fields[1] is not None:
            most, used = (1024 * field for field in fields if field is not None)
            yield MappingLimit("vm.overcommit_ratio, or set vm.overcommit_memory=0", most, max(0, most - used))


def host_share() -> int:
    """Return the bytes of host memory that state of this process may take where users do not say."""
    available = _shared_bytes()
    if available is None:
        raise MemoryError("it is not known how much memory the host has; say how much state may take: host_memory=")
    own = [limit.left for limit in _mapping_limits()]  # not divided: other ranks have their own
    return int(SHARE_OF_HOST * min([available // local_ranks(), *own]))


def left_of_share(share: int) -> int:
    """Return the share, or less if other programs have taken so much memory since that it is not available."""
    available = _shared_bytes()  # homes are mapped before they are used
    return share if available is None or available >= share else int(SHARE_OF_HOST * available) // local_ranks()


def _of_container(machine: int | None) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves, from its own to the root.

    Page cache that Linux can release counts as left. Its size takes long to read, and is not read for a group that
    leaves more than the machine has.
    """
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":  # version 2
            # Linux slows a group down above `high`, with which systemd and clusters limit it, so that it hardly runs.
            mount, limits, usage = _CGROUP, ["memory.max", "memory.high"], "memory.current"
            cache = "active_file", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limits, usage = _CGROUP / "memory", ["memory.limit_in_bytes"], "memory.usage_in_bytes"
            cache = "total_active_file", "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            texts = [_read(folder / limit).strip() for limit in limits]
            most, used = [int(text) for text in texts if text.isdigit()], _read(folder / usage).strip()
            if most and used.isdigit() and min(most) < _NO_LIMIT:
                left = min(most) - int(used)
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
