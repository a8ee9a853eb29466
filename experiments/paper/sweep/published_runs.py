"""What published runs and memory traces say of a sweep's configurations: sizes, forward times, free GPU memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable

import numpy as np

from experiments.paper.fit import non_negative
from experiments.paper.runs import OVERSHOOT, TRACES, PublishedRun, read_trace
from experiments.paper.sweep.spec import PUBLISHED_LOOPS, Configuration

TRACED = {
    "h100": "h100_20b_interleaved",
    "a100_bound": "a100_13b_zero3_offload",
    "a100_unbound": "a100_13b_zero3_offload",
}
"""The trace that stands for each machine."""


class Published:
    """The published runs without tensor parallelism, and what configurations beside them are taken to be like."""

    def __init__(self, runs: Iterable[PublishedRun]) -> None:
        self.runs = tuple(r for r in runs if r.tensor_parallel == 1)
        self.classes = tuple(dict.fromkeys(r.machine_class for r in self.runs))
        self._forwards = {}
        for name in self.classes:
            same = [r for r in self.runs if r.machine_class == name]
            self._forwards[name] = non_negative([_features(r) for r in same], [r.forward_s for r in same], rounds=1)

    def like(self, config: Configuration, *same: str) -> list[PublishedRun]:
        """The runs that agree with the configuration in these keys."""
        return [r for r in self.runs if all(KEYS_OF_RUNS[key](r) == getattr(config, key) for key in same)]

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
        return float(np.dot(self._forwards[config.machine], features))

    def forward_errors(self) -> list[float]:
        """Relative errors of the fitted forward for the runs that it is fitted to."""
        return [abs(float(np.dot(self._forwards[r.machine_class], _features(r))) / r.forward_s - 1) for r in self.runs]

    def free_bytes(self, config: Configuration) -> float | None:
        """GPU memory left for optimizer state at the peak, by a published trace; None on other machines.

        A smaller model is taken to use as much as the traced one. Of a larger one the parameters are counted, 2 bytes
        each, and the rest grows with layers times hidden size, as saved activations do: with parameters to the power
        of 2/3. It is negative when the model alone does not fit.
        """
        if config.machine not in self.classes:
            return None
        used, total = read_trace(TRACED[config.machine])
        _, model, ranks = TRACES[TRACED[config.machine]]
        params, traced = self.model_params(config), self.model_params(dataclasses.replace(config, model=model))
        rest = max(used) - 2 * traced / ranks
        larger = 2 * params / config.ranks + rest * (params / traced) ** (2 / 3)
        return total - max(*used, larger)


KEYS_OF_RUNS: dict[str, Callable[[PublishedRun], object]] = {
    "machine": lambda r: r.machine_class,
    "model": lambda r: r.model,
    "policy": lambda r: r.run.mode.value,
    "ranks": lambda r: r.ranks,
    "ranks_per_node": lambda r: r.run.ranks_per_host,
    "micro_batch": lambda r: r.run.micro_batch_size,
    "accumulation": lambda r: r.run.micro_batches,
    "subgroup_size": lambda r: r.subgroup_size,
    "stride": lambda r: r.run.stride,
    "ratio": lambda r: r.run.cpu_ratio,
}
"""What a published run has for a configuration's keys."""


def _features(run: PublishedRun) -> tuple[float, ...]:
    sequences = run.run.micro_batches * run.run.micro_batch_size
    return _forward_features(run.run.micro_batches, sequences, run.run.model_params, run.nodes > 1)


def _forward_features(micro_batches: int, sequences: int, params: float, several_nodes: bool) -> tuple[float, ...]:
    """What forward is proportional to: a part per micro-batch, one per sequence and parameter, and one per micro-batch
    and parameter gathered from other nodes."""
    return (micro_batches, sequences * params, micro_batches * params * several_nodes)
