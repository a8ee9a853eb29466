"""Charts of sweeps: simulated series as lines, published or measured ones as markers, the same colours throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper.published import Prediction
from experiments.paper.sweep.compare import KINDS, METRICS, Comparison, Series
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
