"""The planner's answer as a picture: memory, times by policy, and times by memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perfmodel.planner.answer import Answer
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_bytes, format_count

GIB = 2**30
POINTS = 24
"""Sizes of device memory for which the adaptive policy is planned."""
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "savefig.dpi": 150,
}
_BLUE, _GREY, _AMBER, _GREEN, _RED, _PALE, _PINK = (
    *("#2f6fb0", "#8d97a5", "#e0a100", "#2a9d6f"),
    *("#d1603d", "#c9ced6", "#c97bb0"),
)


def save(answer: Answer, path: str | Path) -> None:
    """Write the picture. Raises OSError if the file cannot be written, ValueError for an unknown kind of file."""
    question = answer.question
    with plt.rc_context(_STYLE):
        figure, (memory, times, slope) = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
        try:
            _draw_memory(memory, answer)
            _draw_times(times, answer)
            _draw_slope(slope, answer)
            figure.suptitle(
                f"{format_count(question.model.numel)} parameters, {question.dtype}, {question.ranks} x "
                f"{format_bytes(question.device_bytes)}, {question.profile.name} (simulated)",
                x=0.01,
                ha="left",
                fontweight="bold",
            )
            figure.savefig(path)
        finally:
            plt.close(figure)


def _draw_memory(axes: Axes, answer: Answer) -> None:
    """Draw the device's memory when backward begins and when it ends."""
    device, resident = answer.situation.device, answer.resident_state
    bottoms = [0.0, 0.0]
    for label, begins, ends, colour in (
        ("CUDA, fragmentation", device.reserved, device.reserved, _PALE),
        ("weights", device.weights + answer.staying, device.weights + answer.staying, _GREY),
        ("activations", device.activations, device.block, _AMBER),
        ("logits and their loss", device.logits, 0, _PINK),
        ("gradients", device.gradients * answer.question.accumulation, device.gradients, _RED),
        ("resident state", resident, resident, _BLUE),
        ("weights gathered", device.gathered, device.gathered, _GREEN),
    ):
        sizes = [begins / GIB, ends / GIB]
        axes.bar(["backward begins", "backward ends"], sizes, bottom=bottoms, color=colour, label=label, width=0.6)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.axhline(answer.question.device_bytes / GIB, color="black", linewidth=1, linestyle="--")
    axes.set(ylabel="GPU memory (GiB)", title="GPU memory; dashed: what there is")
    _legend(axes, columns=3)


def _draw_times(axes: Axes, answer: Answer) -> None:
    """Iteration by policy."""
    times = {row.policy: row.seconds for row in answer.policies[::-1] if row.fits}
    compute_s = answer.situation.compute_s
    axes.barh([*times], compute_s, color=_PALE, label="forward and backward")
    exposed = [max(0.0, seconds - compute_s) for seconds in times.values()]
    axes.barh([*times], exposed, left=compute_s, color=_BLUE, label="optimizer, exposed")
    axes.set(xlabel="iteration (s)", title="Expected times")
    if times:
        _legend(axes, columns=2)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "does not fit", ha="center", transform=axes.transAxes)


def _draw_slope(axes: Axes, answer: Answer) -> None:
    """The adaptive policy by device memory, from nothing to spare to all state resident."""
    question, low = answer.question, answer.situation.peak
    high = answer.all_resident or 2 * low
    sizes = [int(low + (1.05 * high - low) * i / (POINTS - 1)) for i in range(POINTS)]
    outcomes = [adaptive_outcome(Situation(question.replace(device_bytes=size))) for size in sizes]
    points = [(size / GIB, outcome.seconds) for size, outcome in zip(sizes, outcomes, strict=True) if outcome.fits]
    if points:
        axes.plot(*zip(*points, strict=True), color=_BLUE, marker=".", label="adaptive")
        axes.set_ylim(bottom=0)
    for row, colour in zip(answer.policies[1:-1], (_GREY, _AMBER, _GREEN), strict=False):
        if row.fits:
            label = f"{row.policy}, as it is"
            axes.axhline(row.seconds, color=colour, linewidth=1, linestyle=":", label=label)
    axes.axvline(question.device_bytes / GIB, color="black", linewidth=1, linestyle="--")
    axes.set(xlabel="GPU memory (GiB)", ylabel="iteration (s)", title="What memory buys; dashed: what there is")
    if points:
        _legend(axes, columns=2)


def _legend(axes: Axes, columns: int) -> None:
    """Add a legend below the axes, where it covers nothing."""
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)
