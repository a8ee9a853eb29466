"""Pictures: every operation and lane can be drawn, and what is drawn is where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.plots import (
    CURVE_COLOURS,
    LANE_LABELS,
    MEMORY_COLOURS,
    OPS,
    MemorySample,
    save_memory,
    save_memory_and_lanes,
    save_spread,
    save_timelines,
)
from perfmodel import Lane, Op, Span, Timeline


def test_every_operation_and_lane_has_a_look_of_its_own() -> None:
    assert set(OPS) == set(Op)
    labels, colours = zip(*OPS.values(), strict=True)
    assert len(set(colours)) == len(set(labels)) == len(Op)
    assert set(LANE_LABELS) == set(Lane)
    together = [*colours, *MEMORY_COLOURS.values()]
    assert len(set(together)) == len(together), "there are pictures of operations and memory"


def test_as_many_curves_as_formats_has_rows_differ(tmp_path: Path) -> None:
    assert len(set(CURVE_COLOURS)) == len(CURVE_COLOURS) >= 7
    with pytest.raises(ValueError, match="shorter"):
        save_spread({str(i): [[1.0] * 50] for i in range(len(CURVE_COLOURS) + 1)}, tmp_path / "spread.png")


def test_pictures_of_lanes_and_memory_are_drawn_and_of_nothing_too(tmp_path: Path) -> None:
    timeline = Timeline.of([Span(Lane.GPU, Op.BACKWARD, None, 0.0, 1.0), Span(Lane.H2D, Op.PREFETCH, 0, 1.0, 2.0)])
    samples = [MemorySample(0.0, 40, 0, 0), MemorySample(1.0, 20, 20, 10), MemorySample(2.0, 20, 20, 10)]
    save_timelines({"one": timeline, "nothing": Timeline(())}, tmp_path / "timeline.png", title="both")
    save_memory(samples, 100, [1.0], tmp_path / "memory.png", title="a change")
    save_memory_and_lanes({"one": (samples, timeline), "nothing": ([], Timeline(()))}, 100, tmp_path / "both.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5_000 for name in ("timeline", "memory", "both"))
