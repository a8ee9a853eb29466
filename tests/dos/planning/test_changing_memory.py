"""The adaptive policy where memory changes is faster than every fixed policy and near the bound, in virtual time."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable

import pytest

from experiments.bench.memory import ITERATIONS, Setting, bound_s, fixed_policies, settings, simulated_s
from experiments.bench.neighbours import Share, leak, noise, sawtooth, spike, step, wanted
from experiments.paper.ranks import PublishedRank
from tests.support.virtual import trained

MEDIAN_OVER_BOUND, MOST_OVER_BOUND = 1.10, 1.18
DRAWN = 2
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


@functools.cache
def seconds(name: str) -> tuple[float, float, float]:
    """Of an iteration: adaptive, with the best fixed policy, and the bound."""
    setting, n = SETTINGS[name]
    training = trained(setting, n)
    assert training.device.peak_bytes <= training.device.capacity
    mean = statistics.fmean if setting.changes else statistics.median
    return mean(training.seconds), simulated_s(setting, n, fixed_policies(setting, n)[0][1]), bound_s(setting, n)


SETTINGS = {name: (setting, ITERATIONS) for name, setting in settings(ITERATIONS).items()} | drawn_settings()
"""The scripts of `python -m experiments.memory`, and drawn ones."""


@pytest.mark.parametrize("name", SETTINGS)
def test_adaptive_is_no_slower_than_the_best_fixed_policy_and_near_the_bound(name: str) -> None:
    adaptive_s, fixed_s, least_s = seconds(name)
    assert adaptive_s <= (1.0 if SETTINGS[name][0].changes else 1.02) * fixed_s
    assert adaptive_s <= MOST_OVER_BOUND * least_s


def test_in_most_scripts_adaptive_takes_at_most_a_tenth_more_than_the_bound() -> None:
    over = [adaptive_s / least_s for adaptive_s, _, least_s in map(seconds, SETTINGS)]
    assert statistics.median(over) <= MEDIAN_OVER_BOUND
