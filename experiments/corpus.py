"""The text that is learnt, as bytes, and the batches drawn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


class Corpus:
    """A text as bytes. Raises ValueError if it is too short for one sequence of `context` bytes and its targets."""

    def __init__(self, text: bytes, context: int, name: str = "the text") -> None:
        if len(text) < context + 1:
            raise ValueError(f"{name} has {len(text)} bytes; a context of {context} needs {context + 1} or more")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return len(self._bytes)

    def batches(self, count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """`count` batches of (bytes, the bytes that follow each), int64 (size, context); the same for the same seed."""
        starts = len(self._bytes) - self._context
        drawn = torch.randint(starts, (count, size, 1), generator=torch.Generator().manual_seed(seed))
        text = self._bytes[drawn + torch.arange(self._context + 1)].long()
        return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in text]


def standard_library() -> bytes:
    """The sources of the top-level modules of this Python's standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
