"""Finds accesses of memory that nothing orders, whatever the timing was: vector clocks over an emulated device.

Ordered is what would be on a GPU, not only what is where the caller computes on its own thread: what the caller does to
memory of the device is in a queue of its own. The host comes behind that only where it waits, a stream by a fence, and
the queue behind a stream by a join.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from dos.torch_internals.modes import DispatchModes
from tests.support.races.checker import Checker, Mode, allowed, other_modes
from tests.support.races.devices import AtOnce, patch_devices
from tests.support.races.memory import patch_memory
from tests.support.races.threads import patch_threads

__all__ = ["AtOnce", "Checker", "allowed", "checking"]


@contextlib.contextmanager
def checking(most_named: int = 4) -> Iterator[Checker]:
    """All devices, threads and operations of torch in it are watched. Does not raise for what it finds.

    most_named: as of `Checker`.
    """
    assert Checker.active is None, "one at a time"
    checker, patch = Checker(most_named), pytest.MonkeyPatch()
    try:
        patch_threads(patch)
        patch_devices(patch)
        patch_memory(patch)
        patch.setattr(DispatchModes, "now", staticmethod(other_modes))
        Checker.active = checker
        with Mode():
            yield checker
    finally:
        Checker.active = None
        patch.undo()
