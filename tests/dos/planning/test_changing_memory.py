"""The adaptive policy where memory changes is faster than every fixed policy and near the bound, in virtual time.

A small model trains, and nothing waits: how long an iteration lasts, the simulator says, of the schedule that its
optimizer has issued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from dos import DOSAdam
from dos.devices import Script
from dos.planning.policies import Refinement
from dos.step.issue import Step
from experiments.bench.memory import (
    CONFIG,
    DTYPE,
    ITERATIONS,
    MOST_OVER_BOUND,
    SCOPE,
    Setting,
    bound_s,
    fixed_policies,
    settings,
    simulated_s,
)
from experiments.bench.neighbours import Share, leak, noise, sawtooth, spike, step, wanted
from experiments.gpt import GPT
from experiments.paper.ranks import PublishedRank, Recording
from experiments.training import Position
from perfmodel import Op, Placement
from perfmodel.simulate import makespan, serve
from tests.support.inside import session_of
from tests.support.training import FAST, ended_steps

pytestmark = pytest.mark.usefixtures("one_core")

MEDIAN_OVER_BOUND = 1.10
DRAWN = 1
"""Scripts of each family."""

FAMILIES: dict[str, Callable[[random.Random, int], Share]] = {
    "step": lambda drawn, n: step(drawn.randrange(2, n - 1), drawn.uniform(0, 0.95), drawn.uniform(0, 0.95)),
    "sawtooth": lambda drawn, n: sawtooth(drawn.randrange(3, 12), drawn.uniform(0, 0.4), drawn.uniform(0.5, 0.95)),
    "spike": lambda drawn, n: spike(drawn.randrange(2, n - 1), drawn.uniform(0.2, 0.95)),
    "leak": lambda drawn, n: leak(drawn.uniform(0.5, 1.5) / n),
    "noise": lambda drawn, n: noise(drawn.uniform(0, 0.4), drawn.uniform(0.5, 0.95), drawn.randrange(100)),
}


def drawn_settings() -> dict[str, tuple[Setting, int]]:
    """By name, with how many iterations."""
    alone, found = Setting.of(PublishedRank.read()), {}
    for (name, family), seed in ((each, seed) for each in FAMILIES.items() for seed in range(DRAWN)):
        drawn = random.Random(f"{name} {seed}")
        n = drawn.randrange(16, 32)
        found[f"{name} {seed}"] = Setting(alone.rank, wanted(family(drawn, n), alone.rank.free_bytes, n)), n
    return found


def trained(setting: Setting, iterations: int) -> list[float]:
    """Seconds of each iteration, of which the optimizer knows how long it computes."""
    rank = setting.rank
    return [rank.forward_s + lasts(each, rank) for each in steps_of(setting, iterations)]


def steps_of(setting: Setting, iterations: int) -> list[Step]:
    """The steps of these iterations."""
    rank, model = setting.rank, GPT(CONFIG, dtype=DTYPE)
    position = Position(model, moved=lambda: device.memory())
    neighbour = Script(setting.neighbour, lambda: position.iteration)
    device = dataclasses.replace(rank, profile=FAST).device(lambda: position.position, neighbour)
    size = rank.loads.subgroups[0].numel
    options = {"offload_gradients": setting.offloads, "state_format": "float32"}  # as in MemoryRun
    optimizer = DOSAdam(model.parameters(), profile=rank.profile, subgroup_size=size, device=device, **options)
    position.follow(optimizer)
    steps, tokens = ended_steps(optimizer), torch.zeros(1, CONFIG.context, dtype=torch.int64)
    for _ in range(iterations):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        device.memory()  # the neighbour takes what has come free
        session_of(optimizer).assembly.decisions.pace.rest.seconds = rank.backward_s
    assert len(steps) == iterations
    assert device.peak_bytes <= device.capacity
    return steps


def lasts(step: Step, rank: PublishedRank) -> float:
    """Seconds of backward and the update."""
    begun = any(task.op is not Op.BACKWARD for task in step.schedule.tasks[: step.schedule.under_way])
    served = serve(step.schedule, step.iteration.workload, rank.profile).makespan
    return served if begun else rank.backward_s + served


@contextlib.contextmanager
def virtual_time() -> Iterator[None]:
    """Surround trainings that wait for nothing, by which no rate is corrected, and which sample at each gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Refinement, "correct", lambda refinement, believed, *_: believed)
        patch.setattr("dos.step.pace.Typical.add", lambda typical, measured: None)
        patch.setattr(
            "experiments.training.time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda seconds: None)
        )
        for share in ("SHARE_AT_FIRST", "SHARE_OF_TIME"):  # memory is sampled at each gradient, however long it takes
            patch.setattr(f"dos.planning.monitor.{share}", math.inf)
        yield


@functools.cache
def seconds(name: str) -> tuple[float, float, float]:
    """Of an iteration: adaptive, with the best fixed policy, and the bound."""
    setting, n = SETTINGS[name]
    mean = statistics.fmean if setting.changes else statistics.median
    with virtual_time():
        adaptive_s = mean(trained(setting, n))
    return adaptive_s, simulated_s(setting, n, fixed_policies(setting, n)[0][1]), bound_s(setting, n)


SCRIPTS = settings(ITERATIONS).items()
SETTINGS = {name: (each, ITERATIONS if each.changes else ITERATIONS // 2) for name, each in SCRIPTS} | drawn_settings()
"""The scripts of `python -m experiments.memory`, and drawn ones."""


QUICK = SETTINGS.keys() - drawn_settings().keys() - {"step up", "half", "four fifths offloaded", "noise"}
"""Not those of which others are like: a step down, half of the memory and noise with offloaded gradients."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS]
)
def test_adaptive_is_no_slower_than_the_best_fixed_policy_and_near_the_bound(name: str) -> None:
    adaptive_s, fixed_s, least_s = seconds(name)
    assert adaptive_s <= (1.0 if SETTINGS[name][0].changes else 1.02) * fixed_s
    assert adaptive_s <= MOST_OVER_BOUND * least_s


def test_in_most_scripts_adaptive_takes_at_most_a_tenth_more_than_the_bound() -> None:
    over = [adaptive_s / least_s for adaptive_s, _, least_s in map(seconds, QUICK)]
    assert statistics.median(over) <= MEDIAN_OVER_BOUND


@pytest.mark.parametrize("peaks_at", ["end", "beginning"])
def test_slots_are_filled_in_backward_where_the_plan_says_so(peaks_at: str) -> None:
    """Half of the state fits at the peak, and four slots besides once that is over, where it is over in backward."""
    rank = Setting.of(PublishedRank.read()).rank
    state, peak = rank.loads.state_bytes, rank.recording.peak
    low = peak - 5 * rank.loads.slot_bytes
    backward = (low, low, low, peak) if peaks_at == "end" else (peak, low, low, low)
    setting = Setting(
        dataclasses.replace(rank, memory_bytes=peak + state // 2, recording=Recording((low,), backward, low))
    )
    with virtual_time():
        *_, last = steps_of(setting, 5)
    work, plan = last.iteration.workload, last.iteration.issued
    assert work.half_freed_bytes == (0 if peaks_at == "end" else 5 * work.slot_bytes)
    early = [task for task in last.schedule.tasks[: last.schedule.under_way] if task.op is Op.PREFETCH]
    assert len(early) == (0 if peaks_at == "end" else plan.slots) < plan.placements.count(Placement.GPU_STREAMED)
    assert lasts(last, setting.rank) == pytest.approx(makespan(plan, work, rank.profile, SCOPE), rel=0.02)
