"""Pictures of losses, timelines and device memory, for all experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perfmodel import Lane, Op, Timeline

OP_COLOURS = {
    Op.FORWARD: "#c9ced6",
    Op.BACKWARD: "#8d97a5",
    Op.UPDATE: "#2f6fb0",
    Op.GRADIENT: "#e0a100",
    Op.PREFETCH: "#2a9d6f",
    Op.PARAMETER: "#8bcbae",
    Op.FLUSH: "#d1603d",
}
"""Compute in grey, the update in blue, what goes up in greens, what comes down in warm colours."""

OP_LABELS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.UPDATE: "update",
    Op.GRADIENT: "gradient to host",
    Op.PREFETCH: "state to device",
    Op.PARAMETER: "parameter to device",
    Op.FLUSH: "state to host",
}

LANE_LABELS = {Lane.GPU: "device", Lane.CPU: "host CPU", Lane.H2D: "host → device", Lane.D2H: "device → host"}
"""From top to bottom of a panel."""

CURVE_COLOURS = ("#2f6fb0", "#d1603d", "#2a9d6f", "#8a5fb0", "#e0a100", "#5b6470")

MEMORY_COLOURS = {"the model's own": "#c9ced6", "optimizer state": "#2f6fb0", "a neighbour's": "#e0a100"}
"""From the bottom of a picture of memory upwards; what is free stays white."""


class MemorySample(NamedTuple):
    """Bytes of device memory in use from `time_s` on.

    own: by the model, its gradients and activations. state: by optimizer state, resident or in staging slots.
    neighbour: by another process.
    """

    time_s: float
    own: int
    state: int
    neighbour: int


STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "savefig.dpi": 150,
}
"""Of all pictures."""


def save_losses(losses: Mapping[str, Sequence[float]], path: Path, *, reference: str) -> None:
    """Losses by step: the curves, and below how far each is from the curve `reference`.

    Curves that coincide stay visible: the reference is a broad band, the others lie on it with markers at
    different steps.
    """
    others = [name for name in losses if name != reference]
    steps = range(1, len(losses[reference]) + 1)
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, sharex=True, figsize=(8, 5.6), height_ratios=(3, 1.2), layout="constrained"
        )
        above.plot(steps, losses[reference], color="#c9ced6", linewidth=7, label=reference, solid_capstyle="round")
        every = max(len(others), len(steps) // 12)
        for rank, name in enumerate(others):
            look = {
                "color": CURVE_COLOURS[rank % len(CURVE_COLOURS)],
                "marker": "osD^vP"[rank % 6],
                "markevery": (rank * every // len(others), every),
                "markersize": 5,
                "linewidth": 1,
            }
            above.plot(steps, losses[name], label=f"DOSAdam {name}", **look)
            gaps = [abs(a - b) for a, b in zip(losses[name], losses[reference], strict=True)]
            below.plot(steps, gaps, **look)
        above.set_ylabel("loss (nats per byte)")
        above.set_title("Training loss: all policies follow the same curve")
        above.legend()
        below.ticklabel_format(axis="y", scilimits=(-2, 2))
        below.set_ylim(bottom=0)
        below.set_ylabel(f"|loss − {reference}|")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
        figure.savefig(path)
        plt.close(figure)


def save_spread(curves: Mapping[str, Sequence[Sequence[float]]], path: Path, *, window: int = 50) -> None:
    """Losses by step of several runs each, as bands from the least to the greatest of means over `window` steps."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for rank, (name, runs) in enumerate(curves.items()):
            smooth = [_means(run, window) for run in runs]
            steps = [window * (i + 1) for i in range(len(smooth[0]))]
            colour = CURVE_COLOURS[rank % len(CURVE_COLOURS)]
            low, high = ([pick(values) for values in zip(*smooth, strict=True)] for pick in (min, max))
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            middle = [sum(values) / len(values) for values in zip(*smooth, strict=True)]
            axes.plot(steps, middle, color=colour, linewidth=1, label=name)
        axes.set_title(f"Training loss, mean over {window} steps; bands: from the least to the greatest of the seeds")
        axes.set_ylabel("loss (nats per byte)")
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
        axes.legend()
        figure.savefig(path)
        plt.close(figure)


def _means(values: Sequence[float], window: int) -> list[float]:
    return [sum(part) / len(part) for part in (values[i : i + window] for i in range(0, len(values), window))]


def save_timelines(timelines: Mapping[str, Timeline], path: Path, *, title: str = "") -> None:
    """Timelines under each other on one time axis: a panel for each, a track for each lane, a colour for each op."""
    end = max((span.end for timeline in timelines.values() for span in timeline.spans), default=0.0)
    scale, unit = (1e3, "ms") if end < 2 else (1.0, "s")
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(timelines),
            1,
            sharex=True,
            squeeze=False,
            figsize=(10, 0.8 + 1.55 * len(timelines)),
            layout="constrained",
        )
        for axes, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
            _draw(axes, timeline, scale, narrow_s=end / 300)
            total = max((span.end for span in timeline.spans), default=0.0) * scale
            axes.set_title(f"{name}: {total:.0f} ms" if unit == "ms" else f"{name}: {total:.1f} s")
        axes.set_xlim(0, end * scale * 1.01)
        axes.set_xlabel(f"time ({unit})")
        shown = {span.op for timeline in timelines.values() for span in timeline.spans}
        handles = [Patch(color=colour, label=OP_LABELS[op]) for op, colour in OP_COLOURS.items() if op in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(path)
        plt.close(figure)


def _draw(axes: Axes, timeline: Timeline, scale: float, narrow_s: float) -> None:
    """One panel: bars edged in white, to tell neighbours apart, unless they are too narrow for that."""
    for row, lane in enumerate(LANE_LABELS):
        spans = timeline.on(lane)
        axes.broken_barh(
            [(span.start * scale, span.duration * scale) for span in spans],
            (row - 0.38, 0.76),
            facecolors=[OP_COLOURS[span.op] for span in spans],
            edgecolors=[OP_COLOURS[span.op] if span.duration < narrow_s else "white" for span in spans],
            linewidth=0.5,
        )
    axes.set_yticks(range(len(LANE_LABELS)), LANE_LABELS.values())
    axes.set_ylim(len(LANE_LABELS) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)


def save_memory(
    samples: Sequence[MemorySample], capacity: int, changes: Sequence[float], path: Path, *, title: str = ""
) -> None:
    """Device memory over time, stacked, up to the capacity in bytes, each sample holding until the next.

    changes: when the plan changed, in seconds.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
        _draw_memory(axes, samples, capacity)
        axes.plot(changes, [capacity * _scale(capacity)[0] * 1.02] * len(changes), "v", color="#d1603d", clip_on=False)
        for change in changes:
            axes.axvline(change, color="#d1603d", linewidth=0.7, alpha=0.5)
        axes.set_xlabel("time (s)")
        handles = [Patch(color=colour, label=name) for name, colour in MEMORY_COLOURS.items()]
        handles.append(Patch(facecolor="white", edgecolor="#8d97a5", label="free"))
        marker = Line2D([], [], color="#d1603d", marker="v", linewidth=0.7, label="the plan changes")
        figure.legend(handles=[*handles, marker], loc="outside lower center", ncols=5, handlelength=1.2)
        axes.set_title(title, pad=14)
        figure.savefig(path)
        plt.close(figure)


def save_memory_and_lanes(
    panels: Mapping[str, tuple[Sequence[MemorySample], Timeline]], capacity: int, path: Path, *, title: str = ""
) -> None:
    """A column for each plan: memory over one iteration, and below what the lanes do, on the same time axis."""
    end = max((span.end for _, timeline in panels.values() for span in timeline.spans), default=0.0)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            2,
            len(panels),
            sharex=True,
            sharey="row",
            squeeze=False,
            figsize=(5.6 * len(panels), 5.2),
            height_ratios=(1.3, 1),
            layout="constrained",
        )
        for (above, below), (name, (samples, timeline)) in zip(grid.T, panels.items(), strict=True):
            _draw_memory(above, samples, capacity)
            above.set_title(name)
            _draw(below, timeline, 1.0, narrow_s=end / 300)
            below.set_xlim(0, end * 1.01)
            below.set_xlabel("time (s)")
        for axes in grid[:, 1:].flat:
            axes.set_ylabel("")
        shown = {span.op for _, timeline in panels.values() for span in timeline.spans}
        every = [sample for samples, _ in panels.values() for sample in samples]
        names = [name for part, name in enumerate(MEMORY_COLOURS, start=1) if any(sample[part] for sample in every)]
        handles = [Patch(color=MEMORY_COLOURS[name], label=name) for name in names]
        handles += [Patch(color=colour, label=OP_LABELS[op]) for op, colour in OP_COLOURS.items() if op in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.2)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(path)
        plt.close(figure)


def _draw_memory(axes: Axes, samples: Sequence[MemorySample], capacity: int) -> None:
    """One panel of memory: steps, stacked, each sample holding until the next."""
    scale, unit = _scale(capacity)
    times = [sample.time_s for sample in samples]
    base = [0.0] * len(samples)
    for part, colour in zip(("own", "state", "neighbour"), MEMORY_COLOURS.values(), strict=True):
        top = [below + getattr(sample, part) * scale for below, sample in zip(base, samples, strict=True)]
        axes.fill_between(times, base, top, step="post", color=colour, linewidth=0)
        base = top
    axes.axhline(capacity * scale, color="#5b6470", linewidth=1)
    axes.set_ylim(0, capacity * scale * 1.001)
    if times:
        axes.set_xlim(times[0], times[-1])
    axes.set_ylabel(f"device memory ({unit})")


def _scale(capacity: int) -> tuple[float, str]:
    return (1 / 2**30, "GiB") if capacity >= 2**30 else (1 / 2**20, "MiB")
