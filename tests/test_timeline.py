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


def test_chrome_trace(tmp_path: Path) -> None:
    Timeline.of([UPDATE]).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["CPU", "GPU", "H2D", "D2H"]
    (update,) = [e for e in events if e["ph"] == "X"]
    assert (update["name"], update["tid"], update["ts"], update["dur"]) == ("update 1", 0, 1e6, 2e6)
