"""Pictures of what the checks found: iteration times side by side, timelines, memory beside a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.checks.base import Record
from experiments.checks.report import CONTESTS
from experiments.plots import CURVE_COLOURS, MEMORY_COLOURS, can_draw, picture, save_timelines
from perfmodel import Lane, Op, Span, Timeline


def save_pictures(out: Path, records: Sequence[Record]) -> list[str]:
    """Draw all for which there are figures; what went wrong, a line each."""
    if not can_draw():
        return []
    found = {record.name: record.figures for record in records}
    problems = []

    def draw(path: str, picture: Callable[[Path], None]) -> None:
        try:
            picture(out / path)
        except Exception as error:  # a check that ended half way has left half of its figures
            problems.append(f"{path}: {type(error).__name__}: {error}")

    for name in CONTESTS:
        figures = found.get(name, {})
        if figures.get("contenders"):
            draw(f"comparison-{name}.png", lambda path, figures=figures: save_comparison(figures, path))  # type: ignore[misc]
        if figures.get("timelines"):
            draw(f"timeline-{name}.png", lambda path, figures=figures: save_updates(figures, path))  # type: ignore[misc]
    if found.get("memory", {}).get("beside_a_neighbour"):
        draw("memory.png", lambda path: save_memory(found["memory"], path))
    return problems


def save_comparison(figures: Mapping[str, Any], path: Path) -> None:
    """A bar for each contender: seconds of an iteration, and a tick for each round."""
    scores = {name: s for name, s in figures["contenders"].items() if s["iteration_s"] is not None}
    names = list(scores)
    with picture(path, figsize=(9, 1.2 + 0.36 * len(names))) as (_, axes):
        axes.barh(names, [scores[n]["iteration_s"] * 1e3 for n in names], color=[_colour(n) for n in names], height=0.7)
        for row, name in enumerate(names):
            times = [1e3 * seconds for turn in scores[name]["rounds_s"] for seconds in turn]
            axes.plot(times, [row] * len(times), "|", color="#1c2430", markersize=7)
        axes.invert_yaxis()
        axes.set_xlabel("iteration (ms): median, and each one measured")
        axes.set_title(f"{figures['machine']}, {figures['parameters'] / 1e6:,.1f}M parameters")


def save_updates(figures: Mapping[str, Any], path: Path) -> None:
    """The updates that were kept, under each other."""
    timelines = {
        name: Timeline.of(Span(Lane(lane), Op(op), i, start, end) for lane, op, i, start, end in kept["spans"])
        for name, kept in figures["timelines"].items()
    }
    save_timelines(timelines, path, title=f"Updates as measured, {figures['machine']}")


def save_memory(figures: Mapping[str, Any], path: Path) -> None:
    """What optimizer state and the neighbour held, iteration by iteration."""
    rows = figures["beside_a_neighbour"]
    model, state, neighbour = MEMORY_COLOURS.values()
    curves = {"neighbour": ("neighbour_bytes", neighbour), "optimizer state": ("held_bytes", state)}
    with picture(path, figsize=(8, 3.4)) as (_, axes):
        for label, (key, colour) in (curves | {"free": ("free_bytes", model)}).items():
            axes.step(range(1, len(rows) + 1), [r[key] / 2**20 for r in rows], where="mid", label=label, color=colour)
        axes.set(xlabel="iteration", ylabel="MiB of device memory")
        axes.legend()


def _colour(name: str) -> str:
    if name.startswith("adaptive"):
        return CURVE_COLOURS[0]
    return "#8d97a5" if name.startswith(("AdamW", "no optimizer")) else CURVE_COLOURS[1]
