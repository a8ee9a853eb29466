"""Machines slowed down to miniatures: an update of a small model then lasts as long as is wanted, in proportion.

So does its compute, and who asks is told where in its iteration a training is.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dos import DOSAdam, EmulatedDevice
from dos.deciding.policies import Policy
from experiments.gpt import GPT
from perfmodel import Plan, Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.policies import cpu_only
from perfmodel.simulate import makespan

UPDATE = 2.0
"""Where the update begins; backward begins at 1, forward at 0."""
UPDATE_S = 0.4
"""Seconds that an update on the CPU is usually made to last, so that the real work, milliseconds, counts little."""


def without_fixed_costs(profile: HardwareProfile) -> HardwareProfile:
    """The machine without fixed costs of copies, launches and disk: they would not be slowed down with rates."""
    return dataclasses.replace(profile, copy_latency_s=0.0, launch_latency_s=0.0, disk_latency_s=0.0)


def equal_subgroups(numel: int, size: int, **workload: Any) -> Workload:
    """So many parameters in subgroups of one size, but for the last. workload: of `Workload.of_sizes`, besides."""
    return Workload.of_sizes([min(size, numel - first) for first in range(0, numel, size)], **workload)


def slowed(profile: HardwareProfile, workload: Workload, update_s: float) -> HardwareProfile:
    """The machine with all rates scaled together, so that an update of the workload on the CPU takes `update_s`."""
    profile = without_fixed_costs(profile)
    return profile.scaled(makespan(cpu_only(workload), workload, profile) / update_s)


def fastest_s(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest: what else this computer does must not make an emulated machine slower for good."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bits_of(model: nn.Module, optimizer: DOSAdam) -> list[Tensor]:
    """Copies of the bytes of parameters and state."""
    state = (t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in (*model.parameters(), *state)]


def all_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are pairwise the same."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


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


class Progress:
    """Follows a model's iterations. To be made before the model's optimizer, whose hooks then find it advanced.

    forward_s, backward_s: seconds that the two take at least; the caller waits in hooks, as it would for a GPU.
    moved: called whenever the position has changed.
    iteration: number of forwards begun, less one. position: in the iteration; see `UPDATE`.
    """

    def __init__(
        self, model: GPT, forward_s: float = 0.0, backward_s: float = 0.0, moved: Callable[[], object] | None = None
    ) -> None:
        self.iteration = -1
        self.position = 0.0
        self._forward_s = forward_s
        self._backward_s = backward_s
        self._moved = moved
        self._began = 0.0
        self._share = 0.0
        model.register_forward_pre_hook(self._forward_begins)
        blocks = len(model.blocks)
        for number, block in enumerate(model.blocks, start=1):
            block.register_forward_hook(lambda *_, share=number / blocks: self._advance(0.0, share))
        model.register_forward_hook(self._backward_begins)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: self._gradient(p.numel() / model.numel))

    def follow(self, optimizer: Optimizer) -> None:
        """Let the optimizer's steps be the updates."""
        optimizer.register_step_pre_hook(lambda *_: self.move_to(UPDATE))

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self.iteration += 1
        self._began = time.perf_counter()
        self.move_to(0.0)

    def _backward_begins(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._began, self._share = time.perf_counter(), 0.0

    def _gradient(self, share: float) -> None:
        self._share += share
        self._advance(1.0, self._share)

    def _advance(self, phase: float, share: float) -> None:
        """So much of the phase is over."""
        self.move_to(phase + min(share, 0.999))  # never 1, where the next phase is
        seconds = self._forward_s if phase == 0.0 else self._backward_s
        time.sleep(max(0.0, self._began + share * seconds - time.perf_counter()))

    def move_to(self, position: float) -> None:
        """That is where training is from now on."""
        self.position = position
        if self._moved is not None:
            self._moved()
