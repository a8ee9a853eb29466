"""Engines at a fork and at the interpreter's exit: what they have in flight ends first."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - registered before us, it ends after us
import os
import threading
import weakref
from typing import Protocol

from dos.guard import Guard


class Working(Protocol):
    """What has work in flight, and threads."""

    guard: Guard

    def finish(self) -> None:
        """Wait for all of it."""

    def drain(self) -> None:
        """Wait until nothing is running, whatever came of it."""

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit."""


_working: weakref.WeakSet[Working] = weakref.WeakSet()
_forking: list[Working] = []


def watch(working: Working) -> None:
    """Let its work end before the process forks or exits."""
    _working.add(working)


def _finish_all() -> None:
    for each in list(_working):
        each.finish()


def _before_fork() -> None:
    """Let no step be half done in the child: wait until no thread is in a call, and nothing is running."""
    for each in list(_working):
        each.guard.lock.acquire()
        _forking.append(each)
        each.drain()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().guard.lock.release()


def _after_fork_in_child() -> None:
    for each in list(_working):
        each.after_fork()
    _after_fork_in_parent()


# A forked child, such as a data loader's worker, sees parameters that are finished, and has threads of its own.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
# Work in flight ends before executors shut down at the interpreter's exit; this runs before theirs, which came earlier.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
