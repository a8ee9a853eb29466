"""KeyboardInterrupt at a line of the library."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import dos

EVERYWHERE = os.environ.get("DOS_INTERRUPTS")
"""Set: interrupt at every line of every program, which takes an hour. Else at INTERRUPTS lines, evenly spread."""

SOURCES = str(Path(dos.__file__).parent) + os.sep


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the n-th line that this thread runs in the library. Gives the count so far.

    Not in a finalizer, which the collector runs at any moment and in which Python lets nothing be raised: after it.
    """
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            count[0] += 1
            if count[0] >= line > 0 and not in_finalizer(frame):
                raise KeyboardInterrupt  # after which nothing is traced any more
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def interrupted_everywhere(stride: int) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Gives what calls a function and interrupts it, again and again, so many lines later each time, until it ends."""
    line, ended = 0, False

    def call(work: Callable[[], object]) -> None:
        nonlocal ended
        with suppress(KeyboardInterrupt), interrupted_at(line):
            work()
            ended = True

    while not ended:
        line += 1 if EVERYWHERE else stride
        yield call
    assert line > stride, "it was never interrupted"


def in_finalizer(frame: FrameType | None) -> bool:
    finalizes = weakref.finalize.__call__.__code__
    while frame is not None and frame.f_code is not finalizes and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
