"""Published training runs: rows of a CSV file as `experiments.zero3.Run` with what was measured of them."""

from __future__ import annotations

import csv
import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from experiments.paper.zero3 import Mode, Run
from perfmodel.hardware import HardwareProfile

K = TypeVar("K")
T = TypeVar("T")

DATA = Path(__file__).parents[1] / "data"
"""Published by the authors: a CSV file of runs, and traces of memory; and the data sheets of their machines."""
RUNS = DATA / "published_runs.csv"

CONFIG = (
    *("machine", "numa_bound", "ranks_per_node", "model", "params_total", "params_rank", "tp", "nodes", "mbs"),
    *("grad_accum", "cpu_ratio", "subgroup_size"),
)
"""Columns that are equal for runs that differ only in mode, stride or repeat."""

OVERSHOOT = 1.2
"""Mean size of a subgroup over the nominal one, for configurations of which no run was published."""

TRACES = {
    "h100_20b_interleaved": ("h100", "20B", 4),
    "h100_20b_zero3_offload": ("h100", "20B", 4),
    "a100_13b_zero3_offload": ("a100_unbound", "13B", 1),
}
"""Recorded traces, `memory_<name>.csv`: machine and built-in profile, model, and ranks on the host."""


@functools.cache
def read_trace(name: str) -> tuple[list[int], int]:
    """A published trace of a GPU's memory: bytes used, sample by sample, and bytes that there are."""
    with (DATA / f"memory_{name}.csv").open(newline="") as file:
        samples = [(int(row["used_bytes"]), int(row["free_bytes"])) for row in csv.DictReader(file)]
    return [used for used, _ in samples], sum(samples[0])


@dataclass(frozen=True)
class PublishedRun:
    """One row. Measured times in seconds. config: its CONFIG.

    machine_class: `h100`, or `a100_bound` and `a100_unbound` by whether ranks are bound to NUMA nodes.
    nodes: hosts that it was spread over. subgroup_size: the nominal one, in parameters.
    """

    machine_class: str
    model: str
    config: tuple[str, ...]
    run: Run
    nodes: int
    tensor_parallel: int
    subgroup_size: int
    forward_s: float
    backward_s: float
    update_s: float
    iteration_s: float

    @property
    def ranks(self) -> int:
        """Data-parallel ranks on all hosts."""
        return self.nodes * self.run.ranks_per_host


def median_of(runs: Iterable[PublishedRun], phase: str) -> float:
    """The median over runs of one of their times, such as "update_s"."""
    return statistics.median(getattr(run, phase) for run in runs)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """Items by their key, in the order in which keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def read_runs() -> list[PublishedRun]:
    """All published runs."""
    with RUNS.open(newline="") as file:
        return [_parse(row) for row in csv.DictReader(file)]


def _parse(row: dict[str, str]) -> PublishedRun:
    times = [float(row[f"{phase}_ms"]) / 1e3 for phase in ("fwd", "bwd", "update", "iteration")]
    run = Run(
        mode=Mode(row["mode"]),
        params=float(row["params_rank"]),
        model_params=float(row["params_total"]) / float(row["tp"]),
        subgroups=int(row["n_subgroups"]),
        cpu_ratio=float(row["cpu_ratio"]),
        stride=int(row["stride"] or 0),
        ranks_per_host=int(row["ranks_per_node"]),
        micro_batches=int(row["grad_accum"]),
        micro_batch_size=int(row["mbs"]),
        forward_s=times[0],
    )
    return PublishedRun(
        row["machine"] if row["machine"] == "h100" else ("a100_unbound", "a100_bound")[int(row["numa_bound"])],
        row["model"],
        tuple(row[column] for column in CONFIG),
        run,
        int(row["nodes"]),
        int(row["tp"]),
        int(float(row["subgroup_size"])),
        *times,
    )


_A100, _H100 = (HardwareProfile.load(DATA / f"data_sheet_{gpu}.json") for gpu in ("a100", "h100"))
DATA_SHEETS = {"h100": _H100, "a100_bound": _A100, "a100_unbound": _A100}
"""Where a fit starts: 75% of the peak of the memory channels, a link's usual pinned rate, 100 bytes of device memory
traffic per parameter of an update that is not fused."""
DEVICE_BANDWIDTHS = {"h100": 3350e9, "a100_bound": 1555e9, "a100_unbound": 1555e9}
"""Bytes/s of their GPUs' memory."""
