"""This process among others of its host: the cores that it may use, and the ranks that a launcher has started."""

from __future__ import annotations

import os
from collections.abc import Mapping


def usable_cores() -> frozenset[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that a launcher such as torchrun has started on this host."""
    return _ranks(environment.get("LOCAL_WORLD_SIZE", ""))


def ranks_that_will_divide() -> int:
    """Return over how many ranks Accelerate will divide parameters of a built optimizer: with FSDP over all, else 1."""
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return _ranks(os.environ.get("WORLD_SIZE", "")) if fsdp else 1


def _ranks(text: str) -> int:
    return max(int(text), 1) if text.isdecimal() else 1
