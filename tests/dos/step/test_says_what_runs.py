"""What the ledger says of itself while work is in flight, and what DOS_DEBUG=1 logs."""

from __future__ import annotations

import logging

import pytest

from dos import DOSAdam
from dos.step import ledger as ledger_module
from dos.step import transit
from dos.weights.stream import stream_of
from tests.support.blocks import loss, net, start
from tests.support.blocks import train as train_blocks
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


def test_weights_say_what_is_on_the_device_and_who_uses_it() -> None:
    model = net()
    optimizer = start(model, 0)
    train_blocks(model, optimizer)
    optimizer.synchronize()
    stream, said = stream_of(model), list[str]()
    hook = model.blocks[2].both.register_forward_hook(lambda *_: said.append(repr(stream)))
    loss(model, 3).backward()
    hook.remove()
    assert said[0].startswith("<WeightStream: 4608 bytes on the device; 4 of 6 blocks at home; <Block 2: 2304 bytes, ")
    assert "queues behind its transfer: 1, forwards that run: 1, the modules have its copies>; <Block 3: " in said[0]
    optimizer.step()
    optimizer.synchronize()
    assert repr(stream) == "<WeightStream: 0 bytes on the device; 6 of 6 blocks at home>"
