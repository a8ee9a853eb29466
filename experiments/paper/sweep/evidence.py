"""What the report argues from: lanes of single plans, errors of the model, runs that interleaving did not help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.paper.published import MEASURED_AS_BEST, Prediction, summary
from experiments.paper.runs import PublishedRun
from experiments.paper.sweep.compare import Comparison, Results, Series, Table
from experiments.paper.sweep.predict import Predictor
from experiments.paper.sweep.published_runs import KEYS_OF_RUNS
from experiments.paper.sweep.spec import Configuration
from experiments.paper.zero3 import Mode

LANES = {
    "CPU": "cpu_busy_s",
    "GPU": "gpu_busy_s",
    "H2D": "h2d_busy_s",
    "D2H": "d2h_busy_s",
    "host DRAM": "host_dram_s",
}
"""What keeps each busy, of an outcome."""


def lane_table(results: Results) -> Table:
    """One line for each plan: its update, and how long it keeps each lane busy."""
    columns = {
        "published": "published_update_s",
        "simulated": "update_s",
        **LANES,
        "resident": "resident",
        "streamed": "streamed",
        "on CPU": "on_cpu",
        "bound": "bound_s",
    }
    lines = [["", *columns]]
    for config, outcome in results.items():
        name = Series(config.policy, config.memory, ()).name
        loop = {"zero3_offload": ", DeepSpeed", "dos": ", DeepSpeed"}.get(config.policy, "")
        lines.append([name + loop, *(_text(getattr(outcome, field)) for field in columns.values())])
    return lines


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def error_table(cases: Mapping[str, Mapping[str, Sequence[Prediction]]]) -> Table:
    """Errors on runs that were not fitted. cases: by what was left out, then by machine."""
    lines = [["left out", "machine", "runs", "update, median", "update, max", "backward, median", "speedup, median"]]
    for left_out, predictions in cases.items():
        for machine, of_class in predictions.items():
            found = summary(machine, of_class)
            keys = ("update_median_error", "update_max_error", "backward_median_error", "speedup_median_error")
            lines.append([left_out, machine, str(found["runs"]), *(f"{float(found[k] or 0):.1%}" for k in keys)])
    return lines


def point_error_table(comparisons: Mapping[str, Sequence[Comparison]]) -> Table:
    """Errors of the simulated paper's schedule where it was published, by sweep: of updates, of iteration speedups."""
    rows: Table = [["sweep", "published points", "update\nmedian / max", "iteration speedup\nmedian / max"]]
    for name, of_sweep in comparisons.items():
        paper = [
            (comparison, series) for comparison in of_sweep for series in comparison.series if series.policy == "dos"
        ]
        updates = [
            e for _, s in paper for e in _errors(s.values("simulated", "update"), s.values("published", "update"))
        ]
        speedups = [
            e for c, s in paper for e in _errors(*(c.speedups(s, k, "iteration") for k in ("simulated", "published")))
        ]
        if updates:  # something of it was published
            cells = [f"{statistics.median(e):.1%} / {max(e):.1%}" for e in (updates, speedups)]
            rows.append([name.replace("_", " "), str(len(updates)), *cells])
    return rows


def _errors(simulated: Sequence[float | None], published: Sequence[float | None]) -> list[float]:
    return [abs(s / p - 1) for s, p in zip(simulated, published, strict=True) if s is not None and p is not None]


def speedup_table(predictions: Mapping[str, Sequence[Prediction]], machines: Iterable[str]) -> Table:
    """Each interleaved run of some machines: published and simulated speedup of the iteration over ZeRO-Offload."""
    lines = [["machine", "model", "ratio", "stride", "published", "simulated", "error"]]
    for machine in machines:
        for p in predictions[machine]:
            r = p.published.run
            if r.mode is Mode.DOS and p.speedups:
                published, simulated = p.speedups
                cells = [machine, p.published.model, f"{r.cpu_ratio:g}", str(r.stride)]
                lines.append([*cells, f"{published:.2f}×", f"{simulated:.2f}×", f"{simulated / published - 1:+.1%}"])
    return lines


@dataclass(frozen=True)
class Interleaving:
    """Published runs of one configuration: all updates on the CPU with asynchronous gradients, and interleaved.

    gain: of the median iteration. update_saved_s, backward_added_s: by the medians. overlap: whether the slowest
    interleaved run was slower than the fastest other one.
    """

    interleaved: PublishedRun
    cpu_s: float
    interleaved_s: float
    update_saved_s: float
    backward_added_s: float
    overlap: bool

    @property
    def gain(self) -> float:
        return self.cpu_s / self.interleaved_s - 1

    @property
    def doubtful(self) -> bool:
        """Whether interleaving gained no more than what repeats differ by, or lost in backward a tenth of what it
        saved in the update or more."""
        noise = MEASURED_AS_BEST[self.interleaved.machine_class]
        return self.overlap or self.gain <= noise or self.backward_added_s > 0.1 * self.update_saved_s


def interleavings(runs: Sequence[PublishedRun]) -> list[Interleaving]:
    """Every published configuration and stride that has a counterpart without interleaving."""
    found = []
    for first in runs:
        if first.run.mode is not Mode.DOS:
            continue
        same = [r for r in runs if r.config == first.config]
        cpu = [r for r in same if r.run.mode is Mode.ASYNC_GRAD_ONLY]
        dos = [r for r in same if r.run.mode is Mode.DOS and r.run.stride == first.run.stride]
        if cpu and dos[0] is first:  # a configuration that was run repeatedly counts once
            found.append(
                Interleaving(
                    first,
                    statistics.median(r.iteration_s for r in cpu),
                    statistics.median(r.iteration_s for r in dos),
                    statistics.median(r.update_s for r in cpu) - statistics.median(r.update_s for r in dos),
                    statistics.median(r.backward_s for r in dos) - statistics.median(r.backward_s for r in cpu),
                    max(r.iteration_s for r in dos) > min(r.iteration_s for r in cpu),
                )
            )
    return found


def interleaving_table(found: Sequence[Interleaving], predictor: Predictor) -> Table:
    """The doubtful ones, with what is simulated of them, of the adaptive policy with what the trace leaves free."""
    lines = [
        [
            "machine, model",
            *("ranks", "micro-batches", "stride", "CPU-only, s", "interleaved, s", "gain"),
            *("update saved, s", "backward added, s", "simulated gain", "adaptive over CPU-only"),
        ]
    ]
    for item in sorted(found, key=lambda item: item.gain):
        if item.doubtful:
            r = item.interleaved
            values = {key: of(r) for key, of in KEYS_OF_RUNS.items()} | {"memory": "trace"}
            cpu, dos, ours = (
                predictor.outcome(Configuration.of(values | {"policy": policy})).iteration_s or math.nan
                for policy in ("async_grad_only", "dos", "adaptive")
            )
            promised = [f"{cpu / seconds - 1:+.1%}" for seconds in (dos, ours)]
            cells = [
                f"{r.machine_class}, {r.model}",
                str(r.ranks),
                str(r.run.micro_batches),
                str(r.run.stride),
            ]
            cells += [f"{item.cpu_s:.2f}", f"{item.interleaved_s:.2f}", f"{item.gain:+.1%}"]
            cells += [f"{item.update_saved_s:.2f}", f"{item.backward_added_s:+.2f}"]
            lines.append([*cells, *promised])
    return lines
