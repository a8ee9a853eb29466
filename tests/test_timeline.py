"""Timelines: order, sums and the Chrome trace."""

import json
from pathlib import Path

import pytest

from perfmodel import Lane, Op, Span, Timeline

UPDATE = Span(Lane.CPU, Op.UPDATE, 1, 1.0, 3.0)
FORWARD = Span(Lane.GPU, Op.FORWARD, None, 0.5, 1.5)


def test_spans_are_sorted_and_summed() -> None:
    timeline = Timeline.of([UPDATE, FORWARD])
    assert timeline.spans == (FORWARD, UPDATE)
    assert timeline.makespan == pytest.approx(2.5)
    assert (timeline.busy(Lane.CPU), timeline.busy(Lane.H2D)) == (2.0, 0.0)
    assert timeline.on(Lane.GPU) == (FORWARD,)
    assert [s.name for s in timeline.spans] == ["forward", "update 1"]
    assert Timeline.of([]).makespan == 0.0


def test_a_lane_that_two_streams_share_is_busy_once() -> None:
    """On a GPU the spans of two copies on one link overlap."""
    spans = [
        Span(Lane.D2H, Op.GRADIENT, 0, 0.0, 4.0),
        Span(Lane.D2H, Op.FLUSH, 1, 1.0, 2.0),
        Span(Lane.D2H, Op.FLUSH, 2, 3.0, 5.0),
        Span(Lane.D2H, Op.FLUSH, 3, 7.0, 8.0),
        Span(Lane.H2D, Op.PREFETCH, 4, 0.0, 8.0),
    ]
    assert Timeline.of(spans).busy(Lane.D2H) == pytest.approx(6.0)


def test_chrome_trace(tmp_path: Path) -> None:
    Timeline.of([UPDATE]).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["CPU", "GPU", "H2D", "D2H"]
    (update,) = [e for e in events if e["ph"] == "X"]
    assert (update["name"], update["tid"], update["ts"], update["dur"]) == ("update 1", 0, 1e6, 2e6)


def test_arrows_follow_each_subgroup_from_lane_to_lane() -> None:
    way = [
        Span(Lane.H2D, Op.PREFETCH, 3, 0.0, 1.0),
        Span(Lane.H2D, Op.PREFETCH, 4, 1.0, 2.0),
        Span(Lane.GPU, Op.UPDATE, 3, 1.0, 1.5),
        Span(Lane.D2H, Op.FLUSH, 3, 1.5, 2.5),
    ]
    events = Timeline.of(way).chrome_trace()["traceEvents"]
    assert isinstance(events, list)
    arrows = [(e["ph"], e["id"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", 0, 2, 0.5e6), ("f", 0, 1, 1.25e6), ("s", 1, 1, 1.25e6), ("f", 1, 3, 2e6)]
