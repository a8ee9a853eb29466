"""Machines slowed down to miniatures: an update of a small model then lasts as long as is wanted, in proportion."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.planning.policies import Policy
from experiments.harness import timed
from perfmodel import Plan, Workload
from perfmodel.bounds import lower_bound
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only
from perfmodel.simulate import Scope, makespan

UPDATE_S = 0.4
"""Seconds that an update on the CPU is usually made to last, so that the real work, milliseconds, counts little."""


def without_fixed_costs(profile: HardwareProfile) -> HardwareProfile:
    """The machine without fixed costs of copies, launches and disk: they would not be slowed down with rates."""
    fixed = ("copy_latency_s", "launch_latency_s", "turn_latency_s", "disk_latency_s")
    return profile.replace(**dict.fromkeys(fixed, 0.0))


def equal_subgroups(numel: int, size: int, **workload: Any) -> Workload:
    """`numel` parameters in subgroups of one size, but for the last. workload: of `Workload.of_sizes`, besides."""
    return Workload.of_sizes([min(size, numel - first) for first in range(0, numel, size)], **workload)


def slowed(profile: HardwareProfile, workload: Workload, update_s: float) -> HardwareProfile:
    """The machine with all rates scaled together, so that an update of the workload on the CPU takes `update_s`."""
    profile = without_fixed_costs(profile)
    return profile.scaled(makespan(cpu_only(workload), workload, profile) / update_s)


def least_iteration_s(workload: Workload, profile: HardwareProfile) -> float:
    """Seconds of an iteration that no plan could beat."""
    scope = Scope.beside(workload)
    return scope.compute_s(workload) + lower_bound(workload, profile, scope).seconds


def fastest_s(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest: what else this computer does must not make an emulated machine slower for good."""
    return min(timed(work) for _ in range(times))


def measured_update_s(
    parameters: Sequence[nn.Parameter],
    policy: Policy | Plan,
    subgroup_size: int,
    profile: HardwareProfile | None,
    rounds: int,
    state_format: str | None = "float32",
) -> float:
    """Median seconds of an update in the engine, from `step()` with all gradients there to the last transfer.

    profile: of the machine that is emulated; None for the parameters' own device. state_format: by default what the
    published runs have. Two steps before those that count move state to where it stays.
    """
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    capacity = 20 * sum(p.numel() for p in parameters)
    optimizer = DOSAdam(
        parameters,
        policy=(lambda _: policy) if isinstance(policy, Plan) else policy,
        subgroup_size=subgroup_size,
        state_format=state_format,
        device=None if profile is None else EmulatedDevice(profile, capacity),
    )
    times = []
    for _ in range(2 + rounds):
        optimizer.step()
        optimizer.synchronize()
        times.append(max(span.end for span in optimizer.timeline().spans))
    return statistics.median(times[2:])
