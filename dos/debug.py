"""`DOS_DEBUG=1`: each issue and each wait is logged on standard error, so that a hang can be read from it."""

from __future__ import annotations

import logging
import os

DEBUG = os.environ.get("DOS_DEBUG") == "1"
"""Read at import. Callers ask before they call `log`, because hooks and steps must not pay for it."""

_logger = logging.getLogger(__name__)

if DEBUG:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(threadName)s %(message)s", "%H:%M:%S"))
    _logger.addHandler(_handler)
    _logger.setLevel(logging.DEBUG)
    _logger.propagate = False


def log(event: str, subject: object) -> None:
    """Log what happens, and to which work; that is not kept."""
    _logger.debug("%s %r", event, subject)
