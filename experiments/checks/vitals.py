"""What spoils figures or explains them: pinned memory, where free memory is read, time on the host, the allocator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dos import DOSAdam

_SMAPS = Path("/proc/self/smaps_rollup")


class Timed(DOSAdam):
    """DOSAdam that adds up the seconds for which its hooks hold up the thread that runs forward or backward.

    in_backward: for gradients that are ready. in_forward: before modules run, until their parameters may be read.
    """

    in_backward = 0.0
    in_forward = 0.0

    def gradient_ready(self, parameter: Tensor) -> None:
        start = time.perf_counter()
        super().gradient_ready(parameter)
        self.in_backward += time.perf_counter() - start

    def finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        start = time.perf_counter()
        super().finish_parameters(parameters)
        self.in_forward += time.perf_counter() - start


def vitals(optimizer: DOSAdam, cuda: bool) -> dict[str, object]:
    """Of an optimizer that has made a step: whether its host memory is pinned, and who says how much is free.

    pinned: None on an emulated device, whose memory need not be.
    """
    accelerator = optimizer._accelerator
    state = [tensor for kept in optimizer.state.values() for tensor in kept.values() if tensor.dim()]
    return {
        "pinned": all(tensor.is_pinned() for tensor in state) if cuda else None,
        "memory_source": None if accelerator is None else accelerator.memory.reading.source.value,
    }


class Allocator:
    """What the device's caching allocator does from now on."""

    _highest = 0

    def __init__(self) -> None:
        self._before = self._counts()
        if torch.cuda.is_initialized():
            type(self)._highest = max(self._highest, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """How often it had to give cached memory back to find more, how often in vain, and the most that it had."""
        if not torch.cuda.is_initialized():
            return {}
        since = {name: count - self._before.get(name, 0) for name, count in self._counts().items()}
        return {**since, "peak_reserved_bytes": torch.cuda.max_memory_reserved()}

    @classmethod
    def of_this_process(cls) -> dict[str, int]:
        """The same since the process began."""
        if not torch.cuda.is_initialized():
            return {}
        return {**cls._counts(), "peak_reserved_bytes": max(cls._highest, torch.cuda.max_memory_reserved())}

    @staticmethod
    def _counts() -> dict[str, int]:
        if not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory_stats()
        return {name: int(stats.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}


def huge_page_bytes() -> int | None:
    """Of this process's memory, the bytes in transparent huge pages; None if the system does not tell."""
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")), None)
