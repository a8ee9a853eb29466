"""Scripts of the device memory that another process wants, iteration by iteration."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Points = Sequence[tuple[float, int]]
"""A script: bytes from each iteration on."""
Share = Callable[[int], float]
"""Of the memory beside the training itself, without optimizer state, by the number of the iteration."""
SEED = 5
"""Of the noise that the experiment has."""


def step(at: int, before: float, after: float) -> Share:
    """Another share from iteration `at` on."""
    return lambda i: after if i >= at else before


def sawtooth(period: int, low: float, high: float) -> Share:
    """It rises for so many iterations, at least two, and begins again."""
    return lambda i: low + (high - low) * (i % period) / (period - 1)


def spike(at: int, share: float) -> Share:
    """One iteration."""
    return lambda i: share if i == at else 0.0


def leak(slope: float) -> Share:
    """It rises in each iteration until it is all."""
    return lambda i: min(1.0, slope * i)


def noise(low: float, high: float, seed: int) -> Share:
    """Evenly distributed."""
    drawn = random.Random(seed)
    return lambda i: drawn.uniform(low, high)


def wanted(share: Share, most: int, iterations: int) -> Points:
    """Points of (iteration, bytes). most: bytes that there are beside the training itself, without optimizer state."""
    return [(float(i), int(share(i) * most)) for i in range(iterations)]


def neighbours(most: int, iterations: int) -> dict[str, Points]:
    """Scripts of what another process wants, by name. Arguments: see `wanted`."""
    third, last = iterations // 3, iterations - 1
    shares = {
        "step up": step(third, 0.0, 0.65),
        "step down": step(third, 0.65, 0.0),
        "sawtooth": sawtooth(max(2, third), 0.0, 0.8),
        "spike": spike(iterations // 2, 0.65),
        "leak": leak(1.25 / last),
        "noise": noise(0.3, 0.5, SEED),
    }
    return {name: wanted(share, most, iterations) for name, share in shares.items()}
