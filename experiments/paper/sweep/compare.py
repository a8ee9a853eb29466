"""The outcomes of a sweep side by side: series along its axis, speedups, tables, charts.

In charts simulated series are lines, published or measured ones markers, in the same colours throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper.published import Prediction
from experiments.paper.runs import grouped
from experiments.paper.sweep.predict import Outcome
from experiments.paper.sweep.spec import Configuration, Sweep
from experiments.plots import CURVE_COLOURS, drawn, grid, picture, save_predictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[tuple[str, str], str] = {
    ("zero3_offload", ""): "#8d97a5",
    ("async_grad_only", ""): "#e0a100",
    ("dos", ""): "#d1603d",
    ("adaptive", "ratio"): "#2f6fb0",
    ("adaptive", "trace"): "#2a9d6f",
    ("cpu", ""): "#5b6470",
    ("ratio", ""): "#8a5fb0",
    ("stride", ""): "#b5838d",
}
"""By policy and memory."""

AXIS_LABELS = {
    "model": "model size (parameters)",
    "ratio": "share of the optimizer state on the host",
    "stride": "update stride",
    "ranks": "data-parallel ranks",
    "accumulation": "micro-batches per update",
    "subgroup_size": "nominal subgroup size (parameters)",
    "memory": "GPU memory for state (GiB)",
    "micro_batch": "micro-batch (sequences)",
    "contention": "share of links and host memory that others take",
}
Results = Mapping[Configuration, Outcome]
Table = list[list[str]]
"""Rows of cells; the first is the heading."""

BASELINES = ("zero3_offload", "cpu")
"""Speedups are over the first of these policies that a sweep has."""
KINDS = ("published", "measured", "simulated")
METRICS = ("update", "iteration")

_NAMES = {
    "zero3_offload": "ZeRO-Offload",
    "async_grad_only": "asynchronous gradients",
    "dos": "the paper's schedule",
    "cpu": "CPU-only, our engine",
    "ratio": "static ratio, our engine",
    "stride": "the paper's stride, our engine",
}


@dataclass(frozen=True)
class Series:
    """One of the compared along an axis. outcomes: aligned with the axis; None where there is no run."""

    policy: str
    memory: str | float | None
    outcomes: tuple[Outcome | None, ...]

    @property
    def name(self) -> str:
        memory = {"ratio": "the paper's memory", "trace": "free memory"}.get(
            str(self.memory), f"{tick(self.memory)} GiB"
        )
        return f"adaptive, {memory}" if self.policy == "adaptive" else _NAMES[self.policy]

    def values(self, kind: str, metric: str) -> list[float | None]:
        """Seconds along the axis. kind: of KINDS. metric: of METRICS."""
        field = f"{metric}_s" if kind == "simulated" else f"{kind}_{metric}_s"
        return [getattr(outcome, field, None) for outcome in self.outcomes]

    def has(self, kind: str, metric: str) -> bool:
        return any(value is not None for value in self.values(kind, metric))


@dataclass(frozen=True)
class Comparison:
    """The series of one facet of a sweep. facet: what it is of, empty if there is only one."""

    axis: str
    ticks: tuple[str, ...]
    facet: str
    series: tuple[Series, ...]

    def speedups(self, series: Series, kind: str, metric: str) -> list[float | None]:
        """How many times as long the baseline takes, of the same kind (measured: simulated and scaled-down alike)."""
        baselines = [s for policy in BASELINES for s in self.series if s.policy == policy]
        if not baselines:
            return [None] * len(self.ticks)
        pairs = zip(baselines[0].values(kind, metric), series.values(kind, metric), strict=True)
        return [base / value if base is not None and value else None for base, value in pairs]

    def table(self, metric: str) -> Table:
        """Seconds, and in brackets the speedup, one column for each series and kind."""
        columns = [(s, kind) for s in self.series for kind in KINDS if s.has(kind, metric)]
        cells = [
            [_cell(*pair) for pair in zip(s.values(kind, metric), self.speedups(s, kind, metric), strict=True)]
            if s.policy not in BASELINES
            else [_cell(value, None) for value in s.values(kind, metric)]
            for s, kind in columns
        ]
        heading = [self.axis.replace("_", " "), *(f"{s.name}\n{kind}" for s, kind in columns)]
        return [heading, *([tick, *(column[row] for column in cells)] for row, tick in enumerate(self.ticks))]


def compare(sweep: Sweep, results: Results) -> list[Comparison]:
    """Comparisons along a sweep's axis, one for each of its facets. A run that has no axis is at all of its ticks."""
    if sweep.axis is None:
        return []
    ticks = _distinct(results, sweep.axis)
    found = []
    for facet in _facets(sweep, results):
        members = [(c, o) for c, o in results.items() if _agrees(c, facet)]
        series = []
        for (policy, memory), same in grouped(members, lambda item: (item[0].policy, item[0].memory)):
            outcomes = [next((o for c, o in same if _agrees(c, {sweep.axis: tick})), None) for tick in ticks]
            series.append(Series(policy, memory, tuple(outcomes)))
        label = ", ".join(f"{key.replace('_', ' ')} {tick(value)}" for key, value in facet.items())
        found.append(Comparison(sweep.axis, tuple(map(tick, ticks)), label, tuple(series)))
    return found


def listing(results: Results) -> Table:
    """One line for each run: the keys in which runs differ, and what they take."""
    keys = [key for key in vars(next(iter(results))) if len(_distinct(results, key)) > 1]
    heading = [key.replace("_", " ") for key in keys]
    heading += ["update", "iteration", "resident", "streamed", "on CPU", "of the bound", "note"]
    lines = [heading]
    for config, o in results.items():
        counts = ["" if n is None else str(n) for n in (o.resident, o.streamed, o.on_cpu)]
        bound = f"{o.update_s / o.bound_s:.2f}" if o.bound_s and o.update_s else ""
        times = [_cell(o.update_s, None), _cell(o.iteration_s, None)]
        lines.append([*(tick(getattr(config, key)) for key in keys), *times, *counts, bound, o.note])
    return lines


def _facets(sweep: Sweep, results: Results) -> list[dict[str, object]]:
    """The combinations of the facets' values that there are runs of."""
    values = {key: found for key in sweep.facets if (found := _distinct(results, key))}
    combinations = (dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values()))
    return [facet for facet in combinations if any(_agrees(config, facet) for config in results)]


def _agrees(config: Configuration, values: Mapping[str, object]) -> bool:
    return all(getattr(config, key) in (value, None) for key, value in values.items())


def _distinct(results: Results, key: str) -> Sequence[object]:
    found = dict.fromkeys(getattr(config, key) for config in results)
    found.pop(None, None)
    return tuple(found)


def tick(value: object) -> str:
    """A value as people write it: 100M rather than 100000000, 4 rather than 4.0."""
    if isinstance(value, int) and not isinstance(value, bool):
        for unit, name in ((10**9, "B"), (10**6, "M")):
            if value >= unit:
                return f"{value / unit:g}{name}"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _cell(seconds: float | None, speedup: float | None) -> str:
    if seconds is None:
        return "-"
    text = f"{seconds:.2f} s" if seconds >= 0.995 else f"{seconds:.3f} s"
    return text if speedup is None else f"{text} ({speedup:.2f}×)"


@drawn
def save_comparison(comparison: Comparison, title: str, path: Path) -> None:
    """Update and iteration times along the axis; metrics that no series has are left out."""
    from matplotlib.lines import Line2D

    metrics = [m for m in METRICS if any(s.has(kind, m) for s in comparison.series for kind in KINDS)]
    looks = colours(comparison.series)
    with picture(path, title, ncols=len(metrics), figsize=(9, 4.2), dpi=100, squeeze=False) as (figure, panels):
        for panel, metric in zip(panels[0], metrics, strict=True):
            _draw(panel, comparison, metric, looks)
        kinds = [k for k in KINDS if any(s.has(k, m) for s in comparison.series for m in metrics)]
        handles = [Line2D([], [], color=looks[s], linewidth=2.5, label=s.name) for s in comparison.series]
        handles += [
            Line2D([], [], color="#5b6470", linewidth=1.5, label=f"line: {kind}")
            if kind == "simulated"
            else Line2D([], [], **_marker("#5b6470"), linestyle="none", label=f"marker: {kind}")
            for kind in kinds
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _draw(panel: Axes, comparison: Comparison, metric: str, looks: Mapping[Series, str]) -> None:
    places = range(len(comparison.ticks))
    for series in comparison.series:
        values = [float("nan") if v is None else v for v in series.values("simulated", metric)]
        panel.plot(places, values, color=looks[series], linewidth=2, marker=".", markersize=5)
        for kind in ("published", "measured"):
            seen = [(x, v) for x, v in zip(places, series.values(kind, metric), strict=True) if v is not None]
            if len(set(series.outcomes)) == 1:
                seen = seen[:1]  # one run, whatever the axis
            if seen:
                panel.plot(*zip(*seen, strict=True), **_marker(looks[series]), linestyle="none", zorder=3)
    panel.set_xticks(places, comparison.ticks)
    panel.set_ylim(bottom=0)
    panel.set_xlabel(AXIS_LABELS.get(comparison.axis, comparison.axis.replace("_", " ")))
    panel.set_title(f"{metric} (seconds)")
    grid(panel, "y")


def colours(series: Sequence[Series]) -> dict[Series, str]:
    """Each series' own colour: the same in every chart for those of COLOURS, one of the others for the rest."""
    found: dict[Series, str] = {}
    for one in series:
        memory = one.memory if isinstance(one.memory, str) else ""
        usual = [COLOURS[one.policy, memory]] if (one.policy, memory) in COLOURS else []
        free = (c for c in (*usual, *CURVE_COLOURS, *COLOURS.values()) if c not in found.values())
        found[one] = next(free)
    return found


def _marker(edge: str) -> dict[str, Any]:
    return {"marker": "o", "markersize": 8, "markerfacecolor": "white", "markeredgecolor": edge, "markeredgewidth": 2}


def save_speedups(predictions: Mapping[str, Sequence[Prediction]], path: Path) -> None:
    """Simulated against published speedups of the iteration over ZeRO-Offload. predictions: of runs not fitted."""
    pairs = {name: [p.speedups for p in of_class if p.speedups] for name, of_class in predictions.items()}
    title = "Iteration speedups of runs the model was not fitted to"
    save_predictions(pairs, path, what="speedup over ZeRO-Offload (×)", title=title)
