"""State that exceeds the host's budget, on disk: against all of it in host memory, and per-tensor swapping.

    python -m experiments.disk [--json] [--disk DIR]

Trains small GPTs of whose state a quarter, half or all has no room on the host, with updates on the CPU. `throttled`:
on the emulated accelerator with the proportions of one GPU of an H100 node and two NVMe drives, slowed down. `file
system`: as fast as this machine's processor and the folder's file system are, which are measured first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.calibration.measure import QUICK, Effort, base_profile, measure
from dos.machine.threads import kernel_threads
from dos.state.disk import DiskSpace
from experiments.command import Parser, seconds, table
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.miniature import without_fixed_costs
from experiments.training import all_equal, bits_of
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

Progress = Callable[[str], None]


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
    """This machine as calibration measures it. What links take is left out, so that the bound may be too low."""
    found = measure(None, effort, [kernel_threads()], disk=[folder])
    profile = without_fixed_costs(found.profile(base_profile(None), "this"))
    profile = profile.replace(**{rate: UNTHROTTLED * getattr(profile, rate) for rate in LINK_RATES})
    config = GPTConfig(layers=12, width=512, heads=8, context=32)
    return Setting(config, 1 << 20, profile, profile.scaled(UNTHROTTLED))


def compare(name: str, setting: Setting, rounds: int, folder: Path, on_progress: Progress) -> list[dict[str, Any]]:
    """The rows of a setting. All take turns, an update each, so that noise falls on all alike."""
    batches = Corpus(standard_library(), setting.config.context).batches(WARM_UP + rounds, BATCH, seed=0)
    runs = {share: Run(setting, share, folder) for share in SHARES}
    swapped = Swapped(setting.model(), EmulatedDevice(setting.device, capacity=0), folder)
    each: list[Run | Swapped] = [*runs.values(), swapped]
    for number, batch in enumerate(batches):
        on_progress(f"{name}: update {number + 1} of {len(batches)}")
        for one in each:
            one.iterate(batch)
    rows = []
    expected = bits_of(runs[0.0].model, runs[0.0].optimizer)
    for share, run in runs.items():
        equal = all_equal(expected, bits_of(run.model, run.optimizer))
        swapped_s = statistics.median(swapped.update_s[WARM_UP:]) if share == max(SHARES) else None
        rows.append({"setting": name, **run.row(WARM_UP), "swapped_s": swapped_s, "bits_equal": equal})
    return rows


def main() -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser(prog="python -m experiments.disk", description=__doc__.partition("\n")[0])
    parser.add_json()
    parser.add_count("rounds", 5, "updates of each that count")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="folder for state (the current one)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one core computes for the accelerator, one is the host
    console = Console(stderr=arguments.json)
    with tempfile.TemporaryDirectory(dir=arguments.disk) as name, console.status("") as status:
        folder = Path(name)
        status.update("what this machine does")
        settings = {"throttled": throttled(), "file system": file_system(folder, QUICK)}
        rows = [
            row
            for each, setting in settings.items()
            for row in compare(each, setting, arguments.rounds, folder, status.update)
        ]
        with closing(DiskSpace([folder])) as space:
            found = {"rows": rows, "direct": space.direct}
    show(rows, console)
    if arguments.json:
        print(json.dumps(found))
    return 0


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Tables for people."""
    headings = ("on disk", "update", "bound", "over", "GB/s", "read", "written", "swapping", "bits")
    for (setting, subgroups), group in groupby(rows, lambda row: (row["setting"], row["subgroups"])):
        cells = [
            [
                f"{row['share_on_disk']:.0%}",
                *seconds(row["update_s"], row["bound_s"]),
                *seconds(row["update_s"] / row["bound_s"], row["read_gb_per_s"], digits=2),
                *seconds(row["read_bytes_per_parameter"], row["written_bytes_per_parameter"], digits=1),
                *seconds(row["swapped_s"]),
                "equal" if row["bits_equal"] else "DIFFERENT",
            ]
            for row in group
        ]
        title = f"{setting}, {subgroups} subgroups: seconds of an update, bytes per parameter on disk"
        console.print(table(title, headings, cells, left=0))


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


if __name__ == "__main__":
    sys.exit(main())
