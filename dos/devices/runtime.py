"""The runtime of a device for native code, which queues a job by one call."""

from __future__ import annotations

from functools import cache
from typing import Any

from dos.kernels.extension import load_extension
from dos.torch_internals.runtime import runtime_functions
from perfmodel import Lane
from perfmodel.lanes import PIECE_BYTES

KINDS = {Lane.H2D: 1, Lane.D2H: 2}
"""Of a copy over each link, as the runtime has them."""


def runtime_of(functions: tuple[int, ...]) -> Any:
    """Return what queues jobs by these functions, given by address; see csrc/runtime.h."""
    return load_extension().Runtime(*functions, PIECE_BYTES)


@cache
def runtime() -> Any | None:
    """Return what queues jobs on GPUs; None where torch has to, call by call."""
    functions = runtime_functions()
    return None if functions is None else runtime_of(functions)
