"""Pictures of losses, timelines and device memory, and what all pictures of experiments share.

matplotlib is imported when something is drawn: experiments run without it, and then draw nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from perfmodel import Lane, Op, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPS = {
    Op.FORWARD: ("forward", "#c9ced6"),
    Op.BACKWARD: ("backward", "#8d97a5"),
    Op.UPDATE: ("update", "#2f6fb0"),
    Op.GRADIENT: ("gradient to host", "#e0a100"),
    Op.PREFETCH: ("state to device", "#2a9d6f"),
    Op.PARAMETER: ("parameter to device", "#8bcbae"),
    Op.FLUSH: ("state to host", "#d1603d"),
    Op.SAVE: ("activations to host", "#8f5fae"),
    Op.RESTORE: ("activations to device", "#c3a6d8"),
    Op.WEIGHTS: ("weights to device", "#4fa8c9"),
    Op.READ: ("state from disk", "#6b7f3a"),
    Op.WRITE: ("state to disk", "#a8552f"),
}
"""Labels and colours: compute in grey, the update in blue, what goes up in greens, what comes down in warm colours."""

LANE_LABELS = {
    Lane.GPU: "device",
    Lane.CPU: "host CPU",
    Lane.H2D: "host → device",
    Lane.D2H: "device → host",
    Lane.READ: "disk → host",
    Lane.WRITE: "host → disk",
}
"""From top to bottom of a panel."""

CURVE_COLOURS = ("#2f6fb0", "#d1603d", "#2a9d6f", "#8a5fb0", "#e0a100", "#5b6470", "#c2549d", "#3aa6b9")

MEMORY_COLOURS = {"the model's own": "#dccfb8", "optimizer state": "#7b58a6", "a neighbour's": "#9c6b4f"}
"""From the bottom of a picture of memory upwards; what is free stays white. None is an operation's colour, because
there are pictures of both."""


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
}
"""Of all pictures."""

P = ParamSpec("P")


@functools.cache
def can_draw() -> bool:
    """Whether pictures can be drawn here; if not, what to install is said once."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("matplotlib is not installed, so no picture is drawn: pip install matplotlib", file=sys.stderr)
    return found


def drawn(save: Callable[P, None]) -> Callable[P, None]:
    """For functions that save a picture: they do nothing where none can be drawn."""

    @functools.wraps(save)
    def save_if_possible(*args: P.args, **kwargs: P.kwargs) -> None:
        if can_draw():
            save(*args, **kwargs)

    return save_if_possible


@contextmanager
def picture(path: Path, title: str = "", *, dpi: int = 150, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure in the style of all, and its axes as `plt.subplots` gives them; saved when the block ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(layout="constrained", **subplots)
        yield figure, axes
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)
        plt.close(figure)


def grid(axes: Axes, axis: Any = "both") -> None:
    """Faint lines behind what is drawn."""
    axes.grid(axis=axis, color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)


def swatches(colours: Mapping[str, str]) -> list[Any]:
    """Entries of a legend."""
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=name) for name, colour in colours.items()]


@drawn
def save_losses(losses: Mapping[str, Sequence[float]], path: Path, *, reference: str) -> None:
    """Losses by step: the curves, and below how far each is from the curve `reference`.

    Curves that coincide stay visible: the reference is a broad band, the others lie on it with markers at
    different steps.
    """
    others = [name for name in losses if name != reference]
    steps = range(1, len(losses[reference]) + 1)
    with picture(path, nrows=2, sharex=True, figsize=(8, 5.6), height_ratios=(3, 1.2)) as (_, (above, below)):
        above.plot(steps, losses[reference], color="#c9ced6", linewidth=7, label=reference, solid_capstyle="round")
        every = max(len(others), len(steps) // 12)
        for rank, name in enumerate(others):
            look = {
                "color": CURVE_COLOURS[rank % len(CURVE_COLOURS)],
                "marker": "osD^vPX"[rank % 7],
                "markevery": (rank * every // len(others), every),
                "markersize": 5,
                "linewidth": 1,
            }
            above.plot(steps, losses[name], label=f"DOSAdam {name}", **look)
            gaps = [abs(a - b) for a, b in zip(losses[name], losses[reference], strict=True)]
            below.plot(steps, gaps, **look)
        above.set(ylabel="loss (nats per byte)", title="Training loss: all policies follow the same curve")
        above.legend()
        below.ticklabel_format(axis="y", scilimits=(-2, 2))
        below.set_ylim(bottom=0)
        below.set(ylabel=f"|loss − {reference}|", xlabel="step")
        for axes in (above, below):
            grid(axes, "y")


@drawn
def save_spread(curves: Mapping[str, Sequence[Sequence[float]]], path: Path, *, window: int = 50) -> None:
    """Losses by step of several runs each, as bands from the least to the greatest of means over `window` steps."""
    with picture(path, figsize=(8, 4.5)) as (_, axes):
        for (name, runs), colour in zip(curves.items(), CURVE_COLOURS[: len(curves)], strict=True):
            smooth = [[fmean(run[i : i + window]) for i in range(0, len(run), window)] for run in runs]
            steps = [window * (i + 1) for i in range(len(smooth[0]))]
            low, high = ([pick(values) for values in zip(*smooth, strict=True)] for pick in (min, max))
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, list(map(fmean, zip(*smooth, strict=True))), color=colour, linewidth=1, label=name)
        axes.set_title(f"Training loss, mean over {window} steps; bands: from the least to the greatest of the seeds")
        axes.set(ylabel="loss (nats per byte)", xlabel="step")
        grid(axes, "y")
        axes.legend()


@drawn
def save_predictions(pairs: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, what: str, title: str) -> None:
    """Published and simulated figures by machine; on the line they are equal."""
    looks = {"h100": ("#2f6fb0", "o"), "a100_bound": ("#2a9d6f", "s"), "a100_unbound": ("#d1603d", "^")}
    with picture(path, figsize=(5.6, 4.6), dpi=100) as (_, panel):
        for name, of_machine in pairs.items():
            colour, marker = looks[name]
            published, simulated = zip(*of_machine, strict=True)
            panel.scatter(published, simulated, 30, colour, marker=marker, alpha=0.75, label=name, linewidths=0)
        both = [value for of_machine in pairs.values() for pair in of_machine for value in pair]
        line = [min(both), max(both)]
        panel.plot(line, line, color="#8d97a5", linewidth=1, zorder=0)
        panel.annotate("equal", (line[1], line[1]), textcoords="offset points", xytext=(-8, -14), color="#5b6470")
        panel.set(xlabel=f"published {what}", ylabel=f"simulated {what}", title=title)
        grid(panel)
        panel.legend()


@drawn
def save_timelines(timelines: Mapping[str, Timeline], path: Path, *, title: str = "") -> None:
    """Timelines under each other on one time axis: a panel for each, a track for each lane, a colour for each op."""
    end = _end(timelines.values())
    scale, unit = (1e3, "ms") if end < 2 else (1.0, "s")
    rows = len(timelines)
    with picture(path, title, nrows=rows, sharex=True, squeeze=False, figsize=(10, 0.8 + 1.55 * rows)) as (
        figure,
        panels,
    ):
        for axes, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
            _draw_lanes(axes, timeline, scale, narrow_s=end / 300)
            total = _end([timeline]) * scale
            axes.set_title(f"{name}: {total:.0f} ms" if unit == "ms" else f"{name}: {total:.1f} s")
        axes.set_xlim(0, end * scale * 1.01)
        axes.set_xlabel(f"time ({unit})")
        handles = swatches(_colours_of(timelines.values()))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)


def _end(timelines: Iterable[Timeline]) -> float:
    return max((span.end for timeline in timelines for span in timeline.spans), default=0.0)


def _colours_of(timelines: Iterable[Timeline]) -> dict[str, str]:
    """Of the operations in the timelines, by their labels."""
    shown = {span.op for timeline in timelines for span in timeline.spans}
    return {label: colour for op, (label, colour) in OPS.items() if op in shown}


def _draw_lanes(axes: Axes, timeline: Timeline, scale: float, narrow_s: float) -> None:
    """One panel: bars edged in white, to tell neighbours apart, unless they are too narrow for that."""
    labels = {lane: label for lane, label in LANE_LABELS.items() if lane in timeline.lanes}
    for row, lane in enumerate(labels):
        spans = timeline.on(lane)
        colours = [OPS[span.op][1] for span in spans]
        edges = zip(spans, colours, strict=True)
        axes.broken_barh(
            [(span.start * scale, span.duration * scale) for span in spans],
            (row - 0.38, 0.76),
            facecolors=colours,
            edgecolors=[colour if span.duration < narrow_s else "white" for span, colour in edges],
            linewidth=0.5,
        )
    axes.set_yticks(range(len(labels)), labels.values())
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    grid(axes, "x")


@drawn
def save_memory(
    samples: Sequence[MemorySample], capacity: int, changes: Sequence[float], path: Path, *, title: str = ""
) -> None:
    """Device memory over time, stacked, up to the capacity in bytes, each sample holding until the next.

    changes: when the plan changed, in seconds.
    """
    from matplotlib.lines import Line2D

    with picture(path, figsize=(10, 4.2)) as (figure, axes):
        _draw_memory(axes, samples, capacity)
        axes.plot(changes, [capacity * _scale(capacity)[0] * 1.02] * len(changes), "v", color="#d1603d", clip_on=False)
        for change in changes:
            axes.axvline(change, color="#d1603d", linewidth=0.7, alpha=0.5)
        axes.set_xlabel("time (s)")
        marker = Line2D([], [], color="#d1603d", marker="v", linewidth=0.7, label="the plan changes")
        handles = [*swatches(MEMORY_COLOURS), marker]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.2)
        axes.set_title(title, pad=14)


@drawn
def save_memory_and_lanes(
    panels: Mapping[str, tuple[Sequence[MemorySample], Timeline]], capacity: int, path: Path, *, title: str = ""
) -> None:
    """A column for each plan: memory over one iteration, and below what the lanes do, on the same time axis."""
    timelines = [timeline for _, timeline in panels.values()]
    end, columns = _end(timelines), len(panels)
    shape: dict[str, Any] = {"nrows": 2, "ncols": columns, "squeeze": False, "height_ratios": (1.3, 1)}
    with picture(path, title, sharex=True, sharey="row", figsize=(5.6 * columns, 5.2), **shape) as (figure, table):
        for (above, below), (name, (samples, timeline)) in zip(table.T, panels.items(), strict=True):
            _draw_memory(above, samples, capacity)
            above.set_title(name)
            _draw_lanes(below, timeline, 1.0, narrow_s=end / 300)
            below.set_xlim(0, end * 1.01)
            below.set_xlabel("time (s)")
        for axes in table[:, 1:].flat:
            axes.set_ylabel("")
        every = [sample for samples, _ in panels.values() for sample in samples]
        held = (name for part, name in enumerate(MEMORY_COLOURS, start=1) if any(sample[part] for sample in every))
        handles = swatches({name: MEMORY_COLOURS[name] for name in held} | _colours_of(timelines))
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.2)


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
