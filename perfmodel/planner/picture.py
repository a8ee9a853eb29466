"""The planner's answer as a picture: memory, times by policy, and what memory buys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice, adaptive_outcome
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
_BLUE, _GREY, _AMBER, _GREEN, _RED = "#2f6fb0", "#8d97a5", "#e0a100", "#2a9d6f", "#d1603d"


def save(advice: Advice, path: str | Path) -> None:
    """Write the picture. Raises OSError if the file cannot be written, ValueError for an unknown kind of file."""
    question = advice.situation.question
    with plt.rc_context(_STYLE):
        figure, (memory, times, slope) = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
        try:
            _draw_memory(memory, advice)
            _draw_times(times, advice)
            _draw_slope(slope, advice)
            figure.suptitle(
                f"{format_count(question.model.numel)} parameters, {question.dtype}, {question.ranks} x "
                f"{format_bytes(question.device_bytes)}, {advice.situation.profile.name} (simulated)",
                x=0.01,
                ha="left",
                fontweight="bold",
            )
            figure.savefig(path)
        finally:
            plt.close(figure)


def _draw_memory(axes: Axes, advice: Advice) -> None:
    """What is on the device when backward begins and when it ends."""
    situation, device = advice.situation, advice.situation.device
    resident = 0
    if advice.best.plan is not None:
        loads = situation.update_workload.subgroups
        resident = sum(loads[i].state_bytes for i in advice.best.plan.served(Placement.GPU_RESIDENT))
    parts = {
        "CUDA, fragmentation": (device.reserved, device.reserved, "#c9ced6"),
        "weights": (device.weights, device.weights, _GREY),
        "activations": (device.activations, device.block, _AMBER),
        "logits and their loss": (device.logits, 0, "#c97bb0"),
        "gradients": (device.gradients if situation.question.accumulation else 0, device.gradients, _RED),
        "resident state": (resident, resident, _BLUE),
    }
    if device.gathered:
        parts["weights gathered"] = (device.gathered, device.gathered, _GREEN)
    bottoms = [0.0, 0.0]
    for label, (begin, end, colour) in parts.items():
        sizes = [begin / GIB, end / GIB]
        axes.bar(["backward begins", "backward ends"], sizes, bottom=bottoms, color=colour, label=label, width=0.6)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.axhline(situation.question.device_bytes / GIB, color="black", linewidth=1, linestyle="--")
    axes.set_ylabel("GPU memory (GiB)")
    axes.set_title("GPU memory; dashed: what there is")
    _legend(axes, columns=3)


def _draw_times(axes: Axes, advice: Advice) -> None:
    """Iteration by policy, or the update if that is all that is known."""
    compute_s = advice.situation.compute_s or 0.0
    fitting = [outcome for outcome in advice.outcomes if outcome.fits][::-1]
    names = [outcome.policy for outcome in fitting]
    axes.barh(names, [compute_s] * len(fitting), color="#c9ced6", label="forward and backward")
    rest = [max(0.0, outcome.seconds - compute_s) for outcome in fitting]
    axes.barh(names, rest, left=compute_s, color=_BLUE, label="optimizer, exposed")
    axes.set_xlabel(f"{_kind(advice)} (s)")
    axes.set_title("Expected times")
    if fitting:
        _legend(axes, columns=2)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "does not fit", ha="center", transform=axes.transAxes)


def _draw_slope(axes: Axes, advice: Advice) -> None:
    """The adaptive policy by device memory, from nothing to spare to all state resident."""
    question = advice.situation.question
    low = advice.situation.peak
    high = advice.all_resident_bytes or 2 * low
    sizes = [int(low + (1.05 * high - low) * i / (POINTS - 1)) for i in range(POINTS)]
    outcomes = [adaptive_outcome(Situation(dataclasses.replace(question, device_bytes=size))) for size in sizes]
    points = [(size / GIB, outcome.seconds) for size, outcome in zip(sizes, outcomes, strict=True) if outcome.fits]
    if points:
        axes.plot(*zip(*points, strict=True), color=_BLUE, marker=".", label="adaptive")
        axes.set_ylim(bottom=0)
    for outcome, colour in zip(advice.outcomes[1:-1], (_GREY, _AMBER, _GREEN), strict=False):
        if outcome.fits:
            axes.axhline(outcome.seconds, color=colour, linewidth=1, linestyle=":", label=f"{outcome.policy}, as it is")
    axes.axvline(question.device_bytes / GIB, color="black", linewidth=1, linestyle="--")
    axes.set_xlabel("GPU memory (GiB)")
    axes.set_ylabel(f"{_kind(advice)} (s)")
    axes.set_title("What memory buys; dashed: what there is")
    if points:
        _legend(axes, columns=2)


def _kind(advice: Advice) -> str:
    """What is timed."""
    return "update" if advice.situation.compute_s is None else "iteration"


def _legend(axes: Axes, columns: int) -> None:
    """Below the axes, where it covers nothing."""
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)
