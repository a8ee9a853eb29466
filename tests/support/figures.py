"""The line of JSON that an experiment ends with."""

from __future__ import annotations

import json
from typing import Any


def read_figures(out: str, status: int) -> Any:
    """Return what the last line of `out` has, and check what holds for every experiment.

    Seconds are above 0 or were not measured, bits are equal, and the exit status says whether a limit was missed.
    """
    found = json.loads(out.splitlines()[-1])
    rows = found if isinstance(found, list) else found.get("rows", [])
    for row in rows:
        seconds = {key: row[key] for key in row if key.endswith("_s") and not key.endswith("_per_s")}
        assert all(value is None or value > 0 for value in seconds.values()), row
        assert row.get("bits_equal", True) is True, row
    limits_missed = isinstance(found, dict) and bool(found.get("missed"))
    assert status == int(limits_missed)
    return found
