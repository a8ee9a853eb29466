"""Charts of sweeps: simulated series as lines, published or measured ones as markers, the same colours throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.plots import CURVE_COLOURS
from experiments.published import MEASURED_AS_BEST, Prediction
from experiments.sweep.compare import KINDS, METRICS, Comparison, Series

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
}

_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def save_comparison(comparison: Comparison, title: str, path: Path) -> None:
    """Update and iteration times along the axis; metrics that no series has are left out."""
    metrics = [m for m in METRICS if any(s.has(kind, m) for s in comparison.series for kind in KINDS)]
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(1, len(metrics), figsize=(9, 4.2), squeeze=False, layout="constrained")
        for panel, metric in zip(panels[0], metrics, strict=True):
            _draw(panel, comparison, metric)
        kinds = [k for k in KINDS if any(s.has(k, m) for s in comparison.series for m in metrics)]
        handles = [Line2D([], [], color=colour(s), linewidth=2.5, label=s.name) for s in comparison.series]
        handles += [
            Line2D([], [], color="#5b6470", linewidth=1.5, label=f"line: {kind}")
            if kind == "simulated"
            else Line2D([], [], **_marker("#5b6470"), linestyle="none", label=f"marker: {kind}")
            for kind in kinds
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        plt.close(figure)


def _draw(panel: Axes, comparison: Comparison, metric: str) -> None:
    places = range(len(comparison.ticks))
    for series in comparison.series:
        values = [float("nan") if v is None else v for v in series.values("simulated", metric)]
        panel.plot(places, values, color=colour(series), linewidth=2, marker=".", markersize=5)
        for kind in ("published", "measured"):
            seen = [(x, v) for x, v in zip(places, series.values(kind, metric), strict=True) if v is not None]
            if len(set(series.outcomes)) == 1:
                seen = seen[:1]  # one run, whatever the axis
            if seen:
                panel.plot(*zip(*seen, strict=True), **_marker(colour(series)), linestyle="none", zorder=3)
    panel.set_xticks(places, comparison.ticks)
    panel.set_ylim(bottom=0)
    panel.set_xlabel(AXIS_LABELS.get(comparison.axis, comparison.axis.replace("_", " ")))
    panel.set_title(f"{metric} (seconds)")
    panel.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    panel.set_axisbelow(True)


def colour(series: Series) -> str:
    """The same for the same policy and memory in every chart."""
    memory = series.memory if isinstance(series.memory, str) else ""
    if (series.policy, memory) in COLOURS:
        return COLOURS[series.policy, memory]
    return CURVE_COLOURS[int(float(series.memory or 0)) % len(CURVE_COLOURS)]


def _marker(edge: str) -> dict[str, Any]:
    return {"marker": "o", "markersize": 8, "markerfacecolor": "white", "markeredgecolor": edge, "markeredgewidth": 2}


def save_speedups(predictions: Mapping[str, Sequence[Prediction]], path: Path) -> None:
    """Simulated against published speedups of the iteration over ZeRO-Offload, a colour for each machine.

    predictions: by machine, of runs that were not fitted.
    """
    looks = dict(zip(MEASURED_AS_BEST, (("#2f6fb0", "o"), ("#2a9d6f", "s"), ("#d1603d", "^")), strict=True))
    with plt.rc_context(_STYLE):
        figure, panel = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
        ends: list[float] = []
        for name, of_class in predictions.items():
            published, simulated = speedup_pairs(of_class)
            face, shape = looks[name]
            panel.scatter(published, simulated, 30, color=face, marker=shape, alpha=0.75, label=name, linewidths=0)
            ends += [*published, *simulated]
        line = [min(ends), max(ends)]
        panel.plot(line, line, color="#8d97a5", linewidth=1, zorder=0)
        panel.annotate("equal", (line[1], line[1]), textcoords="offset points", xytext=(-8, -14), color="#5b6470")
        panel.set(xlabel="published speedup over ZeRO-Offload (×)", ylabel="simulated speedup (×)")
        panel.set_title("Iteration speedups of runs the model was not fitted to")
        panel.grid(color="#e6e8ec", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        plt.close(figure)


def speedup_pairs(predictions: Sequence[Prediction]) -> tuple[list[float], list[float]]:
    """Published and simulated speedups of the predictions that have something to be compared with."""
    pairs = [
        (p.baseline[0] / p.published.iteration_s, p.baseline[1] / p.iteration_s)
        for p in predictions
        if p.baseline is not None and p.speedup_error is not None
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]
