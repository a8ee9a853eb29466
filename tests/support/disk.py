"""Buffers for state on disk, and optimizers whose state is there."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.kernels.extension import load_extension
from dos.state.disk import DiskSpace
from dos.state.disk import space as space_module
from tests.support.training import FAST, mlp


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


def change(file: Path, offset: int, contents: bytes) -> None:
    """Write to a file of state as another program may."""
    file.chmod(0o600)  # for users that are not root
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(contents)


def truncate(file: Path, size: int) -> None:
    """The same for a file that becomes shorter."""
    file.chmod(0o600)
    os.truncate(file, size)


def read_through_cache(space: DiskSpace) -> None:
    """As where a file system refuses direct I/O."""
    for file in space._files:
        file.refused(file.fd, errno.EINVAL)


def reads(space: DiskSpace, extent: object, expected: Tensor) -> bool:
    """Whether an extent has these contents."""
    buffer = pages(len(expected), seed=99)
    space.read(extent, buffer)
    return torch.equal(buffer, expected)


Requests = Sequence[tuple[int, int, int, int]]
Result = tuple[list[int], int, int, int]
Transfer = Callable[[bool, Requests, int], Result]


def replace_transfer(patch: pytest.MonkeyPatch, replace: Callable[[Transfer], Transfer]) -> None:
    """Have the compiled function that reads and writes replaced by what is made of it."""
    patch.setattr(space_module, "_adam", SimpleNamespace(transfer=replace(load_extension().transfer)))


def give_rates(patch: pytest.MonkeyPatch, rates: Iterable[float]) -> None:
    """Have the rates of folders not measured; they are these, in their order."""
    left = iter(rates)
    patch.setattr(DiskSpace, "_rate", lambda space, file: next(left))


def fail_at(patch: pytest.MonkeyPatch, name: str, at: int, error: Exception) -> None:
    """Let a read or write of state raise: the one of this number, counted from 1, from now on."""
    real, numbers = getattr(DiskSpace, name), itertools.count(1)

    def transfer(*arguments: Any) -> None:
        if next(numbers) == at:
            raise error
        real(*arguments)

    patch.setattr(DiskSpace, name, transfer)


SMALL = 2048
"""Parameters of a subgroup: the fewest of which each field fills pages, and gradients of 16 bits do."""
TWO_WINDOWS = 2 * SMALL * 20
"""Bytes of host memory that are enough to train with, in any format but int8, in such subgroups."""


def wide(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """The small network with so many parameters that they are several subgroups: 20,400, of which there are 10."""
    return mlp(dtype, seed, width=600)


STATE_BYTES = 12 * sum(p.numel() for p in wide().parameters())
"""Bytes of its float32 state."""


def dos_adam(parameters: Iterable[Any], disk: Path | list[Path] | None, **settings: Any) -> DOSAdam:
    """In the smallest subgroups, on a fast device. disk: where what exceeds `host_memory` is; None: in memory.

    settings: others than the usual ones, which leave next to no host memory for state.
    """
    place = {} if disk is None else {"disk": disk, "host_memory": TWO_WINDOWS}
    if disk is None:
        settings.pop("host_memory", None)
    usual = {"lr": 0.01, "policy": "cpu", "subgroup_size": SMALL, "device": EmulatedDevice(FAST, capacity=10**9)}
    return DOSAdam(parameters, **{**usual, **place, **settings})


def bytes_on_disk(*folders: Path) -> int:
    """Of the files in folders of optimizers."""
    return sum(path.stat().st_size for folder in folders for path in files(folder))
