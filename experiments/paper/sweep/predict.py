"""The times of a sweep's configuration: of published loops by their fitted model, of our policies by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.paper.published import ClassModel
from experiments.paper.runs import OVERSHOOT, TRACES, PublishedRun, grouped, median_of, read_trace
from experiments.paper.sweep.spec import PUBLISHED_LOOPS, Configuration
from experiments.paper.zero3 import Mode, Run, backward_seconds, non_negative, rest_seconds, update_seconds
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.demand import demand
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Placement, Plan
from perfmodel.policies import cpu_only, static_ratio, stride
from perfmodel.simulate import Scope, simulate
from perfmodel.timeline import Lane
from perfmodel.workload import Workload

TRACED = {
    "h100": "h100_20b_interleaved",
    "a100_bound": "a100_13b_zero3_offload",
    "a100_unbound": "a100_13b_zero3_offload",
}
"""The trace that stands for each machine."""
STATE_BYTES = int(MIXED.state_bytes)
"""Per parameter: fp32 master weight, exp_avg, exp_avg_sq."""


@dataclass(frozen=True)
class Outcome:
    """The times of a configuration. Seconds per iteration and rank; None where unknown or where there are none.

    subgroups, params_rank: of one rank. published_runs: published runs of this very configuration; their medians.
    update_s: from the end of backward to the last transfer.
    resident, streamed, on_cpu: subgroups by placement. *_busy_s: of the lanes, copies that slow each other included.
    host_dram_s: bytes moved through host DRAM over the rank's part of its bandwidth.
    bound_s: no plan with this memory could be faster. measured_update_s: on the device, scaled down.
    note: why there are no times.
    """

    params_rank: float
    subgroups: int
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    iteration_s: float | None = None
    published_runs: int = 0
    published_backward_s: float | None = None
    published_update_s: float | None = None
    published_iteration_s: float | None = None
    resident: int | None = None
    streamed: int | None = None
    on_cpu: int | None = None
    cpu_busy_s: float | None = None
    gpu_busy_s: float | None = None
    h2d_busy_s: float | None = None
    d2h_busy_s: float | None = None
    host_dram_s: float | None = None
    bound_s: float | None = None
    measured_update_s: float | None = None
    note: str = ""


class Simulation(NamedTuple):
    """The arguments of `simulate`, for one of our policies."""

    plan: Plan
    workload: Workload
    profile: HardwareProfile
    scope: Scope


class Predictor:
    """Outcomes of configurations, from models fitted to published runs.

    published: the runs without tensor parallelism, which configurations are taken to be like.
    """

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.runs = tuple(runs)
        self.published = tuple(r for r in runs if r.tensor_parallel == 1)
        self.models = {name: ClassModel.fit(name, same) for name, same in grouped(runs, lambda r: r.machine_class)}
        self._forwards = {
            name: non_negative([_features(r) for r in same], [r.forward_s for r in same], rounds=1)
            for name, same in grouped(self.published, lambda r: r.machine_class)
        }

    def outcome(self, config: Configuration) -> Outcome:
        """The times of the configuration, simulated whatever its device, beside those that were published of it."""
        run = self.run_of(config)
        found = Outcome(run.params, run.subgroups, note=self._shortage(config, run))
        if not found.note:
            times: dict[str, Any] = (
                self._loop(config, run) if config.policy in PUBLISHED_LOOPS else self._ours(config, run)
            )
            found = dataclasses.replace(found, **times)
        repeats = self.repeats(config)
        if not repeats:
            return found
        return dataclasses.replace(
            found,
            published_runs=len(repeats),
            published_backward_s=median_of(repeats, "backward_s"),
            published_update_s=median_of(repeats, "update_s"),
            published_iteration_s=median_of(repeats, "iteration_s"),
        )

    def run_of(self, config: Configuration) -> Run:
        """The configuration as the fitted models take it. Our policies count as gradients copied asynchronously."""
        params = self.model_params(config)
        return Run(
            mode=Mode(config.policy) if config.policy in PUBLISHED_LOOPS else Mode.ASYNC_GRAD_ONLY,
            params=params / config.ranks,
            model_params=params,
            subgroups=self.subgroups(config, params / config.ranks),
            cpu_ratio=1.0 if config.ratio is None else config.ratio,
            stride=config.stride or 0,
            ranks_per_host=config.ranks_per_node,
            micro_batches=config.accumulation,
            micro_batch_size=config.micro_batch,
            forward_s=self.forward_s(config, params),
        )

    def simulation(self, config: Configuration) -> Simulation:
        """One of our policies on the configuration's machine, beside the last of its backwards.

        Backward has the compute of the fitted model and, for every subgroup that does not stay on the GPU, what
        DeepSpeed's asynchronous gradients add to it.
        """
        run = self.run_of(config)
        state = STATE_BYTES * int(run.subgroup_params)
        resident = run.subgroups - run.offloaded
        free = self.free_bytes(config)
        peak, shared = resident * state, min((resident + 1) * state, math.inf if free is None else max(free, 0.0))
        if config.policy == "adaptive" and config.memory != "ratio":
            given = free if config.memory == "trace" else float(config.memory or 0) * 2**30
            assert given is not None, "checked when the configuration was made"
            peak = shared = int(given)
            resident = min(run.subgroups, peak // state)
        left = dataclasses.replace(run, cpu_ratio=(run.subgroups - resident) / run.subgroups)
        model = self.models.get(config.machine)
        work = Workload.of_sizes(
            [int(run.subgroup_params)] * run.subgroups,
            backward_s=self._backward_s(config, left) / run.micro_batches if model else 0.0,
            peak_free_bytes=peak,
            shared_free_bytes=shared,
        )
        profile = dataclasses.replace(config.profile(), ranks_per_host=config.ranks_per_node)
        return Simulation(policy_plan(config, run, work, profile), work, profile, Scope.beside(work))

    def _shortage(self, config: Configuration, run: Run) -> str:
        """Why the configuration does not fit into GPU memory; empty if it does, or if memory is given or unknown."""
        free = self.free_bytes(config)
        if free is None or isinstance(config.memory, float):
            return ""
        if free < 0:
            return f"the model alone needs {-free / 2**30:.1f} GiB more than the GPU has"
        resident = 0 if config.memory == "trace" else run.subgroups - run.offloaded
        slots = int(run.streamed > 0 or config.policy == "stride")
        needed = STATE_BYTES * (resident + slots) * run.subgroup_params
        return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free" if needed > free else ""

    def _loop(self, config: Configuration, run: Run) -> dict[str, float]:
        model = self.models[config.machine]
        backward_s, update_s = self._backward_s(config, run), update_seconds(run, config.left_of(model.profile))
        return {
            "forward_s": run.forward_s,
            "backward_s": backward_s,
            "update_s": update_s,
            "iteration_s": run.forward_s + backward_s + update_s + rest_seconds(run, model.rest),
        }

    def _backward_s(self, config: Configuration, run: Run) -> float:
        """The fitted model's; copies of gradients have the share of the links that contention does not take."""
        rates, left = self.models[config.machine].backward, 1 - config.contention
        moving = {name: getattr(rates, name) / left for name in ("gradient", "blocking", "blocking_shared")}
        return backward_seconds(run, dataclasses.replace(rates, **moving))

    def _ours(self, config: Configuration, run: Run) -> dict[str, float]:
        found = self.simulation(config)
        times = simulated(found) | {"bound_s": lower_bound(found.workload, found.profile, found.scope).seconds}
        model = self.models.get(config.machine)
        if model:
            phases = {"forward_s": run.forward_s, "backward_s": found.workload.backward_s * run.micro_batches}
            times["iteration_s"] = sum(phases.values()) + times["update_s"] + rest_seconds(run, model.rest)
            times |= phases
        return times

    def like(self, config: Configuration, *same: str) -> list[PublishedRun]:
        """The runs that agree with the configuration in these keys."""
        return [r for r in self.published if all(KEYS_OF_RUNS[key](r) == getattr(config, key) for key in same)]

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
            return median_of(logged, "forward_s")
        if config.machine not in self._forwards:
            return 0.0
        several_nodes = config.ranks > config.ranks_per_node
        features = _forward_features(config.accumulation, config.micro_batch, params, several_nodes)
        return float(np.dot(self._forwards[config.machine], features))

    def forward_errors(self) -> list[float]:
        """Relative errors of the fitted forward for the runs that it is fitted to."""
        return [
            abs(float(np.dot(self._forwards[r.machine_class], _features(r))) / r.forward_s - 1) for r in self.published
        ]

    def free_bytes(self, config: Configuration) -> float | None:
        """GPU memory left for optimizer state at the peak, by a published trace; None on other machines.

        A smaller model is taken to use as much as the traced one. Of a larger one the parameters are counted, 2 bytes
        each, and the rest grows with layers times hidden size, as saved activations do: with parameters to the power
        of 2/3. It is negative when the model alone does not fit.
        """
        if config.machine not in self.models:
            return None
        used, total = read_trace(TRACED[config.machine])
        _, model, ranks = TRACES[TRACED[config.machine]]
        params, traced = self.model_params(config), self.model_params(dataclasses.replace(config, model=model))
        rest = max(used) - 2 * traced / ranks
        larger = 2 * params / config.ranks + rest * (params / traced) ** (2 / 3)
        return total - max(*used, larger)


def policy_plan(config: Configuration, run: Run, work: Workload, profile: HardwareProfile) -> Plan:
    """The plan of one of our policies. Stride and ratio are as published: one slot, as many subgroups on the host."""
    ratio = run.offloaded / run.subgroups
    if config.policy == "cpu":
        return cpu_only(work)
    if config.policy == "ratio":
        return static_ratio(work, ratio)
    if config.policy == "stride":
        return stride(work, config.stride, ratio=ratio, slots=1)
    return adaptive(work, profile)


def simulated(simulation: Simulation) -> dict[str, float]:
    """The update, where subgroups are and how busy that keeps the lanes, as fields of `Outcome`. Without the model's
    compute."""
    plan, work, profile, scope = simulation
    timeline = simulate(*simulation)
    placed = zip(plan.placements, work.subgroups, strict=True)
    traffic = sum(cost.traffic for placement, load in placed for cost in demand(placement, load, profile).values())

    def busy(lane: Lane) -> float:
        return sum((s.duration for s in timeline.on(lane) if s.subgroup is not None), 0.0)

    return {
        "update_s": max(span.end for span in timeline.spans) - scope.compute_s(work),
        "resident": plan.placements.count(Placement.GPU_RESIDENT),
        "streamed": plan.placements.count(Placement.GPU_STREAMED),
        "on_cpu": plan.placements.count(Placement.CPU),
        "cpu_busy_s": busy(Lane.CPU),
        "gpu_busy_s": busy(Lane.GPU),
        "h2d_busy_s": busy(Lane.H2D),
        "d2h_busy_s": busy(Lane.D2H),
        "host_dram_s": traffic / profile.host_bandwidth_per_rank,
    }


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
"""The value of a published run for each key of a configuration."""


def _features(run: PublishedRun) -> tuple[float, ...]:
    return _forward_features(run.run.micro_batches, run.run.micro_batch_size, run.run.model_params, run.nodes > 1)


def _forward_features(micro_batches: int, size: int, params: float, several_nodes: bool) -> tuple[float, ...]:
    """Features of forward: one per micro-batch, one per sequence and parameter, and one per micro-batch and parameter
    gathered from other nodes."""
    return (micro_batches, micro_batches * size * params, micro_batches * params * several_nodes)
