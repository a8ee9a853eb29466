"""Tests that compare with a clock: tried again, and skipped on a busy machine with what they needed and found."""

from __future__ import annotations

from typing import NoReturn

import pytest

from tests.support import ROOT, clock


@pytest.mark.parametrize(("busy", "outcome"), [("", AssertionError), ("9 want its cores", pytest.skip.Exception)])
def test_a_comparison_that_always_fails_is_tried_three_times(
    busy: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "why_busy", lambda: busy)
    tries = []

    @clock.compares_with_a_clock
    def compare() -> NoReturn:
        tries.append(1)
        raise AssertionError("needed 1 s, found 2 s")

    with pytest.raises(outcome, match=f"{busy}.*needed 1 s, found 2 s"):
        compare()
    assert len(tries) == 3


def test_a_comparison_that_succeeds_at_last_passes() -> None:
    found = iter([2.0, 3.0, 1.0])

    @clock.compares_with_a_clock
    def compare() -> None:
        assert next(found) == 1.0

    compare()


def test_every_test_with_the_marker_asks_whether_the_clock_can_be_trusted() -> None:
    marked = {path for path in (ROOT / "tests").rglob("*.py") if "mark." + "clock" in path.read_text()}
    assert marked == {ROOT / "tests/support/clock.py"}
