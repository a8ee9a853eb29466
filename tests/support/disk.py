"""Buffers for state on disk."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from dos.disk import DiskSpace


def pages(nbytes: int, seed: int | None = None) -> Tensor:
    """Bytes on page boundaries. seed: of random contents, else zeros."""
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if seed is not None:
        buffer.random_(generator=torch.Generator().manual_seed(seed))
    return buffer


def files(folder: Path) -> list[Path]:
    """What is on disk in a folder of a DiskSpace."""
    return [path for path in folder.rglob("*") if path.is_file()]


def reads(space: DiskSpace, extent: object, expected: Tensor) -> bool:
    """Whether an extent has these contents."""
    buffer = pages(len(expected), seed=99)
    space.read(extent, buffer)  # type: ignore[arg-type]
    return torch.equal(buffer, expected)
