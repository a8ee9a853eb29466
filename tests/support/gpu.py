"""The device of tests that need a GPU: CUDA's, or in its place the simulated accelerator."""

from __future__ import annotations

import gc

import pytest
import torch

from dos.devices import cuda
from dos.devices.cuda import _streams_of
from perfmodel import Op

DEVICE = cuda.TYPE
SIMULATED = DEVICE != "cuda"
SHRINK = 8 if SIMULATED else 1
"""By which models and their subgroups are smaller, because two cores compute what a GPU would."""

NEEDS_GPU = [
    pytest.mark.cuda,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
"""Marks of a test file."""


def not_simulated(what: str) -> pytest.MarkDecorator:
    """Skips a test on the simulated accelerator."""
    return pytest.mark.skipif(SIMULATED, reason=f"the simulated accelerator has no {what}")


def free_memory() -> None:
    """Let go of what is not used any more: earlier tests' models, and what is in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def late(op: Op, seconds: float = 0.05) -> None:
    """Let all that is queued for this operation from now on begin later."""
    with torch.cuda.stream(_streams_of(torch.device(DEVICE, 0))[0][op]):
        torch.cuda._sleep(int(seconds * 1e9))
