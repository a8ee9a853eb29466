"""`python -m dos.report`: what it says, and what it must not."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import report


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert report.main(arguments) == 0
    return capsys.readouterr().out


def test_it_has_what_a_reader_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(printed(capsys, "--json"))
    assert found["packages"]["torch"] == torch.__version__
    assert found["cores_usable"] >= 1
    assert 0 < found["available_bytes"] <= found["host_memory_bytes"]
    assert (found["gpu"] is None) == (not torch.cuda.is_available())
    text = printed(capsys)
    lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    assert set(lines) == {name.removesuffix("_bytes").replace("_", " ") for name in found} - {"explain"}
    assert f"torch {torch.__version__}" in lines["packages"]
    assert lines["host memory"].endswith("GiB")


@pytest.mark.parametrize(
    ("release", "expected"), [("5.15.153.1-microsoft-standard-WSL2", "yes"), ("6.8.0-45-generic", "no")]
)
def test_it_says_whether_this_is_wsl(release: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert report.host_facts()["wsl"] == expected


def test_it_names_no_host_user_or_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "a-certain-user")
    monkeypatch.setattr(platform, "node", lambda: "a-certain-host")
    text = printed(capsys)
    assert getpass.getuser() == "a-certain-user"
    assert not any(name in text for name in ("a-certain-user", "a-certain-host", str(Path.home()), str(Path.cwd())))


def test_explain_of_a_run_is_pasted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "explained").write_text("Plan: a plan\n")
    assert printed(capsys, "--explain", str(tmp_path / "explained")).endswith("```\n\n```\nPlan: a plan\n```\n")
    with pytest.raises(SystemExit) as error:
        report.main(["--explain", str(tmp_path / "missing")])
    assert error.value.code == 2
    assert "No such file" in capsys.readouterr().err


def test_bytes_are_in_units_that_are_read_easily() -> None:
    found = {"large_bytes": 3 << 29, "small_bytes": 8 << 20, "none_bytes": None, "parts": {"a": 1, "b": None}}
    expected = "large: 1.50 GiB\nsmall: 8 MiB\nnone: not known or none\nparts: a 1\nlist: x; y"
    assert report.as_text(found | {"list": ["x", "y"]}) == expected
