"""The fastest settings: no other choice of them is faster, and none of them is without use."""

from __future__ import annotations

import itertools

import pytest

from perfmodel.planner.fastest import CHOICES, _with, fastest, fastest_batch
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.situation import Situation
from perfmodel.planner.whatif import WORTHWHILE
from tests.support.planner import answer, asked, text


def test_no_other_choice_is_faster() -> None:
    question = asked(*["--params", "3e9", "--gpu", "8GB", "--host", "64GB"])[0]
    found = fastest(question)
    assert found is not None
    rates = []
    for count in range(len(CHOICES) + 1):
        for taken in itertools.combinations(CHOICES, count):
            other = _with(question, taken)
            best = fastest_batch(other) if other else None
            rates += [best[0].step_tokens / best[1].seconds] if best else []
    assert found.tokens_per_s >= (1 - 2 * WORTHWHILE) * max(rates)


def test_the_options_that_are_said_give_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """As they are typed behind those of the question; and with the micro-batches, too."""
    line = "--params 1.5e9 --machine rtx-4090 --host 64GB"
    first, second, *_ = text(line, capsys).splitlines()
    assert (
        second == 'In code: optimizer = DOSAdam(..., offload_gradients=True); optimizer.attach(model, weights="auto").'
    )
    change, _, rest = first.removeprefix("Fastest with AdamW's results: ").partition(": ")
    question = asked(*line.split(), *change.split())[0]
    situation = Situation(question)
    seconds = adaptive_outcome(situation).seconds
    assert rest.startswith(f"{question.step_tokens / seconds:,.0f} tokens/s, ")
    assert f"({situation.training_s / seconds:.0%} of what forward and backward reach alone, 97% with --acc" in rest
    count = int(rest.removesuffix(").").split()[-1])
    longer = Situation(question.replace(micro_batches=count))
    assert longer.training_s / adaptive_outcome(longer).seconds >= 0.97


def test_nothing_is_said_where_nothing_fits() -> None:
    assert answer("--params 70e9 --gpu 8GB --host 64GB")["fastest"] is None
