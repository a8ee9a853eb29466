"""Least squares from what was measured, runs or timelines, to the rates of a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize

from perfmodel.hardware import HardwareProfile, Provenance, changed
from perfmodel.plan import Placement, Plan
from perfmodel.timeline import Lane, Op, Timeline
from perfmodel.workload import Workload
from perfmodel.zero3 import BackwardRates, Run, backward_features, rest_features, update_seconds

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
        return changed(prior, dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        candidate = profile(x)
        predicted = np.array([update_seconds(run, candidate) for run in runs])
        return np.concatenate([np.log(predicted / measured), PRIOR_WEIGHT * (x - start) / sigma])

    found = optimize.least_squares(residuals, start, loss="soft_l1", f_scale=NOISE, diff_step=np.full(len(start), 1e-4))
    return profile(found.x)


def fit_backward(runs: Sequence[Run], backward_s: Sequence[float]) -> BackwardRates:
    """The backward rates that explain the backward times of runs."""
    return BackwardRates(*_non_negative(runs, backward_s, backward_features))


def fit_rest(runs: Sequence[Run], rest_s: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of `rest_features` that explain what an iteration takes besides its three phases."""
    return tuple(_non_negative(runs, rest_s, rest_features))


def backward_seconds(run: Run, rates: BackwardRates) -> float:
    """Predicted backward time of a run."""
    return float(np.dot(backward_features(run), dataclasses.astuple(rates)))


def rest_seconds(run: Run, coefficients: Sequence[float]) -> float:
    """Predicted time of an iteration outside forward, backward and update."""
    return float(np.dot(rest_features(run), coefficients))


def fit_timelines(
    measured: Sequence[tuple[Plan, Workload, Timeline]], base: HardwareProfile, provenance: Provenance
) -> HardwareProfile:
    """A profile whose lane rates explain the spans of measured timelines; what no span tells stays as in `base`.

    A span lasts a fixed cost plus its size over the rate; each lane's two are fitted to its spans with a soft-L1
    loss. Copies that met one in the other direction give the duplex rates. Host bandwidth cannot be told from the
    spans of one plan alone and stays.
    """
    samples: dict[str, list[tuple[float, float]]] = {}
    for plan, workload, timeline in measured:
        for span in timeline.spans:
            if span.subgroup is None:
                continue
            load = workload.subgroups[span.subgroup]
            if span.op is Op.UPDATE:
                on_cpu = plan.placements[span.subgroup] is Placement.CPU
                samples.setdefault("cpu_update_rate" if on_cpu else "gpu_update_rate", []).append(
                    (load.numel, span.duration)
                )
            else:
                size = {Op.GRADIENT: load.gradient_bytes, Op.PARAMETER: load.parameter_bytes}.get(
                    span.op, load.state_bytes
                )
                link = "h2d_bandwidth" if span.lane is Lane.H2D else "d2h_bandwidth"
                back = timeline.on(Lane.D2H if span.lane is Lane.H2D else Lane.H2D)
                beside = sum(max(0.0, min(s.end, span.end) - max(s.start, span.start)) for s in back)
                if beside > 0.9 * span.duration:
                    samples.setdefault(f"{link}_duplex", []).append((size, span.duration))
                elif beside < 0.1 * span.duration:
                    samples.setdefault(link, []).append((size, span.duration))
    fitted = {field: fit_rate(points, _latency(base, field)) for field, points in samples.items()}
    return dataclasses.replace(changed(base, fitted), provenance=provenance)


def fit_rate(samples: Sequence[tuple[float, float]], latency_s: float) -> float:
    """Size per second of samples (size, seconds) that each cost `latency_s` besides; outliers count little.

    Raises ValueError when no sample has a size or takes longer than the latency.
    """
    size, seconds = np.array(samples, dtype=float).T
    net = seconds - latency_s
    good = (size > 0) & (net > 0)
    if not good.any():
        raise ValueError(f"no rate in {len(samples)} samples: none has a size and takes longer than {latency_s} s")
    log_rates = np.log(size[good] / net[good])

    def residuals(x: np.ndarray) -> np.ndarray:
        return x[0] - log_rates

    found = optimize.least_squares(residuals, [np.median(log_rates)], loss="soft_l1", f_scale=NOISE)
    return float(np.exp(found.x[0]))


def _latency(profile: HardwareProfile, field: str) -> float:
    return profile.launch_latency_s if field.endswith("update_rate") else profile.copy_latency_s


def _non_negative(
    runs: Sequence[Run], seconds: Sequence[float], features: Callable[[Run], tuple[float, ...]]
) -> list[float]:
    """Non-negative coefficients of a sum of features, by least absolute relative errors (reweighted least squares)."""
    measured = _measured(runs, seconds)
    relative = np.array([features(run) for run in runs]) / measured[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights = np.ones(len(measured))
    for _ in range(30):
        found, _norm = optimize.nnls(relative / scale * weights[:, None], weights)
        error = np.abs(relative / scale @ found - 1)
        weights = 1 / np.sqrt(np.maximum(error, NOISE))
    return [float(value) for value in found / scale]


def _measured(runs: Sequence[Run], seconds: Sequence[float]) -> np.ndarray:
    values = np.array(seconds, dtype=float)
    if not len(values) or len(values) != len(runs):
        raise ValueError(f"a fit needs one time per run and at least one run, found {len(values)} for {len(runs)}")
    if not (values > 0).all():
        raise ValueError(f"measured times must be positive, found {values.min()} s")
    return values
