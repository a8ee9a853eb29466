"""Time model of the published runs: how DeepSpeed ZeRO-3 offloads, and the paper's loop on top of it; and its fit.

One thread walks over the subgroups. On the CPU a subgroup is clipped and updated; then its parameters go to the GPU,
blocking in `zero3_offload` and `async_grad_only`, on a copy stream in `dos`. In `dos`, before the first of `stride`
subgroups, one stream flushes the previous GPU subgroup and then prefetches the next; the thread updates
stride - 1 subgroups on the CPU, waits for the stream, and updates the last one on the GPU.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.format import MIXED
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
STREAM_BYTES = MIXED.state_bytes
"""Bytes per parameter each way: fp32 master weight, exp_avg, exp_avg_sq."""
UPDATE_TRAFFIC = 12 + 2 * STREAM_BYTES
"""Bytes of host DRAM traffic per parameter updated: fp32 gradient clipped in place (8) and read (4), master weight and
moments read and written (24)."""
UPLOAD_TRAFFIC = 2
"""Bytes per parameter that are copied by DMA on a stream of their own (`dos`)."""
BLOCKING_UPLOAD_TRAFFIC = 14
"""Bytes per parameter of a blocking upload: cast (4 read, 2 written), copy to the driver's pinned buffer (2 + 2),
DMA (2), and half of the 4 that the written lines may cost to read first."""


class Mode(enum.Enum):
    """How a published run offloads."""

    ZERO3_OFFLOAD = "zero3_offload"
    """Every update on the CPU, gradients are copied blocking."""
    ASYNC_GRAD_ONLY = "async_grad_only"
    """Every update on the CPU, gradients are copied asynchronously."""
    DOS = "dos"
    """That, parameters arrive asynchronously, and every stride-th subgroup is updated on the GPU."""


@dataclass(frozen=True)
class Run:
    """Facts of a run that are known beforehand.

    params: parameters whose state one rank owns. model_params: parameters that one rank computes with.
    subgroups: of one rank. cpu_ratio: share of them on the host. stride: 0 for none on the GPU.
    forward_s: seconds of forward, a measure of compute and of its gathering of parameters.
    """

    mode: Mode
    params: float
    model_params: float
    subgroups: int
    cpu_ratio: float
    stride: int
    ranks_per_host: int
    micro_batches: int
    micro_batch_size: int
    forward_s: float

    @property
    def offloaded(self) -> int:
        """Subgroups with their state on the host; DeepSpeed rounds the share down."""
        return int(self.cpu_ratio * self.subgroups + 1e-9)

    @property
    def streamed(self) -> int:
        """Subgroups updated on the GPU with their state on the host."""
        return self.offloaded // self.stride if self.mode is Mode.DOS and self.stride else 0

    @property
    def subgroup_params(self) -> float:
        """Mean parameters per subgroup."""
        return self.params / self.subgroups


def update_seconds(run: Run, profile: HardwareProfile) -> float:
    """Predicted update time of a run.

    Of the profile, the loop uses cpu_update_rate, host_bandwidth (divided by the run's ranks per host), h2d_bandwidth
    (the one copy stream), gpu_update_rate, launch_latency_s (fixed cost per offloaded subgroup: DeepSpeed's own
    bookkeeping) and cpu_traffic_factor.
    """
    size = run.subgroup_params
    host = profile.host_bandwidth / run.ranks_per_host
    factor = profile.cpu_traffic_factor
    cpu = size / profile.cpu_update_rate
    gpu = size / profile.gpu_update_rate
    resident = (run.subgroups - run.offloaded) * gpu
    fixed = run.offloaded * profile.launch_latency_s
    if run.mode is not Mode.DOS:
        update = max(cpu, UPDATE_TRAFFIC * factor * size / host)
        upload = BLOCKING_UPLOAD_TRAFFIC * factor * size / host
        return resident + fixed + run.offloaded * (update + upload)
    traffic = (UPDATE_TRAFFIC + UPLOAD_TRAFFIC) * factor * size
    tail = run.offloaded - run.streamed * run.stride
    total = resident + fixed + tail * max(cpu, traffic / host)
    if run.streamed:
        beside = run.stride - 1
        both_ways = 2 * STREAM_BYTES * size
        window = seconds_beside((beside * cpu, beside * traffic), (both_ways / profile.h2d_bandwidth, both_ways), host)
        total += run.streamed * (window + gpu)
    return total


def seconds_beside(one: tuple[float, float], other: tuple[float, float], capacity: float) -> float:
    """Seconds until two concurrent jobs, each (seconds alone, bytes of host traffic), have both ended.

    While both run they share `capacity` bytes/s in equal parts, and what one does not need of its part goes to the
    other (max-min fairness), which predicts these runs better than sharing in proportion; then the longer one has it
    to itself.
    """
    jobs = [job for job in (one, other) if job[0] > 0]
    if not jobs:
        return 0.0
    demands = [traffic / seconds for seconds, traffic in jobs]
    speeds = [
        rate / demand if demand else 1.0 for rate, demand in zip(max_min(demands, capacity), demands, strict=True)
    ]
    first = min(seconds / speed for (seconds, _), speed in zip(jobs, speeds, strict=True))
    rest = [
        (seconds - first * speed) / min(1.0, capacity / demand if demand else 1.0)
        for (seconds, _), speed, demand in zip(jobs, speeds, demands, strict=True)
    ]
    return first + max(0.0, *rest)


def max_min(demands: Sequence[float], capacity: float) -> list[float]:
    """The rate that each of several users gets of a capacity."""
    rates = [0.0] * len(demands)
    for position, user in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        rates[user] = min(demands[user], capacity / (len(demands) - position))
        capacity -= rates[user]
    return rates


@dataclass(frozen=True)
class BackwardRates:
    """Rates of backward's parts; every figure 0 or more.

    per_forward: seconds per second of forward (gathering parameters and recomputing activations).
    per_sample_param: seconds per sample and parameter computed with.
    gradient: seconds per offloaded parameter whose gradient is copied asynchronously (what is not hidden).
    blocking, blocking_shared: seconds per offloaded parameter whose gradient is copied blocking, alone, and added by
        each rank on the host.
    """

    per_forward: float
    per_sample_param: float
    gradient: float
    blocking: float
    blocking_shared: float


def backward_features(run: Run) -> tuple[float, ...]:
    """Factors of each of the `BackwardRates`."""
    gradients = run.subgroup_params * (run.offloaded - run.streamed)
    blocking = gradients if run.mode is Mode.ZERO3_OFFLOAD else 0.0
    samples = run.micro_batches * run.micro_batch_size
    return (run.forward_s, samples * run.model_params, gradients - blocking, blocking, blocking * run.ranks_per_host)


def rest_features(run: Run) -> tuple[float, ...]:
    """Features of an iteration's time outside forward, backward and update: the iteration, the
    micro-batches, and the bookkeeping of `dos`."""
    return (1.0, float(run.micro_batches), float(run.mode is Mode.DOS))


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
    from scipy import optimize  # which takes half a second, and most commands fit nothing

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
    from scipy import optimize

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
