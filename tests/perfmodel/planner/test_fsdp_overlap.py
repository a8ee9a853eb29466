"""Forward and backward layer by layer: what is hidden behind compute, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planner.overlap import Pass, backward_s, forward_s

SECONDS = st.floats(0, 10, allow_subnormal=False)
PASSES = st.builds(Pass, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
LAYERS = st.integers(1, 40)


def test_in_forward_only_the_first_gather_is_seen() -> None:
    assert forward_s(Pass(compute=8, gather=4), 4) == pytest.approx(1 + 8)
    assert forward_s(Pass(compute=4, gather=8), 4) == pytest.approx(8 + 1), "or all but the last layer's compute"
    assert forward_s(Pass(compute=8, gather=4, up=4), 4) == pytest.approx(1 + 1 + 8)


def test_in_backward_the_first_gather_and_the_last_reduction() -> None:
    assert backward_s(Pass(compute=8, gather=2, reduce=4), 4) == pytest.approx(0.5 + 8 + 1)
    exchanged = backward_s(Pass(compute=4, gather=8, reduce=8), 4)
    assert exchanged == pytest.approx(16), "never waits for compute, gathers two layers before it reduces one"
    assert backward_s(Pass(compute=8, reduce=4, replicate=8, down=4), 4) == pytest.approx(2 + 1 + 8 + 1)


def test_in_backward_copy_and_gather_follow_each_other() -> None:
    """Written out: a layer's begin, a second of copying, one of gathering, the next layer's begin."""
    assert backward_s(Pass(compute=2, up=4, gather=4), 4) == pytest.approx(4 * (1 + 1) + 0.5)
    assert forward_s(Pass(compute=2, up=4, gather=4), 4) == pytest.approx(1 + 4 + 0.5), "in forward they overlap"


def test_a_layer_waits_for_its_update() -> None:
    assert forward_s(Pass(compute=4, up=4), 4, updated=40) == pytest.approx(40 + 1 + 1)
    assert forward_s(Pass(compute=40, up=4), 4, updated=4) == pytest.approx(1 + 1 + 40)


@given(PASSES, LAYERS)
def test_bounds(whole: Pass, layers: int) -> None:
    """Not less than any lane's own time, not more than one after the other."""
    forward = Pass(whole.compute, up=whole.up, gather=whole.gather)
    assert max(whole.compute, whole.up, whole.gather) <= forward_s(forward, layers) * (1 + 1e-9)
    assert forward_s(forward, layers) <= (whole.compute + whole.up + whole.gather) * (1 + 1e-9)
    ring = whole.gather + whole.reduce
    backward = backward_s(whole, layers)
    assert max(whole.compute, whole.up, ring, whole.replicate, whole.down) <= backward * (1 + 1e-9)
    together = whole.compute + whole.up + ring + whole.replicate + whole.down
    assert backward <= together * (1 + 1e-9)


@given(PASSES, LAYERS, st.sampled_from(Pass._fields), st.floats(0, 1, allow_subnormal=False))
def test_nothing_gets_slower_when_a_part_gets_faster(whole: Pass, layers: int, part: str, factor: float) -> None:
    faster = whole._replace(**{part: factor * getattr(whole, part)})
    assert forward_s(faster, layers) <= forward_s(whole, layers) * (1 + 1e-9)
    assert backward_s(faster, layers) <= backward_s(whole, layers) * (1 + 1e-9)
