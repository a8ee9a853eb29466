"""Timelines: order, sums and the Chrome trace."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

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


def saved(timeline: Timeline, path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The names of a saved trace's tracks, and its slices."""
    timeline.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["Deep Optimizer States"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return names, [e for e in events if e["ph"] == "X"]


def test_chrome_trace(tmp_path: Path) -> None:
    names, (forward, update) = saved(Timeline.of([FORWARD, UPDATE]), tmp_path / "trace.json")
    assert list(names.values()) == ["CPU", "GPU", "H2D", "D2H"]
    assert (forward["name"], forward["tid"], forward["ts"], forward["dur"]) == ("forward", 1, 0.0, 1e6)
    assert (update["name"], update["tid"], update["ts"], update["dur"]) == ("update 1", 0, 0.5e6, 2e6)


def test_a_trace_starts_at_0_with_the_forward_before_it(tmp_path: Path) -> None:
    """A viewer drops spans before 0."""
    early = [Span(Lane.D2H, Op.GRADIENT, 1, -1.0, -0.5), UPDATE]
    assert Timeline.of(early).chrome_trace()["traceEvents"][5]["ts"] == 0  # type: ignore[index]
    around = (Span(Lane.GPU, Op.FORWARD, None, -3.0, -2.0), Span(Lane.GPU, Op.BACKWARD, None, -2.0, 0.0))
    timeline = dataclasses.replace(Timeline.of(early), beside=around)
    names, slices = saved(timeline, tmp_path / "trace.json")
    assert [(e["name"], names[e["tid"]], e["ts"]) for e in slices] == [
        ("forward", "forward, backward", 0.0),
        ("backward", "forward, backward", 1e6),
        ("gradient 1", "D2H", 2e6),
        ("update 1", "CPU", 4e6),
    ]
    arrows = [e["ts"] for e in timeline.chrome_trace()["traceEvents"] if e["ph"] in "sf"]  # type: ignore[attr-defined]
    assert arrows == [2.25e6, 5e6]
    assert (timeline.makespan, timeline.busy(Lane.GPU)) == (4.0, 0.0), "what runs beside is counted nowhere"


def test_slices_of_one_track_do_not_overlap(tmp_path: Path) -> None:
    spans = [Span(Lane.H2D, Op.PREFETCH, i, 0.4 * i, 0.4 * i + 1.0) for i in range(6)]
    names, slices = saved(Timeline.of(spans), tmp_path / "trace.json")
    assert {names[e["tid"]] for e in slices} == {"H2D"}
    for track in names:
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert Timeline.of([]).chrome_trace()["traceEvents"]


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
