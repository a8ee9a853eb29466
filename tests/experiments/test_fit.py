"""Fits: rates that made the data come back from it."""

import dataclasses
from collections.abc import Sequence

import pytest

from experiments.paper.zero3 import (
    BackwardRates,
    Mode,
    Run,
    backward_features,
    backward_seconds,
    fit_runs,
    max_min,
    non_negative,
    rest_features,
    rest_seconds,
    seconds_beside,
    update_seconds,
)
from perfmodel import lanes
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream, run_tasks

TRUTH = dataclasses.replace(HardwareProfile.builtin("h100"), launch_latency_s=3e-3)
PRIOR = dataclasses.replace(
    TRUTH, cpu_update_rate=3e9, host_bandwidth=400e9, h2d_bandwidth=45e9, gpu_update_rate=60e9, launch_latency_s=5e-3
)


def runs(ranks: tuple[int, ...] = (1, 4)) -> list[Run]:
    """CPU-only and interleaved runs of two sizes and strides."""
    base = Run(Mode.ZERO3_OFFLOAD, 3e9, 12e9, 24, 0.9, 0, 4, 1, 1, 0.2)
    return [
        dataclasses.replace(base, mode=mode, params=params, stride=k, ranks_per_host=r, forward_s=params * 1e-10)
        for r in ranks
        for params in (1.5e9, 3e9)
        for mode, k in (
            (Mode.ZERO3_OFFLOAD, 0),
            (Mode.ASYNC_GRAD_ONLY, 0),
            (Mode.DOS, 2),
            (Mode.DOS, 3),
            (Mode.DOS, 8),
        )
    ]


def test_runs_give_back_the_machine_despite_an_outlier() -> None:
    repeated = runs() * 3
    times = [update_seconds(run, TRUTH) for run in repeated]
    times[3] *= 3
    found = fit_runs(repeated, times, PRIOR)
    for run in runs():
        assert update_seconds(run, found) == pytest.approx(update_seconds(run, TRUTH), rel=0.03)
    assert found.cpu_update_rate == pytest.approx(TRUTH.cpu_update_rate, rel=0.05)
    assert found.host_bandwidth == pytest.approx(TRUTH.host_bandwidth, rel=0.05)


def test_rates_of_backward_and_rest_come_back_from_their_times() -> None:
    truth = BackwardRates(0.3, 4e-11, 7e-11, 2e-10, 2e-10)
    times = [backward_seconds(run, truth) for run in runs()]
    found = BackwardRates(*non_negative([backward_features(run) for run in runs()], times))
    assert [backward_seconds(run, found) for run in runs()] == pytest.approx(times, rel=1e-3)
    rest = [rest_seconds(run, (0.3, 0.1, 0.2)) for run in runs()]
    fitted = non_negative([rest_features(run) for run in runs()], rest)
    assert [rest_seconds(run, fitted) for run in runs()] == pytest.approx(rest, rel=1e-3)


@pytest.mark.parametrize(("k", "host"), [(2, 30e9), (3, 90e9), (6, 400e9)])
def test_the_closed_form_is_the_lanes_simulation(k: int, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of the paper's loop as tasks: k - 1 CPU updates beside one flush and one prefetch in turn.

    Its rule of sharing is its own.
    """

    def max_min_speeds(demands: Sequence[float], _: Sequence[float], capacity: float) -> list[float]:
        return [rate / demand for rate, demand in zip(max_min(demands, capacity), demands, strict=True)]

    monkeypatch.setattr(lanes, "shared_speeds", max_min_speeds)
    profile = dataclasses.replace(TRUTH, host_bandwidth=host, ranks_per_host=1)
    copy, traffic = 12e8 / profile.h2d_bandwidth, 12e8
    updates = [(Stream.CPU, 0.05, 28e8 / 0.05, ())] * (k - 1)
    _, ends = run_tasks([*updates, (Stream.PREFETCH, 2 * copy, traffic / copy, ())], profile)
    both = seconds_beside((0.05 * (k - 1), 28e8 * (k - 1)), (2 * copy, 2 * traffic), host)
    assert max(ends) == pytest.approx(both)
    assert seconds_beside((0.0, 0.0), (0.0, 0.0), host) == 0.0
