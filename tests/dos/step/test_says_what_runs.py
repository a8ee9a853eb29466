"""What the ledger says of itself while work is in flight, and what DOS_DEBUG=1 logs."""

from __future__ import annotations

import logging

import pytest

from dos import DOSAdam
from dos.step import ledger as ledger_module
from dos.step import transit
from tests.support.inside import session_of
from tests.support.training import backward, mlp, on, train


def test_the_ledger_says_what_is_in_flight() -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), **on("cpu"))
    optimizer.attach(model)
    ledger = session_of(optimizer).ledger
    assert repr(ledger) == "<Ledger, IDLE: no step>"
    train(model, optimizer, 2)
    optimizer.synchronize()
    backward(model, 2)
    count = len(session_of(optimizer).registry.accelerated)
    said = repr(ledger)
    assert said.startswith("<Ledger, BACKWARD: no step; ")
    assert said.count("<Transit ") == said.count("gradient, device to host") == count
    optimizer.step()
    said = repr(ledger)
    assert f"step 3: <Step: issued {count} update" in said
    assert f"of {count} turns" in said
    optimizer.synchronize()
    assert repr(ledger) == "<Ledger, IDLE: no step>"


def test_issues_and_waits_are_logged_if_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), **on("cpu"))
    with caplog.at_level(logging.DEBUG, logger="dos.debug"):
        train(model, optimizer, 2)
        assert not caplog.messages
        for module in (ledger_module, transit):
            monkeypatch.setattr(module, "DEBUG", True)
        backward(model, 2)
        optimizer.step()
        optimizer.synchronize()
    assert sum(line.startswith("issued: <Step: issued") for line in caplog.messages) == 1
    assert any(line.startswith("issued: <Transit") for line in caplog.messages)
    assert any(line.startswith("waits: <Ledger") for line in caplog.messages)
