"""Warnings that point at the line of user code that has led to them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_FOLDERS = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))


def warn(message: str) -> None:
    """Warn, as of the innermost line that is neither this package's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
