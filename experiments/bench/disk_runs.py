"""Training with state on disk: in DOSAdam, and one parameter after the other, in plain files."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from experiments.gpt import GPT, GPTConfig
from perfmodel import Lane, Plan, Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import MIXED, SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.windows import WINDOWS


class Setting(NamedTuple):
    """A model and a machine.

    profile: what bounds and plans are made with. device: what the emulated device slows work down to.
    """

    config: GPTConfig
    subgroup_size: int
    profile: HardwareProfile
    device: HardwareProfile

    def model(self) -> GPT:
        """The same at each call."""
        torch.manual_seed(0)
        return GPT(self.config, dtype=torch.bfloat16)


class Run:
    """Training with a share of the state on disk."""

    def __init__(self, setting: Setting, share: float, folder: Path) -> None:
        self.model = setting.model()
        self.setting = setting
        windows, numel = WINDOWS * setting.subgroup_size, self.model.numel
        # The windows have half of it at most.
        budget = int(SPLIT.held_bytes * (windows + max(windows, (1 - share) * numel)))
        self.optimizer = DOSAdam(
            self.model.parameters(),
            policy=self.plan,
            subgroup_size=setting.subgroup_size,
            device=EmulatedDevice(setting.device, capacity=int(10 * SPLIT.state_bytes * numel)),
            disk=folder if share else None,
            host_memory=budget if share else None,
        )
        self.update_s: list[float] = []
        self.moved: list[tuple[int, int, float]] = []

    def plan(self, work: Workload) -> Plan:
        """The device has no room for state."""
        self.workload = dataclasses.replace(work, peak_free_bytes=0, update_free_bytes=0)
        return adaptive(self.workload, self.setting.profile)

    def iterate(self, batch: Sequence[Tensor]) -> None:
        """Train on a batch. The update begins with all gradients there and ends with its last transfer."""
        train(self.model, batch)
        before = transferred()
        self.optimizer.step()
        self.optimizer.synchronize()
        read, written = (after - earlier for after, earlier in zip(transferred(), before, strict=True))
        timeline = self.optimizer.timeline()
        self.update_s.append(max(span.end for span in timeline.spans))
        self.moved.append((read, written, timeline.busy(Lane.READ)))

    def row(self, skip: int) -> dict[str, Any]:
        """Medians over all updates but the first few. Bytes are those of system calls, for each parameter on disk."""
        loads, plan = self.workload.subgroups, self.optimizer.plan()
        assert plan is not None, "it has been updated on a device"
        numel = sum(loads[i].numel for i in plan.on_disk)
        read, written, busy_s = (statistics.median(values[skip:]) for values in zip(*self.moved, strict=True))
        return {
            "share_on_disk": numel / self.workload.numel,
            "subgroups": len(loads),
            "update_s": statistics.median(self.update_s[skip:]),
            "bound_s": lower_bound(self.workload, self.setting.profile).seconds,
            "read_gb_per_s": read / busy_s / 1e9 if busy_s else 0.0,
            "read_bytes_per_parameter": read / numel if numel else 0.0,
            "written_bytes_per_parameter": written / numel if numel else 0.0,
        }


class Swapped:
    """Each parameter's master and moments are read, updated by torch.optim.AdamW and written, one after the other.

    What gradients and parameters take on the links is left out.
    """

    def __init__(self, model: GPT, device: EmulatedDevice, folder: Path) -> None:
        self.model = model
        self.device = device
        self.update_s: list[float] = []
        self.files = {folder / f"swapped-{i}": parameter for i, parameter in enumerate(self.model.parameters())}
        for path, parameter in self.files.items():
            master = parameter.detach().float().flatten()
            write(path, torch.stack((master, torch.zeros_like(master), torch.zeros_like(master))))

    def iterate(self, batch: Sequence[Tensor]) -> None:
        """Train on a batch."""
        train(self.model, batch)
        begin = time.perf_counter()
        for path, parameter in self.files.items():
            assert parameter.grad is not None, "every parameter takes part"
            with self.device.disk_io(Lane.READ, path.stat().st_size):
                state = torch.from_numpy(np.fromfile(path, np.float32)).view(3, -1)
            master = nn.Parameter(state[0])
            master.grad = parameter.grad.float().flatten()
            adamw = torch.optim.AdamW([master])
            step = torch.tensor(float(len(self.update_s)))
            adamw.state[master] = {"step": step, "exp_avg": state[1], "exp_avg_sq": state[2]}
            with self.device.host_update(parameter.numel(), int(MIXED.update_traffic * parameter.numel())):
                adamw.step()
                parameter.data.copy_(master.detach().view_as(parameter))
            with self.device.disk_io(Lane.WRITE, path.stat().st_size):
                write(path, state)
        self.update_s.append(time.perf_counter() - begin)


def transferred() -> list[int]:
    """Bytes that this process has read and written so far by system calls, whatever caches them."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(counters[name]) for name in ("rchar", "wchar")]


def write(path: Path, state: Tensor) -> None:
    """Write it so that it is on the drive and not in memory that caches files, which counts as the host's."""
    with path.open("wb") as file:
        state.numpy().tofile(file)
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train(model: GPT, batch: Sequence[Tensor]) -> None:
    """Gradients of a batch, which no hook sees: updates are measured alone."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(*batch), parameters), strict=True):
        parameter.grad = gradient
