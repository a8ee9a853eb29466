"""The planner's command line, asked in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perfmodel.planner.main import main


def refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    """It is said in one line what is wrong with the arguments."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m perfmodel: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out, parse_constant=refuse)
