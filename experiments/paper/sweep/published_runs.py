"""What published runs and memory traces say of a sweep's configurations: sizes, forward times, free GPU memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from experiments.paper.runs import COLUMNS, OVERSHOOT, PublishedRun, read_trace
from experiments.paper.sweep.spec import PUBLISHED_LOOPS, Configuration

TRACES = {
    "h100": ("h100_20b_interleaved", "20B", 4),
    "a100_bound": ("a100_13b_zero3_offload", "13B", 1),
    "a100_unbound": ("a100_13b_zero3_offload", "13B", 1),
}
"""The trace that stands for each machine, and the model and ranks that it is of."""


class Published:
    """The published runs without tensor parallelism, and what configurations beside them are taken to be like."""

    def __init__(self, runs: Iterable[PublishedRun]) -> None:
        self.runs = tuple(r for r in runs if _logged(r, "tp") == 1)
        self.classes = tuple(dict.fromkeys(r.machine_class for r in self.runs))
        self._forwards = {
            name: _fit_forward([r for r in self.runs if r.machine_class == name]) for name in self.classes
        }
        self._memory = {name: self._traced(name) for name in self.classes}

    def like(self, config: Configuration, *same: str) -> list[PublishedRun]:
        """The runs that agree with the configuration in these keys."""
        return [r for r in self.runs if all(KEYS_OF_RUNS[key](r) == getattr(config, key) for key in same)]

    @staticmethod
    def nodes(run: PublishedRun) -> int:
        """Hosts that the run was spread over."""
        return int(_logged(run, "nodes"))

    @classmethod
    def ranks(cls, run: PublishedRun) -> int:
        """Data-parallel ranks on all hosts."""
        return cls.nodes(run) * run.run.ranks_per_host

    def repeats(self, config: Configuration) -> list[PublishedRun]:
        """Published runs of this very configuration."""
        if config.policy not in PUBLISHED_LOOPS or config.contention:
            return []
        return self.like(config, *(key for key in KEYS_OF_RUNS if key != "stride" or config.stride is not None))

    def model_params(self, config: Configuration) -> float:
        """As published for this machine, or for another, or what the model's name says."""
        found = self.like(config, "model", "machine") or self.like(config, "model")
        return found[0].run.model_params if found else float(config.model[:-1]) * 1e9

    def subgroups(self, config: Configuration, params_rank: float) -> int:
        """Of one rank: as logged; else of OVERSHOOT times the nominal size."""
        logged = self.like(config, "model", "machine", "ranks", "subgroup_size")
        return logged[0].run.subgroups if logged else max(1, round(params_rank / (OVERSHOOT * config.subgroup_size)))

    def forward_s(self, config: Configuration, params: float) -> float:
        """Seconds of all forwards of an iteration: as published, all modes together, or fitted; 0 on other machines."""
        keys = ("machine", "model", "ranks", "ranks_per_node", "micro_batch", "accumulation")
        logged = self.like(config, *keys)
        if logged:
            return statistics.median(r.forward_s for r in logged)
        if config.machine not in self._forwards:
            return 0.0
        sequences = config.accumulation * config.micro_batch
        features = _forward_features(config.accumulation, sequences, params, config.ranks > config.ranks_per_node)
        return float(self._forwards[config.machine] @ features)

    def forward_errors(self) -> list[float]:
        """Relative errors of the fitted forward for the runs that it is fitted to."""
        return [abs(float(self._forwards[r.machine_class] @ _features(r)) / r.forward_s - 1) for r in self.runs]

    def free_bytes(self, config: Configuration) -> float | None:
        """GPU memory left for optimizer state, negative when the model alone does not fit; None on other machines."""
        if config.machine not in self._memory:
            return None
        params = self.model_params(config)
        return self._memory[config.machine].free(params / config.ranks, params)

    def _traced(self, machine: str) -> GpuMemory:
        trace, model, ranks = TRACES[machine]
        used, total = read_trace(trace)
        traced = [r for r in self.runs if r.model == model]
        params = min(traced, key=lambda r: r.machine_class != machine).run.model_params
        return GpuMemory(total, max(used), params / ranks, params)


@dataclass(frozen=True)
class GpuMemory:
    """GPU memory of a published machine, in bytes, from a memory trace of one of its runs.

    total; used: the most in the trace, of which 2 bytes per parameter of the rank are the parameters.
    params_rank, model_params: of the traced run.
    """

    total: int
    used: int
    params_rank: float
    model_params: float

    def free(self, params_rank: float, model_params: float) -> float:
        """Bytes that a rank of another model leaves free at its peak; negative when it does not fit.

        A smaller one is taken to use as much as the traced one. Of a larger one the parameters are counted, and the
        rest grows with layers times hidden size, as saved activations do: with parameters to the power of 2/3.
        """
        rest = self.used - 2 * self.params_rank
        larger = 2 * params_rank + rest * (model_params / self.model_params) ** (2 / 3)
        return self.total - max(self.used, larger)


def _logged(run: PublishedRun, column: str) -> float:
    return float(dict(zip(COLUMNS, run.config, strict=False))[column])


KEYS_OF_RUNS: dict[str, Callable[[PublishedRun], object]] = {
    "machine": lambda r: r.machine_class,
    "model": lambda r: r.model,
    "policy": lambda r: r.run.mode.value,
    "ranks": Published.ranks,
    "ranks_per_node": lambda r: r.run.ranks_per_host,
    "micro_batch": lambda r: r.run.micro_batch_size,
    "accumulation": lambda r: r.run.micro_batches,
    "subgroup_size": lambda r: int(_logged(r, "subgroup_size")),
    "stride": lambda r: r.run.stride,
    "ratio": lambda r: r.run.cpu_ratio,
}
"""What a published run has for a configuration's keys."""


def _fit_forward(runs: Sequence[PublishedRun]) -> np.ndarray:
    """Non-negative coefficients of what forward is made of, with the least squares of relative errors."""
    relative = np.array([_features(r) for r in runs]) / np.array([[r.forward_s] for r in runs])
    scale = np.maximum(relative.max(axis=0), 1e-300)
    return np.asarray(optimize.nnls(relative / scale, np.ones(len(runs)))[0] / scale)


def _features(run: PublishedRun) -> np.ndarray:
    sequences = run.run.micro_batches * run.run.micro_batch_size
    return _forward_features(run.run.micro_batches, sequences, run.run.model_params, Published.nodes(run) > 1)


def _forward_features(micro_batches: int, sequences: int, params: float, several_nodes: bool) -> np.ndarray:
    """What forward is proportional to: a part per micro-batch, one per sequence and parameter, and one per micro-batch
    and parameter gathered from other nodes."""
    return np.array([micro_batches, sequences * params, micro_batches * params * several_nodes], dtype=float)
