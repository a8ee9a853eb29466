"""Memory that changes, in virtual time: never more than there is, and near the bound, on any machine."""

from __future__ import annotations

import dataclasses
import json

import pytest

import dos.memory.monitor
from experiments import memory, memory_virtual
from experiments.memory_runs import SCOPE, Setting
from experiments.memory_virtual import MOST_OVER_BOUND, Verdict, judge, run
from experiments.occupancies import neighbours
from experiments.ranks import PublishedRank
from perfmodel import Placement
from perfmodel.simulate import makespan

ITERATIONS = 20
MOST_WAITED = {"step up": 4, "step down": 0, "sawtooth": 5, "spike": 1, "leak": 0, "noise": 1}
"""Iterations at whose end the neighbour waits: speed must not be bought with what is others'."""


@pytest.fixture(scope="module")
def alone() -> Setting:
    return Setting.of(PublishedRank.read())


@pytest.mark.parametrize("script", MOST_WAITED)
def test_beside_a_neighbour(alone: Setting, script: str) -> None:
    verdict = judge(script, alone, ITERATIONS, range(6 if script == "noise" else 2))
    assert verdict.missed() == []
    assert verdict.waited <= MOST_WAITED[script]


def test_every_script_is_judged() -> None:
    assert set(MOST_WAITED) == set(neighbours(1, ITERATIONS))


def test_the_same_seed_is_the_same_run(alone: Setting) -> None:
    setting = alone.beside(neighbours(alone.rank.free_bytes, 8, seed=1)["noise"])
    one, again, other = (run(setting, 8, seed) for seed in (1, 1, 2))
    assert one.seconds == again.seconds
    assert one.plans == again.plans
    assert other.capacity == one.capacity


def test_a_peak_that_is_seen_too_late_exceeds_the_capacity(alone: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the judge is for: with samples as rare in the first iteration as later, state takes what the peak needs."""
    setting = alone.beside([(0.0, int(0.65 * alone.rank.free_bytes))])
    assert not any(run(setting, 2, seed).exceeded for seed in range(10))
    monkeypatch.setattr(dos.memory.monitor, "SHARE_AT_FIRST", dos.memory.monitor.SHARE_OF_TIME)
    assert any(run(setting, 2, seed).exceeded for seed in range(10))


def test_where_nothing_changes_an_iteration_lasts_as_long_as_the_simulator_says(alone: Setting) -> None:
    rank = alone.rank
    ample = run(alone, 3)
    assert set(ample.plans[-1].placements) == {Placement.GPU_RESIDENT}
    assert ample.seconds[-1] == pytest.approx(
        rank.forward_s + makespan(ample.plans[-1], alone.workload(0), rank.profile, SCOPE)
    )
    none = alone.with_free(0)
    none_s = run(none, 3).seconds[-1]
    assert none_s == pytest.approx(
        rank.forward_s + makespan(run(none, 3).plans[-1], none.workload(0), rank.profile, SCOPE)
    )
    assert ample.seconds[-1] < 0.5 * none_s


def test_verdicts_tell_what_was_missed() -> None:
    verdict = Verdict("noise", (1.1, 1.14), 0, 0.5)
    assert verdict.missed() == []
    assert len(dataclasses.replace(verdict, exceeded=1).missed()) == 1
    assert len(dataclasses.replace(verdict, over_bound=(1.0, MOST_OVER_BOUND + 0.01)).missed()) == 1


def test_the_command_prints_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = {"spike": neighbours(1, 5)["spike"]}
    monkeypatch.setattr(
        memory_virtual, "neighbours", lambda most, n, seed=0: {name: neighbours(most, n, seed)[name] for name in some}
    )
    code = memory.main(["--virtual", "--seeds", "2", "--iterations", "12", "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert [verdict["script"] for verdict in found["verdicts"]] == ["spike"]
    assert len(found["verdicts"][0]["over_bound"]) == 2
    assert code == bool(found["missed"])
    assert "virtual time" in captured.err
