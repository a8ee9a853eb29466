"""Pictures: every operation and lane can be drawn, and what is drawn is where it belongs."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.colors import to_rgb

from experiments.plots import LANE_LABELS, OP_COLOURS, OP_LABELS, save_losses, save_timelines
from perfmodel import Lane, Op, Span, Timeline


def _pixels(path: Path, op: Op) -> int:
    """How many pixels of the picture above its legend have the colour of the operation."""
    picture = matplotlib.image.imread(path)[..., :3]
    above = picture[: len(picture) * 3 // 4]
    return int((np.abs(above - to_rgb(OP_COLOURS[op])) < 0.01).all(axis=2).sum())


def test_every_operation_and_lane_has_a_look_of_its_own() -> None:
    assert set(OP_COLOURS) == set(OP_LABELS) == set(Op)
    assert len(set(OP_COLOURS.values())) == len(set(OP_LABELS.values())) == len(Op)
    assert set(LANE_LABELS) == set(Lane)


def test_timelines_show_their_operations_in_proportion(tmp_path: Path) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 0.3), Span(Lane.H2D, Op.PREFETCH, 1, 0.3, 0.4)]
    path = tmp_path / "timeline.png"
    save_timelines({"one": Timeline.of(spans), "nothing": Timeline(())}, path, title="both")
    assert _pixels(path, Op.UPDATE) > 2 * _pixels(path, Op.PREFETCH) > 1000
    assert _pixels(path, Op.FLUSH) == 0


def test_very_short_operations_stay_visible(tmp_path: Path) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 1.0), Span(Lane.GPU, Op.FLUSH, 1, 0.5, 0.5001)]
    path = tmp_path / "timeline.png"
    save_timelines({"one": Timeline.of(spans)}, path)
    assert _pixels(path, Op.FLUSH) > 0


def test_losses_need_no_more_than_the_reference(tmp_path: Path) -> None:
    save_losses({"AdamW": [2.0, 1.0]}, tmp_path / "losses.png", reference="AdamW")
    assert (tmp_path / "losses.png").stat().st_size > 5_000
