"""Four processes under torchrun, each with an emulated accelerator, take the time that the model says."""

from __future__ import annotations

import pytest
from conftest import compares_with_a_clock, skip_if_the_clock_cannot_be_trusted

from experiments import job
from experiments.ranks import DATA
from experiments.runs import read_runs
from experiments.sweep.predict import Predictor


@compares_with_a_clock
def test_the_update_is_within_a_tenth_of_what_the_model_says() -> None:
    (row,) = job.run(4, ["stride"], update_s=1.0)
    if abs(row["measured_s"] / row["modelled_s"] - 1) > 0.1:
        skip_if_the_clock_cannot_be_trusted()
    assert row["measured_s"] == pytest.approx(row["modelled_s"], rel=0.1)
    found = job.beside_published(row, Predictor(read_runs(DATA / "published_runs.csv")))
    assert found["published_update_s"] == pytest.approx(2.08, rel=0.05)
    job.show([found])


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="a job of 1 processes failed"):
        job.run(1, ["no such policy"])
