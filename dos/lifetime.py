"""The interpreter's exit, where what is in flight ends first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.thread import ThreadPoolExecutor  # registered before us, it ends after us
from typing import TypeVar

from dos.guard import all_working

_T = TypeVar("_T")
_ended = threading.Event()


def main_thread_ended() -> bool:
    """Whether the main thread has ended, so that executors start no more work; other threads may run on."""
    return _ended.is_set()


def on_own_thread() -> bool:
    """Whether this runs on one of our threads, which would wait for itself."""
    return threading.current_thread().name.startswith("dos-")


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
    for each in all_working():
        each.finish()


# Work in flight ends before executors shut down at the interpreter's exit; this runs before theirs, which came earlier.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
