"""Lines for a person at a terminal: how far pinning is, and how training goes. Elsewhere `logging` alone has them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

TELL_S = 5.0
"""Seconds between two messages about memory that is being pinned."""
DRAW_S = 0.2
"""Seconds between two drawings of a bar."""
_WIDTH = 24
"""Characters of a bar."""


def watched() -> bool:
    """Return whether stderr is a terminal, and this process the first of those that a launcher has started here."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty()


def tell(line: Callable[[], str]) -> None:
    """Log a line at level INFO; write it to a terminal if nothing would show that. line: called if anything does."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line())
    elif watched():
        _write(f"{line()}\n")


class Pinning:
    """How far the pinning of host memory is: a bar on a terminal, else a message for `logging` every TELL_S.

    Work of less than a second shows nothing.
    """

    def __init__(self, total: int) -> None:
        """total: bytes."""
        self._total = max(total, 1)
        self._began = self._told = time.perf_counter()
        self._drawn = 0

    def at(self, done: int) -> None:
        """Say that this number of bytes is done."""
        now, draws = time.perf_counter(), watched()
        if now - self._told < (DRAW_S if draws else TELL_S) or (draws and now - self._began < 1):
            return
        self._told = now
        left = f"{(now - self._began) * (self._total / done - 1):.0f} s left" if done else "begun"
        if draws:
            full = _WIDTH * done // self._total
            self._draw(f"pinning {done >> 30} of {self._total >> 30} GiB, {left} [{'#' * full:.<{_WIDTH}}]")
        else:
            logger.info("pinning host memory, once: %d of %d GiB, %s", done >> 30, self._total >> 30, left)

    def __enter__(self) -> Pinning:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._draw("")
            _write("\r")

    def _draw(self, text: str) -> None:
        _write(f"\r{text:{self._drawn}}")
        self._drawn = len(text)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone is no reason to end a training
        sys.stderr.write(text)
        sys.stderr.flush()
