"""Two processes under torchrun, each with an emulated accelerator, take the time that the model says."""

from __future__ import annotations

import pytest
from conftest import needs_fsdp2, skip_if_the_clock_cannot_be_trusted

from experiments import job
from experiments.ranks import DATA
from experiments.runs import read_runs
from experiments.sweep.predict import Predictor


@needs_fsdp2
def test_the_update_is_within_a_tenth_of_what_the_model_says() -> None:
    for update_s in (2.0, 4.0):  # what else the processors do counts less on a slower machine
        (row,) = job.run(2, ["stride"], update_s=update_s)
        if row["measured_s"] == pytest.approx(row["modelled_s"], rel=0.1):
            break
    else:
        skip_if_the_clock_cannot_be_trusted()
        pytest.fail(f"{row['measured_s']} s, the model says {row['modelled_s']} s")
    found = job.beside_published(row, Predictor(read_runs(DATA / "published_runs.csv")))
    assert found["published_update_s"] == pytest.approx(2.56, rel=0.05)
    job.show([found])


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="a job of 1 processes failed"):
        job.run(1, ["no such policy"])
