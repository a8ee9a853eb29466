"""What others take of a device's memory: recorded training runs by phase of the iteration, and scripted neighbours."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    def read(cls, path: str | Path) -> Recording:
        """The iteration with the highest peak in a trace.

        Iterations begin where use rises from its lowest, which it has between them. Backward ends at the iteration's
        peak and begins where, before that, use falls most from what it had reached: what forward alone needed goes.
        Raises OSError or ValueError as `read_trace` does, and ValueError for a trace without a whole iteration.
        """
        used = [nbytes for _, nbytes in read_trace(path)]
        lowest = min(used) + LEVEL * (max(used) - min(used))
        starts = [i for i in range(len(used) - 1) if used[i] <= lowest < used[i + 1]]
        if len(starts) < 2:
            raise ValueError(f"{path}: no whole iteration between two rises from the lowest use")
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


def read_trace(path: str | Path) -> list[tuple[float, int]]:
    """A recorded trace as points of (seconds, bytes used), from a CSV file with columns `time_s` and `used_bytes`.

    Raises OSError when the file cannot be read, ValueError naming it and the line when it is no trace.
    """
    points = []
    with Path(path).open(newline="") as file:
        rows = csv.DictReader(file)
        if not {"time_s", "used_bytes"} <= set(rows.fieldnames or ()):
            raise ValueError(f"{path}: a memory trace has columns time_s and used_bytes, found {rows.fieldnames}")
        for number, row in enumerate(rows, start=2):
            try:
                points.append((float(row["time_s"]), int(row["used_bytes"])))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not points:
        raise ValueError(f"{path}: no samples")
    return points
