"""What the checks run on: the GPU, or an emulated accelerator that is slow enough for this computer."""

from __future__ import annotations

import dataclasses
import time

import torch

from dos import EmulatedDevice
from experiments.checks.base import Bench
from experiments.checks.training import Job
from perfmodel import Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only
from perfmodel.simulate import makespan

UPDATE_OVER_COMPUTE = 2.0
"""Seconds of an update on the CPU over those of forward and backward, on emulated machines."""


class Machine:
    """The current CUDA device, or an emulated one.

    torch_device: where models are. device: what `DOSAdam(device=)` is given; None for CUDA.
    """

    def __init__(self, name: str, torch_device: torch.device, profile: HardwareProfile | None, capacity: int) -> None:
        self.name = name
        self.torch_device = torch_device
        self._profile, self._capacity = profile, capacity
        self.begin()

    def begin(self) -> None:
        """Forget what was on an emulated device."""
        self.device = None if self._profile is None else EmulatedDevice(self._profile, self._capacity)


def machine_for(bench: Bench, job: Job, subgroup_size: int) -> Machine:
    """The GPU; or an H100 node, slowed down in proportion to this job, with memory for its state and more."""
    if bench.cuda:
        return Machine(torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device()), None, 0)
    host = torch.device("cpu")
    model, (batch,) = job.model(host), job.batches(1, host)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        model(*batch).backward()
        times.append(time.perf_counter() - start)
    # Fixed costs are some thousandths of a node's times, and `scaled` would not slow them down with the rates.
    node = dataclasses.replace(HardwareProfile.builtin("h100"), copy_latency_s=0.0, launch_latency_s=0.0)
    update = Workload.of_sizes([min(subgroup_size, job.numel - i) for i in range(0, job.numel, subgroup_size)])
    slowdown = UPDATE_OVER_COMPUTE * min(times) / makespan(cpu_only(update), update, node)
    return Machine(f"emulated H100 node (rates 1/{slowdown:.0f})", host, node.scaled(1 / slowdown), 20 * job.numel)
