"""Waiting for what comes a moment later, and comparing with a clock."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true: a thread that was told to end, or has just answered, may take a moment."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(1e-2)
    return True


def compares_with_a_clock(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test `clock`, and run it up to three times.

    What else the machine does spoils a figure now and then, a wrong formula always.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError, pytest.skip.Exception):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return pytest.mark.clock(run)


def skip_if_the_clock_cannot_be_trusted() -> None:
    """Skip the test if other programs keep this machine from its work. Asked when a comparison has failed."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 3 * cores:
        pytest.skip(f"this machine is too busy to compare with a clock: {load:.0f} threads want its {cores} cores")
    latest = 0.0
    for _ in range(200):
        started = time.perf_counter()
        time.sleep(2e-3)
        latest = max(latest, time.perf_counter() - started)
    if latest > 5e-3:
        pytest.skip(f"this machine is too busy to compare with a clock: a sleep of 2 ms lasted {latest * 1e3:.0f} ms")
