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
        with contextlib.suppress(BrokenPipeError):  # `held` says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class Holder:
    """Inside the process: holds as much as is wanted, or as there is."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.wanted = 0
        self.pieces: list[Tensor] = []
        torch.zeros(1, device=device)  # the context is there before the first answer

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
        most = self.wanted
        while size := max(0, min(most, self.wanted - self.nbytes, self._free())) // CHUNK * CHUNK:
            try:
                self.pieces.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            except torch.OutOfMemoryError:
                most = size // 2

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

    def _free(self) -> int:
        return torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else 1 << 62


if __name__ == "__main__":
    Holder(sys.argv[1]).listen()
    os._exit(0)
