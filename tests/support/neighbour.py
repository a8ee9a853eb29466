"""Another process on the same GPU, which takes memory when told to: ``python -m tests.support.neighbour DEVICE``.

A line on standard input is how many bytes it shall hold. It takes what is free and waits for the rest, as a training
job that starts beside ours would. It answers each empty line with the bytes that it holds, once it has tried for what
is missing. It ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 1 << 26
"""Bytes; what it holds are whole multiples."""
_PAUSE_S = 0.01


class Neighbour:
    """The process, from outside. Raises RuntimeError if it does not come up, or has ended. device: "cuda" or "cpu"."""

    def __init__(self, device: str = "cuda") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.neighbour", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.held()

    def want(self, nbytes: int) -> None:
        """Tell it to hold so many bytes from now on."""
        self._say(str(nbytes))

    def held(self) -> int:
        """Bytes that it holds now, its context apart; it has just tried for what is missing."""
        self._say("")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer.isdecimal():
            raise RuntimeError(f"the neighbour has ended with status {self._process.wait()}; its error is above")
        return int(answer)

    def close(self) -> None:
        """End it."""
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate(timeout=30)
        finally:
            self._process.kill()  # nothing, if it has ended

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `held` says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class Holder:
    """Inside the process: holds as much as is wanted, or as there is.

    take: gives so many bytes, or raises torch.OutOfMemoryError. free: bytes that may be there.
    """

    def __init__(self, take: Callable[[int], Tensor], free: Callable[[], int]) -> None:
        self._take, self._free = take, free
        self.wanted = 0
        self.pieces: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(piece.nbytes for piece in self.pieces)

    def adjust(self) -> None:
        """Let go of what is too much, and take what is missing in as few pieces as possible.

        Thousands of small allocations would take longer than the iterations that are to notice them.
        """
        if self.nbytes > self.wanted:
            while self.nbytes > self.wanted:
                self.pieces.pop()
            torch.cuda.empty_cache()
        size = self._whole(min(self.wanted - self.nbytes, self._free()))
        while size:
            try:
                self.pieces.append(self._take(size))
            except torch.OutOfMemoryError:
                size = self._whole(size // 2)
            else:
                size = self._whole(min(size, self.wanted - self.nbytes, self._free()))

    def listen(self) -> None:
        """Do what the lines of standard input say until it ends, and try for what is missing in between."""
        text = b""
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], _PAUSE_S)
            if not ready:
                self.adjust()
                continue
            read = os.read(sys.stdin.fileno(), 1 << 12)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                if line.strip():
                    self.wanted = int(line)
                self.adjust()
                if not line.strip():
                    print(self.nbytes, flush=True)

    @staticmethod
    def _whole(nbytes: int) -> int:
        return max(0, nbytes) // CHUNK * CHUNK


def main(device: str) -> None:
    torch.zeros(1, device=device)  # the context is there before the first answer
    on_gpu = torch.device(device).type == "cuda"
    Holder(
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
        lambda: torch.cuda.mem_get_info()[0] if on_gpu else 1 << 62,
    ).listen()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
