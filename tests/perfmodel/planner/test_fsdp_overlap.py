"""Forward and backward layer by layer: transfers that hide behind compute, and those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planner.overlap import Pass, backward_s, forward_s

SECONDS = st.floats(0, 10, allow_subnormal=False)
PASSES = st.builds(Pass, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
LAYERS = st.integers(1, 40)


@pytest.mark.parametrize(
    ("whole", "updated", "seconds"),
    [
        (Pass(compute=8, gather=4), 0, 1 + 8),  # only the first gather is seen,
        (Pass(compute=4, gather=8), 0, 8 + 1),  # or all but the last layer's compute
        (Pass(compute=8, gather=4, up=4), 0, 1 + 1 + 8),
        (Pass(compute=2, up=4, gather=4), 0, 1 + 4 + 0.5),  # copies and gathers overlap
        (Pass(compute=4, up=4), 40, 40 + 1 + 1),  # a layer waits for its update
        (Pass(compute=40, up=4), 4, 1 + 1 + 40),
    ],
)
def test_forward_of_four_layers(whole: Pass, updated: float, seconds: float) -> None:
    assert forward_s(whole, 4, updated) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("whole", "seconds"),
    [
        (Pass(compute=8, gather=2, reduce=4), 0.5 + 8 + 1),  # the first gather and the last reduction are seen
        (Pass(compute=4, gather=8, reduce=8), 16),  # never waits for compute, gathers two layers before it reduces one
        (Pass(compute=8, reduce=4, down=4), 8 + 1 + 1),
        # Copy and gather follow each other: a layer's begin, a second of copying, one of gathering, the next begin.
        (Pass(compute=2, up=4, gather=4), 4 * (1 + 1) + 0.5),
    ],
)
def test_backward_of_four_layers(whole: Pass, seconds: float) -> None:
    assert backward_s(whole, 4) == pytest.approx(seconds)


@given(PASSES, LAYERS)
def test_bounds(whole: Pass, layers: int) -> None:
    """Not less than any lane's own time, not more than one after the other."""
    forward = Pass(whole.compute, up=whole.up, gather=whole.gather)
    assert max(whole.compute, whole.up, whole.gather) <= forward_s(forward, layers) * (1 + 1e-9)
    assert forward_s(forward, layers) <= (whole.compute + whole.up + whole.gather) * (1 + 1e-9)
    ring = whole.gather + whole.reduce
    backward = backward_s(whole, layers)
    assert max(whole.compute, whole.up, ring, whole.down) <= backward * (1 + 1e-9)
    together = whole.compute + whole.up + ring + whole.down
    assert backward <= together * (1 + 1e-9)


@given(PASSES, LAYERS, st.sampled_from(Pass._fields), st.floats(0, 1, allow_subnormal=False))
def test_nothing_gets_slower_when_a_part_gets_faster(whole: Pass, layers: int, part: str, factor: float) -> None:
    faster = whole._replace(**{part: factor * getattr(whole, part)})
    assert forward_s(faster, layers) <= forward_s(whole, layers) * (1 + 1e-9)
    assert backward_s(faster, layers) <= backward_s(whole, layers) * (1 + 1e-9)
