"""What others take of a device's memory: recorded training runs by phase of the iteration, and scripted neighbours."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from experiments.paper.runs import read_trace

LEVEL = 0.05
"""Share of the range of use within which it counts as the lowest."""
SEED = 5
"""Of the noise."""


@dataclass(frozen=True)
class Recording:
    """What a training process holds of its device in one iteration, by phase.

    forward, backward: bytes, sampled evenly over the phase. update: the most in that phase; what the recorded
        optimizer held in its own staging slots is part of it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: int

    @classmethod
    def read(cls, trace: str) -> Recording:
        """The iteration with the highest peak in a published trace.

        Iterations begin where use rises from its lowest, which it has between them. Backward ends at the iteration's
        peak and begins where, before that, use falls most from what it had reached: what forward alone needed goes.
        """
        used, _ = read_trace(trace)
        lowest = min(used) + LEVEL * (max(used) - min(used))
        starts = [i for i in range(len(used) - 1) if used[i] <= lowest < used[i + 1]]
        whole = max((used[slice(*ends)] for ends in itertools.pairwise(starts)), key=max)
        end = max(i for i, nbytes in enumerate(whole) if nbytes == max(whole)) + 1
        reached = list(itertools.accumulate(whole[:end], max))
        turn = max(range(1, end), key=lambda i: reached[i] - whole[i])
        # The first sample after the peak was taken while memory fell, so it belongs to neither side.
        return cls(tuple(whole[:turn]), tuple(whole[turn:end]), max(whole[end + 1 :]))

    @property
    def peak(self) -> int:
        """Bytes, the most in forward and backward."""
        return max(*self.forward, *self.backward)

    def scaled(self, factor: float) -> Recording:
        """The same of a smaller or larger model."""
        forward, backward = (tuple(round(n * factor) for n in phase) for phase in (self.forward, self.backward))
        return Recording(forward, backward, round(self.update * factor))

    def script(self) -> list[tuple[float, int]]:
        """Points of (position, bytes) for a `Script`: forward is at 0 to 1, backward at 1 to 2, the update from 2."""
        points = [
            (phase + i / len(samples), nbytes)
            for phase, samples in enumerate((self.forward, self.backward))
            for i, nbytes in enumerate(samples)
        ]
        return [*points, (2.0, self.update)]


def neighbours(most: int, iterations: int) -> dict[str, list[tuple[float, int]]]:
    """Scripts of what another process wants, as points of (iteration, bytes), by name.

    most: bytes that there are for it beside the training itself, without optimizer state. iterations: of the run.
    """

    def points(share: Callable[[int], float]) -> list[tuple[float, int]]:
        return [(float(i), int(share(i) * most)) for i in range(iterations)]

    third, period = iterations // 3, max(2, iterations // 3)
    drawn = random.Random(SEED)
    return {
        "step up": points(lambda i: 0.65 if i >= third else 0.0),
        "step down": points(lambda i: 0.65 if i < third else 0.0),
        "sawtooth": points(lambda i: 0.8 * (i % period) / (period - 1)),
        "spike": points(lambda i: 0.65 if i == iterations // 2 else 0.0),
        "leak": points(lambda i: min(1.0, 1.25 * i / (iterations - 1))),
        "noise": points(lambda i: drawn.uniform(0.3, 0.5)),
    }
