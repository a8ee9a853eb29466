"""What the experiments train on: this machine's GPU, or an emulated accelerator like an H100 node."""

from __future__ import annotations

import csv
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.optim import AdamW, Optimizer

from dos import EmulatedDevice
from experiments.runs import read_runs
from perfmodel import Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only
from perfmodel.simulate import makespan
from perfmodel.zero3 import Mode

DATA = Path(__file__).parent / "data"


def choose_machine(
    parameters: int, value_bytes: int, subgroup_size: int, compute: Callable[[], None]
) -> CudaMachine | EmulatedMachine:
    """The GPU if there is one, else an `EmulatedMachine`. compute: one forward and backward, to be timed for it."""
    if torch.cuda.is_available():
        return CudaMachine()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    # The fastest: what else this computer does must not make the accelerator slower for good.
    return EmulatedMachine(parameters, value_bytes, subgroup_size, compute_s=min(times))


class Machine(Protocol):
    """Trains one model after the other, each with one optimizer.

    torch_device: where model and batches are.
    """

    name: str
    torch_device: torch.device

    @property
    def device(self) -> EmulatedDevice | None:
        """What `DOSAdam(device=...)` is given."""

    def begin(self) -> None:
        """Forget the memory of the run before."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`, taking as long as it does on this machine."""

    def peak_bytes(self, optimizer: Optimizer) -> int:
        """The most device memory held since `begin`."""


class CudaMachine:
    """The current CUDA device, in real time."""

    device = None

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)

    def begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def peak_bytes(self, optimizer: Optimizer) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


class EmulatedMachine:
    """One of four ranks of the published run of a 20B model on 80 GB H100s, as small and slow as the model here needs.

    Time: the node's rates (the built-in profile `h100`) are slowed down together until the update of the whole model
    on the CPU lasts as many times forward plus backward as it did there. Fixed costs of copies and launches, a few
    thousandths there, are left out.
    Memory: every byte there is `parameters / (that rank's parameters)` bytes here. What is free when the published
    trace has least is free for optimizer state; the rest is taken by model, gradients and activations.

    parameters: of the model. value_bytes: of one parameter or gradient. subgroup_size: in parameters.
    compute_s: seconds of one forward and backward here.
    """

    torch_device = torch.device("cpu")

    def __init__(self, parameters: int, value_bytes: int, subgroup_size: int, compute_s: float) -> None:
        published = PublishedRank.read()
        node = dataclasses.replace(HardwareProfile.builtin("h100"), copy_latency_s=0.0, launch_latency_s=0.0)
        sizes = [min(subgroup_size, parameters - start) for start in range(0, parameters, subgroup_size)]
        update = Workload.of_sizes(sizes, gradient_bytes=value_bytes, parameter_bytes=value_bytes)
        slowdown = published.update_over_compute * compute_s / makespan(cpu_only(update), update, node)
        share = parameters / published.parameters
        self.name = f"emulated H100 node (rates 1/{slowdown:.0f}, memory 1/{1 / share:.0f})"
        self._profile = node.scaled(1 / slowdown)
        self._capacity = round(published.memory_bytes * share)
        self._occupied = round((published.memory_bytes - published.free_bytes) * share)
        self.begin()

    def begin(self) -> None:
        self.device = EmulatedDevice(self._profile, self._capacity, self._occupied)

    def synchronize(self) -> None:
        pass

    def step(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, AdamW):
            numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self.device.launch(0, optimizer.step, numel).wait()
        else:
            optimizer.step()

    def peak_bytes(self, optimizer: Optimizer) -> int:
        if isinstance(optimizer, AdamW):
            state = [t for entry in optimizer.state.values() for t in entry.values() if t.ndim]
            return self._occupied + sum(t.nbytes for t in state)
        return self.device.peak_bytes


@dataclasses.dataclass(frozen=True)
class PublishedRank:
    """One rank of the published 20B runs.

    parameters: whose optimizer state it holds.
    update_over_compute: seconds of its update, all on the CPU, over those of forward plus backward.
    memory_bytes, free_bytes: of its GPU, and free when least is.
    """

    parameters: float
    update_over_compute: float
    memory_bytes: int
    free_bytes: int

    @classmethod
    def read(cls) -> PublishedRank:
        """From the files in `experiments/data`.

        They have shares of 0.5 to 0.9 on the CPU, so the update is extrapolated to 1. Compute is what its fastest run
        needs, the one least held up by transfers.
        """
        runs = [
            r
            for r in read_runs(DATA / "published_runs.csv")
            if (r.machine_class, r.model, r.run.mode) == ("h100", "20B", Mode.ASYNC_GRAD_ONLY)
        ]
        line = np.polyfit([r.run.cpu_ratio for r in runs], [r.update_s for r in runs], 1)
        compute_s = min(r.forward_s + r.backward_s for r in runs)
        with (DATA / "memory_h100_20b_interleaved.csv").open(newline="") as file:
            trace = [(int(row["used_bytes"]), int(row["free_bytes"])) for row in csv.DictReader(file)]
        return cls(
            parameters=runs[0].run.params,
            update_over_compute=float(np.polyval(line, 1.0)) / compute_s,
            memory_bytes=sum(trace[0]),
            free_bytes=min(free for _, free in trace),
        )
