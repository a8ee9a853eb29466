"""Sharing of host DRAM: the one rule that simulator, closed form, bound and emulated devices follow."""

from __future__ import annotations

from collections.abc import Sequence


def shared_speeds(demands: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """The share of its own rate that each of several concurrent users of a capacity keeps.

    demands: the rate of each alone, in the unit of the capacity (bytes/s). weights: of any scale.

    All keep their rate while the capacity suffices. Beyond, shares are in proportion to weights, and what users with a
    share of 1 leave goes to the others; users without demand have 1. No share falls when another user demands less.
    """
    speeds, asked = [1.0] * len(demands), sum(demands)
    if asked <= capacity:
        return speeds
    heavy_first = sorted((user for user in range(len(demands)) if demands[user] > 0), key=lambda user: -weights[user])
    weighted = sum(demand * weight for demand, weight in zip(demands, weights, strict=True))
    for place, user in enumerate(heavy_first):
        if capacity * weights[user] < weighted:
            for other in heavy_first[place:]:
                speeds[other] = capacity * weights[other] / weighted
            break
        capacity -= demands[user]
        weighted -= demands[user] * weights[user]
    return speeds
