"""Times several ways to train side by side: they take turns, and figures are medians over the rounds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from experiments.checks.training import Batch, free_memory
from experiments.checks.vitals import Allocator
from perfmodel import Placement, Plan, Timeline, Workload


class Contender(Protocol):
    """One way to train. `open` and `close` surround each of its turns.

    name: for people.
    """

    name: str

    def open(self) -> None:
        """Make ready. Raises torch.OutOfMemoryError if it does not fit."""

    def close(self) -> None:
        """Leave the device to the next."""

    def compute(self, batch: Batch) -> None:
        """Forward and backward."""

    def step(self) -> None:
        """Update, and forget the gradients."""

    def probe(self) -> Probe | None:
        """What the last update did; None if it does not tell."""

    def finish(self) -> None:
        """Return when nothing of its is in flight."""


@dataclass(frozen=True)
class Probe:
    """One update with all gradients made before it began. workload: what its plan was made for."""

    timeline: Timeline
    plan: Plan
    workload: Workload
    prediction_s: float

    @property
    def update_s(self) -> float:
        """Seconds from the call of step() to the last end."""
        return max((span.end for span in self.timeline.spans), default=0.0)

    @property
    def resident_share(self) -> float:
        """Of the parameters, those whose state stays on the device."""
        loads = self.workload.subgroups
        return sum(loads[i].numel for i in self.plan.served(Placement.GPU_RESIDENT)) / max(self.workload.numel, 1)


@dataclass
class Score:
    """What one contender has shown.

    rounds: seconds of its iterations, a list for each round. steps: seconds of the host in their `step()`, likewise.
    allocator: what the device's allocator did in each round.
    """

    name: str
    rounds: list[list[float]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    allocator: list[dict[str, int]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    dropped: str = ""

    @property
    def iteration_s(self) -> float | None:
        """Median over the rounds of the medians within them."""
        return statistics.median(map(statistics.median, self.rounds)) if self.rounds else None

    @property
    def update_s(self) -> float | None:
        """Median of the probed updates."""
        return statistics.median(p.update_s for p in self.probes) if self.probes else None

    @property
    def step_s(self) -> float | None:
        """Seconds for which `step()` keeps the host, waiting for the device included: as `iteration_s`."""
        return statistics.median(map(statistics.median, self.steps)) if self.steps else None

    @property
    def typical(self) -> Probe | None:
        """The probe of median time."""
        return sorted(self.probes, key=lambda p: p.update_s)[len(self.probes) // 2] if self.probes else None

    def summary(self) -> dict[str, Any]:
        """For the results; what is derived from it can be computed from the rounds."""
        probe = self.typical
        return {
            "iteration_s": self.iteration_s,
            "rounds_s": self.rounds,
            "step_on_host_s": self.step_s,
            "allocator": self.allocator,
            "update_s": self.update_s,
            "updates_s": [p.update_s for p in self.probes],
            "predicted_update_s": None if probe is None else probe.prediction_s,
            "resident_share": None if probe is None else probe.resident_share,
            "plan": None if probe is None else str(probe.plan),
            "dropped": self.dropped or None,
        }


def ratio(some: Score, other: Score) -> float | None:
    """How many times as long as the other's the first one's iterations are: median over the rounds they share."""
    rounds = [statistics.median(a) / statistics.median(b) for a, b in zip(some.rounds, other.rounds, strict=False)]
    return statistics.median(rounds) if rounds else None


@dataclass(frozen=True)
class Effort:
    """Iterations of one turn, and rounds. probes: iterations that wait for backward before they step."""

    warm_up: int
    timed: int
    probes: int
    rounds: int


class Clock:
    """Reads when the device has come to a point of its work."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def mark(self) -> torch.cuda.Event | float:
        """A point: all that was queued before it has been done then."""
        if not self._cuda:
            return time.perf_counter()  # what is emulated computes on the caller's thread
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Return when the device has done everything."""
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, marks: Sequence[torch.cuda.Event | float]) -> list[float]:
        """Seconds from each mark to the next; all have been passed."""
        found = []
        for begin, end in itertools.pairwise(marks):
            if isinstance(begin, float) or isinstance(end, float):
                assert isinstance(begin, float)
                assert isinstance(end, float)
                found.append(end - begin)
            else:
                found.append(begin.elapsed_time(end) / 1e3)
        return found


def hold(
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    effort: Effort,
    clock: Clock,
    left: Callable[[], float],
    told: Callable[[dict[str, Score]], None],
) -> dict[str, Score]:
    """Rounds of all contenders until there have been enough or there is no time for another.

    left: seconds that remain. told: called after each turn. What does not fit into memory is dropped, with the reason.
    """
    scores = {c.name: Score(c.name) for c in contenders}
    longest = 0.0
    for number in range(effort.rounds):
        if number and left() < 1.1 * longest:
            break
        start = time.perf_counter()
        for contender in contenders:
            score = scores[contender.name]
            if score.dropped:
                continue
            if left() < 0:
                if not score.rounds:
                    score.dropped = "not run: no time was left"
                continue
            try:
                turn(contender, batches, effort, clock, score)
            except torch.OutOfMemoryError as error:
                score.dropped = f"does not fit: {str(error).partition('.')[0]}"
            free_memory(cuda=batches[0][0].is_cuda)
            told(scores)
        longest = max(longest, time.perf_counter() - start)
    return scores


def turn(contender: Contender, batches: Sequence[Batch], effort: Effort, clock: Clock, score: Score) -> None:
    """One contender's iterations of one round."""
    cycle = itertools.cycle(batches)
    allocator = Allocator()
    try:
        contender.open()
        for _ in range(effort.warm_up):
            contender.compute(next(cycle))
            contender.step()
        marks, steps = [], []
        for _ in range(effort.timed + 1):
            contender.compute(next(cycle))
            marks.append(clock.mark())
            start = time.perf_counter()
            contender.step()
            steps.append(time.perf_counter() - start)
        contender.finish()
        clock.wait()
        score.rounds.append(clock.between(marks))
        score.steps.append(steps)
        for _ in range(effort.probes):
            contender.compute(next(cycle))
            clock.wait()
            contender.step()
            probe = contender.probe()
            if probe is not None:
                score.probes.append(probe)
        contender.finish()
        clock.wait()
    finally:
        found = allocator.read()
        if found:
            score.allocator.append(found)
        contender.close()
