"""examples/demo.ipynb runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "demo.ipynb"


@pytest.fixture
def code() -> list[dict[str, Any]]:
    """The cells with code."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_runs_from_top_to_bottom(code: list[dict[str, Any]], tmp_path: Path) -> None:
    """Its cells are one program; Jupyter runs them in one namespace, too."""
    program = tmp_path / "demo.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in code))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All have the same bits." in done.stdout
    assert "The same bits again." in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_it_has_no_outputs(code: list[dict[str, Any]]) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
