"""Pictures: every operation and lane can be drawn, and what is drawn is where it belongs."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from torch import nn

from dos import DOSAdam
from experiments.memory_log import MemoryLog
from experiments.plots import (
    CURVE_COLOURS,
    LANE_LABELS,
    MEMORY_COLOURS,
    OP_COLOURS,
    OP_LABELS,
    MemorySample,
    save_losses,
    save_memory,
    save_memory_and_lanes,
    save_spread,
    save_timelines,
)
from perfmodel import Lane, Op, Span, Timeline


def _pixels(path: Path, colour: str) -> int:
    """How many pixels of the picture above its legend have the colour."""
    picture = matplotlib.image.imread(path)[..., :3]
    above = picture[: len(picture) * 3 // 4]
    return int((np.abs(above - to_rgb(colour)) < 0.01).all(axis=2).sum())


def test_every_operation_and_lane_has_a_look_of_its_own() -> None:
    assert set(OP_COLOURS) == set(OP_LABELS) == set(Op)
    assert len(set(OP_COLOURS.values())) == len(set(OP_LABELS.values())) == len(Op)
    assert set(LANE_LABELS) == set(Lane)
    together = [*OP_COLOURS.values(), *MEMORY_COLOURS.values()]
    assert len(set(together)) == len(together), "there are pictures of operations and memory"


def test_as_many_curves_as_formats_has_rows_differ(tmp_path: Path) -> None:
    assert len(set(CURVE_COLOURS)) == len(CURVE_COLOURS) >= 7
    with pytest.raises(ValueError, match="shorter"):
        save_spread({str(i): [[1.0] * 50] for i in range(len(CURVE_COLOURS) + 1)}, tmp_path / "spread.png")


def test_timelines_show_their_operations_in_proportion(tmp_path: Path) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 0.3), Span(Lane.H2D, Op.PREFETCH, 1, 0.3, 0.4)]
    path = tmp_path / "timeline.png"
    save_timelines({"one": Timeline.of(spans), "nothing": Timeline(())}, path, title="both")
    assert _pixels(path, OP_COLOURS[Op.UPDATE]) > 2 * _pixels(path, OP_COLOURS[Op.PREFETCH]) > 1000
    assert _pixels(path, OP_COLOURS[Op.FLUSH]) == 0


def test_very_short_operations_stay_visible(tmp_path: Path) -> None:
    spans = [Span(Lane.CPU, Op.UPDATE, 0, 0.0, 1.0), Span(Lane.GPU, Op.FLUSH, 1, 0.5, 0.5001)]
    path = tmp_path / "timeline.png"
    save_timelines({"one": Timeline.of(spans)}, path)
    assert _pixels(path, OP_COLOURS[Op.FLUSH]) > 0


def test_losses_need_no_more_than_the_reference(tmp_path: Path) -> None:
    save_losses({"AdamW": [2.0, 1.0]}, tmp_path / "losses.png", reference="AdamW")
    assert (tmp_path / "losses.png").stat().st_size > 5_000


def test_memory_is_shown_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    samples = [MemorySample(0.0, 40, 0, 0), MemorySample(1.0, 20, 20, 10), MemorySample(2.0, 20, 20, 10)]
    save_memory(samples, 100, [1.0], path, title="a change")
    own, state, neighbour = (_pixels(path, colour) for colour in MEMORY_COLOURS.values())
    assert own > 2 * state > 3.6 * neighbour > 3000
    assert state < 2.4 * neighbour
    assert _pixels(path, "#d1603d") > 20, "the change is marked"


def test_memory_beside_lanes(tmp_path: Path) -> None:
    path = tmp_path / "both.png"
    timeline = Timeline.of([Span(Lane.GPU, Op.BACKWARD, None, 0.0, 1.0), Span(Lane.H2D, Op.PREFETCH, 0, 1.0, 2.0)])
    samples = [MemorySample(0.0, 30, 30, 0), MemorySample(2.0, 30, 30, 0)]
    save_memory_and_lanes({"one": (samples, timeline), "nothing": ([], Timeline(()))}, 100, path)
    assert _pixels(path, MEMORY_COLOURS["optimizer state"]) > 3000
    assert _pixels(path, OP_COLOURS[Op.BACKWARD]) > 1000
    assert _pixels(path, MEMORY_COLOURS["a neighbour's"]) == 0


def test_a_log_of_memory_has_the_fullest_moment_of_each_iteration() -> None:
    """So that a picture of many iterations is not made of spikes."""
    used = itertools.chain([10, 30, 20], itertools.repeat(20))
    machine = SimpleNamespace(memory=lambda time_s, _: MemorySample(time_s, next(used), 5, 0))
    model = nn.Linear(2, 2)
    optimizer, log = DOSAdam(model.parameters()), MemoryLog()
    with log.sampling(machine, optimizer):  # type: ignore[arg-type]
        for _ in range(2):
            time.sleep(0.1)
            log.step_done(optimizer)
    assert [sample.own for sample in log.samples] == [30, 20, 20]
    assert [sample.time_s for sample in log.samples] == sorted(sample.time_s for sample in log.samples)
