"""Published training runs: rows of a CSV file as `experiments.zero3.Run` with what was measured of them."""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path

from experiments.paper.zero3 import Mode, Run
from perfmodel.hardware import HardwareProfile

DATA = Path(__file__).parents[1] / "data"
"""What the authors published: a CSV file of runs, and traces of memory; and the data sheets of their machines."""
RUNS = DATA / "published_runs.csv"

COLUMNS = (
    *("machine", "numa_bound", "ranks_per_node", "model", "params_total", "params_rank", "tp", "nodes", "mbs"),
    *("grad_accum", "cpu_ratio", "subgroup_size", "mode", "stride", "fwd_ms", "bwd_ms", "update_ms", "iteration_ms"),
)
"""Columns a file must have; `n_subgroups` is used when it is there."""

OVERSHOOT = 1.2
"""Mean size of a subgroup over the nominal one, for files that do not say how many there were."""


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
    """One row. Measured times in seconds; `config` is equal for runs that differ only in mode, stride or repeat.

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


def read_runs(path: str | Path = RUNS) -> list[PublishedRun]:
    """The runs of a CSV file. Raises ValueError naming the file, and the line, for columns or values that are wrong."""
    with Path(path).open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (rows.fieldnames or [])]
        if missing:
            raise ValueError(f"{path}: missing columns {', '.join(missing)}")
        runs = []
        for number, row in enumerate(rows, start=2):
            try:
                runs.append(_parse(row))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not runs:
        raise ValueError(f"{path}: no runs")
    return runs


def _parse(row: dict[str, str]) -> PublishedRun:
    def positive(column: str) -> float:
        value = float(row[column])
        if not 0 < value < math.inf:
            raise ValueError(f"{column} must be positive, found {row[column]!r}")
        return value

    stride, ratio = int(row["stride"] or 0), float(row["cpu_ratio"])
    if stride < 0 or not 0 <= ratio <= 1:
        raise ValueError(f"stride must be 0 or more and cpu_ratio in [0, 1], found {stride} and {ratio}")
    params, subgroup_size = positive("params_rank"), positive("subgroup_size")
    if row.get("n_subgroups"):
        subgroups = int(positive("n_subgroups"))
    else:
        subgroups = max(1, round(params / (OVERSHOOT * subgroup_size)))
    times = [positive(f"{phase}_ms") / 1e3 for phase in ("fwd", "bwd", "update", "iteration")]
    run = Run(
        mode=Mode(row["mode"]),
        params=params,
        model_params=positive("params_total") / positive("tp"),
        subgroups=subgroups,
        cpu_ratio=ratio,
        stride=stride,
        ranks_per_host=int(positive("ranks_per_node")),
        micro_batches=int(positive("grad_accum")),
        micro_batch_size=int(positive("mbs")),
        forward_s=times[0],
    )
    config = tuple(
        row[c] for c in COLUMNS if c not in ("mode", "stride", "fwd_ms", "bwd_ms", "update_ms", "iteration_ms")
    )
    return PublishedRun(
        machine_class(row["machine"], row["numa_bound"]),
        row["model"],
        config,
        run,
        int(positive("nodes")),
        int(positive("tp")),
        int(subgroup_size),
        *times,
    )


def machine_class(machine: str, numa_bound: str) -> str:
    """`h100`, or `a100_bound` and `a100_unbound` by whether ranks are bound to NUMA nodes.

    Raises ValueError for a machine or a binding that is not known.
    """
    if numa_bound not in ("0", "1"):
        raise ValueError(f"numa_bound must be 0 or 1, found {numa_bound!r}")
    name = machine if machine == "h100" else f"{machine}_{'bound' if numa_bound == '1' else 'unbound'}"
    if name not in DATA_SHEETS:
        raise ValueError(f"machine must be a100 or h100, found {machine!r}")
    return name


_A100, _H100 = (HardwareProfile.load(DATA / f"data_sheet_{gpu}.json") for gpu in ("a100", "h100"))
DATA_SHEETS = {"h100": _H100, "a100_bound": _A100, "a100_unbound": _A100}
"""Where a fit starts: 75% of the peak of the memory channels, a link's usual pinned rate, 100 bytes of device memory
traffic per parameter of an update that is not fused."""
DEVICE_BANDWIDTHS = {"h100": 3350e9, "a100_bound": 1555e9, "a100_unbound": 1555e9}
"""Bytes/s of their GPUs' memory."""
