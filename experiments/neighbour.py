"""Another process on the same GPU, which takes memory when told to: ``python -m experiments.neighbour DEVICE``.

A line on standard input is how many bytes it shall hold. It takes what is free and waits for the rest, as a training
job that starts beside ours would, and answers each empty line with the bytes that it holds. It ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import torch
from torch import Tensor

CHUNK = 1 << 26
"""Bytes taken at a time."""
_PAUSE_S = 0.01


class Neighbour:
    """The process, from outside. Raises RuntimeError if it does not come up, or has ended. device: "cuda" or "cpu"."""

    def __init__(self, device: str = "cuda") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.neighbour", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.held()

    def want(self, nbytes: int) -> None:
        """Tell it to hold so many bytes from now on; it may take a while."""
        self._say(str(nbytes))

    def held(self) -> int:
        """Bytes that it holds now, its context apart."""
        self._say("")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer.isdecimal():
            raise RuntimeError(f"the neighbour has ended with status {self._process.wait()}; its error is above")
        return int(answer)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `held` says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class _Holder:
    """Inside the process: holds as much as is wanted, or as there is."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._wanted = 0
        self._held: list[Tensor] = []

    def listen(self) -> None:
        for line in sys.stdin:
            if line.strip():
                self._wanted = int(line)
            else:
                print(len(self._held) * CHUNK, flush=True)
        os._exit(0)

    def hold(self) -> None:
        torch.zeros(1, device=self._device)  # the context is there before the first answer
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            wanted = self._wanted // CHUNK
            try:
                while len(self._held) < wanted:
                    self._held.append(torch.empty(CHUNK, dtype=torch.uint8, device=self._device))
            except torch.OutOfMemoryError:
                pass  # it waits for the rest
            if len(self._held) > wanted:
                del self._held[wanted:]
                torch.cuda.empty_cache()
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    _Holder(sys.argv[1]).hold()
