"""Engines at the interpreter's exit, where what they have in flight ends first, and in a forked child."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.thread import ThreadPoolExecutor  # registered before us, it ends after us
from typing import Any, TypeVar

_T = TypeVar("_T")
_working: weakref.WeakSet[Any] = weakref.WeakSet()
_ended = threading.Event()


def watch(working: Any) -> None:
    """Let its work end before the process exits, by `finish`; `after_fork` renews its threads in a forked child."""
    _working.add(working)


def main_thread_ended() -> bool:
    """Whether the main thread has ended, so that executors start no more work; other threads may run on."""
    return _ended.is_set()


def submit(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> Future[_T]:
    """Run the work on a thread; at once where threads take no more, as in atexit handlers: what they had has ended.

    What it raises then is raised here.
    """
    if not main_thread_ended():
        return thread.submit(work)
    done: Future[_T] = Future()
    done.set_result(work())
    return done


def _finish_all() -> None:
    _ended.set()
    for each in list(_working):
        each.finish()


def _renew_all() -> None:
    for each in list(_working):
        each.after_fork()


os.register_at_fork(after_in_child=_renew_all)  # a forked child has threads of its own
# Work in flight ends before executors shut down at the interpreter's exit; this runs before theirs, which came earlier.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
