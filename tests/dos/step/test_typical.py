"""A figure that plans follow, from numbers."""

from __future__ import annotations

import math
import random

import pytest

from dos.step.typical import Typical

NOISE = [math.exp(0.05 * number) for number in range(-2, 3)] * (Typical.REVIEWS[-1] // 5)


@pytest.mark.parametrize("place", [2, 4])
def test_a_figure_settles_whatever_the_noise_s_order(place: int) -> None:
    found = set()
    for seed in range(20):
        rng, figure, known = random.Random(seed), Typical(place=place), list[float]()
        for noise in [*rng.sample(NOISE, len(NOISE)), *rng.choices(NOISE, k=200)]:
            figure.add(noise)
            known.append(figure.seconds)
        found.add(known[-1])
        assert len({*known[Typical.REVIEWS[0] - 1 :]}) <= len(Typical.REVIEWS)
        assert len({*known[Typical.REVIEWS[-1] - 1 :]}) == 1
    assert found == {sorted(NOISE)[len(NOISE) // place]}


def test_a_lasting_change_is_followed_within_a_few_and_reviewed_again() -> None:
    figure = Typical()
    for _ in range(100):
        figure.add(1.0)
    for seconds in [1.5] * 4:
        figure.add(seconds)
    assert figure.seconds == 1.5
    for _ in range(Typical.REVIEWS[-1]):
        figure.add(1.4)
    assert figure.seconds == 1.4
