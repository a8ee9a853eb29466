"""State that exceeds the host's budget, on disk: against all of it in host memory, and per-tensor swapping.

    python -m experiments.disk [--json] [--disk DIR]

Trains small GPTs of whose state a quarter, half or all has no room on the host, with updates on the CPU. `throttled`:
on the emulated accelerator with the proportions of one GPU of an H100 node and two NVMe drives, slowed down. `file
system`: as fast as this machine's processor and the folder's file system are, which are measured first.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dos import EmulatedDevice
from dos.calibration.measure import QUICK, Effort, base_profile, measure
from dos.disk import DiskSpace
from dos.machine.threads import kernel_threads
from experiments.bench.disk_runs import Run, Setting, Swapped
from experiments.command import Parser, seconds, table
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.miniature import all_equal, bits_of, without_fixed_costs
from perfmodel.format import SPLIT
from perfmodel.hardware import LINK_RATES, HardwareProfile

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


if __name__ == "__main__":
    sys.exit(main())
