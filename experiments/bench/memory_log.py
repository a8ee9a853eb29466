"""Who held the device's memory over a run, and when the plan changed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from torch.optim import Optimizer

from dos import DOSAdam
from experiments.bench.machines import Machine
from experiments.plots import MemorySample
from perfmodel import Plan

SAMPLED_EVERY_S = 5e-3


class MemoryLog:
    """Device memory over a run, sampled by a thread while it is entered. Times in seconds since it was made.

    samples: the fullest of each iteration, at the time when that began. Memory rises and falls within every one,
        which over many would be drawn as spikes; what decides where state can be is the fullest moment.
    changes: when the plan changed.
    """

    def __init__(self) -> None:
        self.samples: list[MemorySample] = []
        self.changes: list[float] = []
        self._iteration: list[MemorySample] = []
        self._began = time.perf_counter()
        self._plan: Plan | None = None

    def step_done(self, optimizer: Optimizer) -> None:
        """An iteration is over; note whether the optimizer ran another plan than in the one before."""
        seen, self._iteration = self._iteration, []
        if seen:
            fullest = max(seen, key=lambda sample: sample.own + sample.state + sample.neighbour)
            self.samples.append(fullest._replace(time_s=seen[0].time_s))
        if isinstance(optimizer, DOSAdam):
            before, self._plan = self._plan, optimizer.plan()
            if before is not None and self._plan != before:
                self.changes.append(time.perf_counter() - self._began)

    @contextlib.contextmanager
    def sampling(self, machine: Machine, optimizer: Optimizer) -> Iterator[None]:
        """Sample every SAMPLED_EVERY_S while the body runs."""
        if not isinstance(optimizer, DOSAdam):
            yield
            return
        over = threading.Event()

        def sample() -> None:
            while not over.wait(SAMPLED_EVERY_S):
                self._iteration.append(machine.memory(time.perf_counter() - self._began, optimizer))

        thread = threading.Thread(target=sample, name="memory-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if self.samples:  # so that the last one has an end
                self.samples.append(self.samples[-1]._replace(time_s=time.perf_counter() - self._began))
