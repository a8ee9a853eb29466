"""What a person at a terminal sees of pinning and of training, and what `logging` alone has elsewhere."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest

from dos.machine import terminal
from dos.machine.terminal import Pinning, tell

GIB = 1 << 30


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    found = Screen()
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stderr=found))  # capturing replaces sys.stderr itself
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


def pin(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """96 GiB in 16 parts that take so long together."""
    now = [0.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with Pinning(96 * GIB) as pinning:
        for part in range(16):
            pinning.at(6 * part * GIB)
            now[0] += seconds / 16


def test_a_bar_says_how_much_is_pinned_and_left_and_goes(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(32.0, monkeypatch)
    drawn = screen.getvalue().split("\r")
    assert any(line.startswith("pinning 48 of 96 GiB, 16 s left [############....") for line in drawn)
    assert all(len(line) < 80 for line in drawn)
    assert not "".join(drawn[-2:]).strip(), "the bar is removed"


@pytest.mark.parametrize("rank", [None, "1"])
def test_short_work_and_other_ranks_draw_nothing(
    rank: str | None, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    pin(0.9 if rank is None else 32.0, monkeypatch)
    assert screen.getvalue() == ""


def test_without_a_terminal_the_log_alone_has_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, terminal.logger.name):
        pin(32.0, monkeypatch)
        tell(lambda: "one line")
    assert caplog.messages[2] == "pinning host memory, once: 54 of 96 GiB, 14 s left"
    assert caplog.messages[-1] == "one line"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "shown"), [(logging.WARNING, "one line\n"), (logging.INFO, "")])
def test_a_terminal_shows_a_line_that_logging_would_not(level: int, shown: str, screen: Screen) -> None:
    before = terminal.logger.level
    terminal.logger.setLevel(level)
    try:
        tell(lambda: "one line")
    finally:
        terminal.logger.setLevel(before)
    assert screen.getvalue() == shown
