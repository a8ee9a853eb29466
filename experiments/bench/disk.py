"""State that exceeds the host's budget, on disk: against all of it in host memory, and per-tensor swapping.

    python -m experiments.disk [--json] [--disk DIR]

Trains small GPTs of whose state a quarter, half or all has no room on the host, with updates on the CPU. `throttled`:
on the emulated accelerator with the proportions of one GPU of an H100 node and two NVMe drives, slowed down. `file
system`: as fast as this machine's processor and the folder's file system are, which are measured first.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.calibration.measure import QUICK, Effort, base_profile, measure
from dos.machine.threads import kernel_threads
from dos.state.disk import DiskSpace
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import Progress, finish, measuring, take_turns, timed
from experiments.miniature import without_fixed_costs
from experiments.training import Run, model_of
from perfmodel import Lane, Plan, Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import MIXED, SPLIT
from perfmodel.hardware import LINK_RATES, HardwareProfile
from perfmodel.windows import WINDOWS

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the state, for which the host has no room, or all but a few subgroups; the windows have theirs in any case."""
WARM_UP = 2
"""Updates that do not count: the first reads nothing, as its state is zeros."""
BATCH = 2
FULL_S = 2.5
"""Seconds that the throttled drives take to read and write all of the state at once."""
UNTHROTTLED = 1e3
"""Times as fast as the machine: nothing is slowed down."""

SHOWN = (
    *("share_on_disk", "update_s", "bound_s", "over_bound", "read_gb_per_s"),
    *("read_bytes_per_parameter", "written_bytes_per_parameter", "swapped_s", "bits_equal"),
)


def throttled() -> Setting:
    """One rank of an H100 node with two drives of its own that read 7 GB/s and write 5 each, at once 70% of both."""
    config = GPTConfig(layers=7, width=256, heads=4, context=32)
    node = without_fixed_costs(HardwareProfile.builtin("h100"))
    rates = {"disk_read_bandwidth": 2 * 7e9, "disk_write_bandwidth": 2 * 5e9}
    node = node.replace(**rates, **{f"{name}_duplex": 0.7 * rate for name, rate in rates.items()})
    write_s = SPLIT.state_bytes * GPT(config, device="meta").numel / node.disk_write_bandwidth_duplex
    slow = node.scaled(write_s / FULL_S)
    return Setting(config, 88 * 1024, slow, slow)


def file_system(folder: Path, effort: Effort) -> Setting:
    """This machine as calibration measures it. Copies on the links are left out, so that the bound may be too low."""
    found = measure(None, effort, [kernel_threads()], disk=[folder])
    profile = without_fixed_costs(found.profile(base_profile(None), "this"))
    profile = profile.replace(**{rate: UNTHROTTLED * getattr(profile, rate) for rate in LINK_RATES})
    config = GPTConfig(layers=12, width=512, heads=8, context=32)
    return Setting(config, 1 << 20, profile, profile.scaled(UNTHROTTLED))


def compare(name: str, setting: Setting, rounds: int, folder: Path, on_progress: Progress) -> list[dict[str, Any]]:
    """The rows of a setting. All take turns, an update each."""
    batches = Corpus(standard_library(), setting.config.context).batches(WARM_UP + rounds, BATCH, seed=0)
    runs = {share: DiskRun(setting, share, folder) for share in SHARES}
    swapped = Swapped(model_of(setting.config), EmulatedDevice(setting.device, capacity=0), folder)
    contestants = {f"{name}: {share:.0%} on disk": run.iterate for share, run in runs.items()}
    contestants[f"{name}: swapping"] = swapped.iterate
    *found, by_swapping = take_turns(contestants, batches, warm_up=WARM_UP, on_turn=on_progress).values()
    swapped_s = statistics.median(update.seconds for update in by_swapping)
    return [
        {
            "setting": name,
            **run.row(updates),
            "swapped_s": swapped_s if share == max(SHARES) else None,
            "bits_equal": run.equals(runs[0.0]),
        }
        for (share, run), updates in zip(runs.items(), found, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser("disk", __doc__)
    parser.add_count("rounds", 5, "updates of each that count")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="folder for state (the current one)")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.disk) as name, measuring(arguments.json) as (console, progress):
        folder = Path(name)
        for each, setting in {"throttled": throttled(), "file system": file_system(folder, QUICK)}.items():
            rows += compare(each, setting, arguments.rounds, folder, progress)
        with closing(DiskSpace([folder])) as space:
            direct = space.direct
    for (each, subgroups), group in groupby(rows, lambda row: (row["setting"], row["subgroups"])):
        title = f"{each}, {subgroups} subgroups: seconds of an update"
        console.print(table_of(title, list(group), *SHOWN, left=0))
    return finish({"rows": rows, "direct": direct}, console, arguments.json)


class Update(NamedTuple):
    """One update: seconds, bytes that system calls read and wrote, and seconds in which state was read."""

    seconds: float
    read: int = 0
    written: int = 0
    reading_s: float = 0.0


class Setting(NamedTuple):
    """A model and a machine.

    profile: what bounds and plans are made with. device: what the emulated device slows work down to.
    """

    config: GPTConfig
    subgroup_size: int
    profile: HardwareProfile
    device: HardwareProfile


class DiskRun(Run):
    """Training with a share of the state on disk."""

    def __init__(self, setting: Setting, share: float, folder: Path) -> None:
        model, self.setting = model_of(setting.config), setting
        windows, numel = WINDOWS * setting.subgroup_size, model.numel
        # The windows have half of it at most.
        budget = int(SPLIT.held_bytes * (windows + max(windows, (1 - share) * numel)))
        device = EmulatedDevice(setting.device, capacity=int(10 * SPLIT.state_bytes * numel))
        optimizer = DOSAdam(
            model.parameters(),
            policy=self.plan,
            subgroup_size=setting.subgroup_size,
            device=device,
            disk=folder if share else None,
            host_memory=budget if share else None,
        )
        super().__init__(model, optimizer, device)

    def plan(self, work: Workload) -> Plan:
        """The device has no room for state."""
        self.workload = dataclasses.replace(work, peak_free_bytes=0, update_free_bytes=0)
        return adaptive(self.workload, self.setting.profile)

    def iterate(self, batch: Sequence[Tensor]) -> Update:
        """Train on a batch. The update begins with all gradients there and ends with its last transfer."""
        train(self.model, batch)
        before = transferred()
        self.optimizer.step()
        self.optimizer.synchronize()
        read, written = (after - earlier for after, earlier in zip(transferred(), before, strict=True))
        timeline = self.optimizer.timeline()
        return Update(max(span.end for span in timeline.spans), read, written, timeline.busy(Lane.READ))

    def row(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Medians over the updates. Bytes are those of system calls, for each parameter on disk."""
        loads, plan = self.workload.subgroups, self.optimizer.plan()
        assert plan is not None, "it has been updated on a device"
        numel = sum(loads[i].numel for i in plan.on_disk)
        seconds, read, written, reading_s = map(statistics.median, zip(*updates, strict=True))
        bound_s = lower_bound(self.workload, self.setting.profile).seconds
        return {
            "share_on_disk": numel / self.workload.numel,
            "subgroups": len(loads),
            "update_s": seconds,
            "bound_s": bound_s,
            "over_bound": seconds / bound_s,
            "read_gb_per_s": read / reading_s / 1e9 if reading_s else 0.0,
            "read_bytes_per_parameter": read / numel if numel else 0.0,
            "written_bytes_per_parameter": written / numel if numel else 0.0,
        }


class Swapped:
    """Each parameter's master and moments are read, updated by torch.optim.AdamW and written, one after the other.

    Copies of gradients and parameters on the links are left out.
    """

    def __init__(self, model: GPT, device: EmulatedDevice, folder: Path) -> None:
        self.model = model
        self.device = device
        self.step = 0
        self.files = {folder / f"swapped-{i}": parameter for i, parameter in enumerate(self.model.parameters())}
        for path, parameter in self.files.items():
            master = parameter.detach().float().flatten()
            write(path, torch.stack((master, torch.zeros_like(master), torch.zeros_like(master))))

    def iterate(self, batch: Sequence[Tensor]) -> Update:
        """Train on a batch."""
        train(self.model, batch)
        return Update(timed(self._update))

    def _update(self) -> None:
        for path, parameter in self.files.items():
            assert parameter.grad is not None, "every parameter takes part"
            with self.device.disk_io(Lane.READ, path.stat().st_size):
                state = torch.from_numpy(np.fromfile(path, np.float32)).view(3, -1)
            master = nn.Parameter(state[0])
            master.grad = parameter.grad.float().flatten()
            adamw = torch.optim.AdamW([master])
            step = torch.tensor(float(self.step))
            adamw.state[master] = {"step": step, "exp_avg": state[1], "exp_avg_sq": state[2]}
            with self.device.host_update(parameter.numel(), int(MIXED.update_traffic * parameter.numel())):
                adamw.step()
                parameter.data.copy_(master.detach().view_as(parameter))
            with self.device.disk_io(Lane.WRITE, path.stat().st_size):
                write(path, state)
        self.step += 1


def transferred() -> list[int]:
    """Bytes that this process has read and written so far by system calls, whatever caches them."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(counters[name]) for name in ("rchar", "wchar")]


def write(path: Path, state: Tensor) -> None:
    """Write it to the drive and not into the file cache, which would count as memory of the host."""
    with path.open("wb") as file:
        state.numpy().tofile(file)
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train(model: GPT, batch: Sequence[Tensor]) -> None:
    """Set the gradients of a batch without hooks: updates are measured alone."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(*batch), parameters), strict=True):
        parameter.grad = gradient


if __name__ == "__main__":
    sys.exit(main())
