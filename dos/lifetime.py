"""Engines at the interpreter's exit, where what they have in flight ends first, and in a forked child."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - registered before us, it ends after us
import os
import threading
import weakref
from typing import Protocol


class Working(Protocol):
    """What has work in flight, and threads."""

    def finish(self) -> None:
        """Wait for all of it."""

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit."""


_working: weakref.WeakSet[Working] = weakref.WeakSet()
_over = threading.Event()


def watch(working: Working) -> None:
    """Let its work end before the process exits, and its threads be renewed in a forked child."""
    _working.add(working)


def over() -> bool:
    """Whether the main thread has ended, so that executors start no more work; other threads may run on."""
    return _over.is_set()


def _finish_all() -> None:
    _over.set()
    for each in list(_working):
        each.finish()


def _renew_all() -> None:
    for each in list(_working):
        each.after_fork()


os.register_at_fork(after_in_child=_renew_all)  # a forked child has threads of its own
# Work in flight ends before executors shut down at the interpreter's exit; this runs before theirs, which came earlier.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
