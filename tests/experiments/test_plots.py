"""Pictures: every operation and lane can be drawn, and what is drawn is where it belongs."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

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


class Drawn(NamedTuple):
    """What pictures show, by colour: areas in the units of their axes, and the colours of edges and markers."""

    areas: Counter[str]
    edges: set[str]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Of all pictures that the test saves."""
    found, savefig = Drawn(Counter(), set()), Figure.savefig

    def save(figure: Figure, *args: Any, **settings: Any) -> None:
        for axes in figure.axes:
            found.edges.update(to_hex(line.get_color()) for line in axes.lines if len(line.get_xdata()))
            for collection in axes.collections:
                colours = [to_hex(colour) for colour in collection.get_facecolor()]
                found.edges.update(to_hex(colour) for colour in collection.get_edgecolor())
                for path, colour in zip(collection.get_paths(), itertools.cycle(colours)):
                    x, y = path.vertices.T
                    found.areas[colour] += abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2
        savefig(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", save)
    return found


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


def test_timelines_show_their_operations_in_proportion(tmp_path: Path, drawn: Drawn) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 0.3), Span(Lane.H2D, Op.PREFETCH, 1, 0.3, 0.4)]
    save_timelines({"one": Timeline.of(spans), "nothing": Timeline(())}, tmp_path / "timeline.png", title="both")
    update, prefetch = (drawn.areas.pop(OPS[op][1]) for op in (Op.UPDATE, Op.PREFETCH))
    assert update == pytest.approx(3 * prefetch)
    assert not drawn.areas
    assert drawn.edges == {"#ffffff"}


def test_very_short_operations_stay_visible(tmp_path: Path, drawn: Drawn) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 1.0), Span(Lane.GPU, Op.FLUSH, 1, 0.5, 0.5001)]
    save_timelines({"one": Timeline.of(spans)}, tmp_path / "timeline.png")
    assert drawn.edges == {"#ffffff", OPS[Op.FLUSH][1]}


def test_memory_is_shown_in_proportion(tmp_path: Path, drawn: Drawn) -> None:
    samples = [MemorySample(0.0, 40, 0, 0), MemorySample(1.0, 20, 20, 10), MemorySample(2.0, 20, 20, 10)]
    save_memory(samples, 100, [1.0], tmp_path / "memory.png", title="a change")
    own, state, neighbour = (drawn.areas[colour] for colour in MEMORY_COLOURS.values())
    assert (own, state) == pytest.approx((6 * neighbour, 2 * neighbour))
    assert "#d1603d" in drawn.edges, "the change is marked"


def test_memory_beside_lanes(tmp_path: Path, drawn: Drawn) -> None:
    timeline = Timeline.of([Span(Lane.GPU, Op.BACKWARD, None, 0.0, 1.0), Span(Lane.H2D, Op.PREFETCH, 0, 1.0, 2.0)])
    samples = [MemorySample(0.0, 30, 30, 0), MemorySample(2.0, 30, 30, 0)]
    save_memory_and_lanes({"one": (samples, timeline), "nothing": ([], Timeline(()))}, 100, tmp_path / "both.png")
    own, state, _ = MEMORY_COLOURS.values()
    shown = {own, state, OPS[Op.BACKWARD][1], OPS[Op.PREFETCH][1]}
    assert {colour for colour, area in drawn.areas.items() if area} == shown
