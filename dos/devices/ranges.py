"""Names for work in profilers: torch.profiler and, by NVTX, Nsight Systems. Without a profiler they cost nothing.

torch.profiler shows the work that its own thread has issued; the work of the CPU lane, too, with
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

from dos.torch_internals.modes import is_profiled

_NSIGHT = any(name.startswith(("NSYS_", "NVTX_INJECTION")) for name in os.environ)
"""Whether this process was started by Nsight Systems or another tool that listens to NVTX."""

_NOTHING = nullcontext()


def named(*words: object) -> AbstractContextManager[None]:
    """Return a range named "dos" and these words, or the values of enums, to surround host code that works."""
    if not names():
        return _NOTHING
    return _named("dos " + " ".join(str(word.value if isinstance(word, enum.Enum) else word) for word in words))


def names() -> bool:
    """Return whether a profiler listens."""
    return _NSIGHT or is_profiled()


@contextmanager
def _named(name: str) -> Iterator[None]:
    if _NSIGHT:
        torch.cuda.nvtx.range_push(name)
    try:
        with profiler.record_function(name):
            yield
    finally:
        if _NSIGHT:
            torch.cuda.nvtx.range_pop()
