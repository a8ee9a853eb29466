"""Waiting for what comes a moment later, and comparing with a clock."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dos.machine.process import usable_cores

TRIES = 3
WAIT_S = 100.0
"""For what comes at once unless something hangs: a busy machine may be this late."""


def eventually(condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    """Whether it becomes true: a thread that was told to end, or has just answered, may take a moment."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(1e-2)
    return True


def compares_with_a_clock(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test `clock`, and run it up to TRIES times; skip it if all fail on a machine that is busy.

    What else the machine does spoils a figure now and then, a wrong formula always. Each assertion of the test has a
    message with what it needs and what it has found, which is also that of the skip.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                pass
        try:
            return test(*args, **kwargs)
        except AssertionError as missed:
            busy = why_busy()
            if busy:
                pytest.skip(f"this machine is too busy to compare with a clock: {busy}; {missed}")
            raise

    return pytest.mark.clock(run)


def why_busy() -> str:
    """How other programs keep this machine from its work; empty if they do not."""
    load, cores = os.getloadavg()[0], len(usable_cores())
    if load > 3 * cores:
        return f"{load:.0f} threads want its {cores} cores"
    latest = 0.0
    for _ in range(200):
        started = time.perf_counter()
        time.sleep(2e-3)
        latest = max(latest, time.perf_counter() - started)
    if latest > 5e-3:
        return f"a sleep of 2 ms lasted {latest * 1e3:.0f} ms"
    # A thread that mostly sleeps is served first, so it may be in time where one that works is not.
    with ThreadPoolExecutor(cores) as pool:
        longer = max(pool.map(_wall_over_processor_time, [bytes(2**25)] * cores))
    return f"work takes {longer:.1f} times as long as its processor time" if longer > 1.2 else ""


def _wall_over_processor_time(work: bytes) -> float:
    wall, processor = time.perf_counter(), time.thread_time()
    hashlib.sha256(work)  # without the interpreter's lock
    return (time.perf_counter() - wall) / (time.thread_time() - processor)
