"""Least squares from the published runs to the rates of a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from experiments.paper.zero3 import BackwardRates, Run, backward_features, rest_features, update_seconds
from perfmodel.hardware import HardwareProfile

NOISE = 0.08
"""Relative residual from which a run counts as an outlier rather than as noise (soft L1 loss)."""
PRIOR_WEIGHT = 0.02
"""Pull of the prior on a rate that is off by its uncertainty, as a relative residual of one run."""

UNCERTAINTY: Mapping[str, float] = {
    "cpu_update_rate": 0.5,
    "host_bandwidth": 0.15,
    "h2d_bandwidth": 0.15,
    "gpu_update_rate": 0.7,
    "launch_latency_s": 0.7,
}
"""How far, as a natural logarithm, a machine may be from its data sheet. Fitted are the fields named here."""


def fit_runs(
    runs: Sequence[Run],
    update_s: Sequence[float],
    prior: HardwareProfile,
    uncertainty: Mapping[str, float] = UNCERTAINTY,
) -> HardwareProfile:
    """The profile that explains the update times of runs, robustly, starting from a data sheet.

    Minimised is the soft-L1 loss of the logarithms of predicted over measured, plus a weak pull towards the prior that
    decides only what the runs leave open. Raises ValueError for no runs or a time that is not positive.
    """
    measured = _measured(runs, update_s)
    names = list(uncertainty)
    start = np.log([getattr(prior, name) for name in names])
    sigma = np.array([uncertainty[name] for name in names])

    def profile(x: np.ndarray) -> HardwareProfile:
        return prior.replace(**dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        candidate = profile(x)
        predicted = np.array([update_seconds(run, candidate) for run in runs])
        return np.concatenate([np.log(predicted / measured), PRIOR_WEIGHT * (x - start) / sigma])

    found = optimize.least_squares(residuals, start, loss="soft_l1", f_scale=NOISE, diff_step=np.full(len(start), 1e-4))
    return profile(found.x)


def backward_seconds(run: Run, rates: BackwardRates) -> float:
    """Predicted backward time of a run."""
    return float(np.dot(backward_features(run), dataclasses.astuple(rates)))


def rest_seconds(run: Run, coefficients: Sequence[float]) -> float:
    """Predicted time of an iteration outside forward, backward and update."""
    return float(np.dot(rest_features(run), coefficients))


def non_negative(features: Sequence[Sequence[float]], seconds: Sequence[float], rounds: int = 30) -> list[float]:
    """Non-negative coefficients of a sum of features, by least absolute relative errors (reweighted least squares).

    rounds: of reweighting; with one, by least squares of relative errors.
    """
    measured = _measured(features, seconds)
    relative = np.array(features) / measured[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights = np.ones(len(measured))
    for _ in range(rounds):
        found, _norm = optimize.nnls(relative / scale * weights[:, None], weights)
        error = np.abs(relative / scale @ found - 1)
        weights = 1 / np.sqrt(np.maximum(error, NOISE))
    return [float(value) for value in found / scale]


def _measured(runs: Sequence[object], seconds: Sequence[float]) -> np.ndarray:
    values = np.array(seconds, dtype=float)
    if not len(values) or len(values) != len(runs):
        raise ValueError(f"a fit needs one time per run and at least one run, found {len(values)} for {len(runs)}")
    if not (values > 0).all():
        raise ValueError(f"measured times must be positive, found {values.min()} s")
    return values
