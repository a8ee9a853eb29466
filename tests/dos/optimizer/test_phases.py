"""In which phases a session's entry points may be called, and how phases follow one another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dos import DOSAdam
from dos.guard import ENTRIES, Phase
from dos.session import Session
from tests.support.inside import session_of
from tests.support.training import backward, mlp, on

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    table = PAGE.read_text().split("| accepted phases | entry points |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| (`.*`) \|$", table, re.MULTILINE)
    told = {name: phases.split(", ") for phases, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == {name: [phase.name.lower() for phase in accepted] for name, accepted in ENTRIES.items()}


def test_an_iteration_goes_through_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), **on("cpu"))
    guard, seen = session_of(optimizer).guard, []
    commit = Session._commit

    def watched(session: Session, *args: object) -> None:
        seen.append(guard.phase)
        commit(session, *args)

    phases = [guard.phase]
    backward(model, 0)
    phases.append(guard.phase)
    monkeypatch.setattr(Session, "_commit", watched)
    optimizer.step()
    phases += [*seen, guard.phase]
    assert phases == [Phase.IDLE, Phase.BACKWARD, Phase.PREPARED, Phase.IDLE]
    backward(model, 1)
    optimizer.zero_grad()
    assert guard.phase is Phase.IDLE


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_an_entry_point_refuses_the_phases_that_it_does_not_accept(name: str, phase: Phase) -> None:
    """It is given too many arguments, so that one that accepts the phase gets no further."""
    session = session_of(DOSAdam(mlp().parameters(), **on("cpu")))
    session.guard.phase = phase
    owners = [
        each
        for each in (session, *vars(session).values())
        if type(each).__module__.startswith(("dos.session", "dos.owners"))
    ]
    methods = (getattr(owner, f"{private}{name}", None) for private in ("_", "") for owner in owners)
    entry = next(method for method in methods if hasattr(method, "__wrapped__"))
    accepted = phase in ENTRIES[name] or (phase is Phase.COMMITTING and Phase.BROKEN in ENTRIES[name])
    with pytest.raises((TypeError, RuntimeError, AssertionError)) as raised, torch.no_grad():
        entry(*[object()] * 9)
    assert (raised.type is TypeError) == accepted
    if not accepted and phase in (Phase.BROKEN, Phase.COMMITTING):
        assert "failed part way" in str(raised.value)
    session.guard.phase = Phase.IDLE
