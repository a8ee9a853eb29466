"""Calibration here takes a moment, by a process that no launcher has started, and is kept in the test's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dos.calibration import command
from tests.support.calibration import TINY


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are kept: nothing is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "QUICK", TINY)
    return tmp_path / "cache" / "deep-optimizer-states"
