"""Times several ways to train side by side: they take turns, and figures are medians over the rounds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.check.models import Batch, free_memory


class Contender:
    """One way to train. `open` and `close` surround each of its turns."""

    name: str

    def open(self) -> None:
        """Make ready. Raises torch.OutOfMemoryError if it does not fit, Broken if it does not work here."""

    def close(self) -> None:
        """Leave the device to the next."""

    def compute(self, batch: Batch) -> None:
        """Forward and backward."""

    def step(self) -> None:
        """Update, and forget the gradients."""

    def metrics(self) -> dict[str, float]:
        """Of the last update, once nothing is in flight; empty if it does not tell."""
        return {}


class Broken(Exception):  # noqa: N818  (the contender's own error is its cause)
    """A contender does not work here; its text says why."""


@dataclass
class Score:
    """What one contender has shown.

    rounds: seconds of its iterations, a list for each round. steps: seconds of the host in their `step()`, likewise.
    updates: metrics of updates that began when all gradients were there.
    reserved_bytes: the most that the allocator held.
    """

    rounds: list[list[float]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    reserved_bytes: int = 0
    dropped: str = ""

    def typical(self) -> dict[str, float]:
        """The metrics of the update of median time."""
        found = sorted(self.updates, key=lambda metrics: metrics["update_s"])
        return found[len(found) // 2] if found else {}

    def summary(self) -> dict[str, Any]:
        """For the results. Iterations: the median over the rounds of the medians within them."""
        iteration_s, step_s = (
            statistics.median(map(statistics.median, times)) if times else None for times in (self.rounds, self.steps)
        )
        return {
            "iteration_s": iteration_s,
            "rounds_s": self.rounds,
            "step_on_host_s": step_s,
            "reserved_bytes": self.reserved_bytes,
            "update": self.typical() or None,
            "dropped": self.dropped or None,
        }


def ratio(some: Score, other: Score) -> float | None:
    """How many times as long as the other's the first one's iterations are: median over the rounds they share."""
    rounds = [statistics.median(a) / statistics.median(b) for a, b in zip(some.rounds, other.rounds, strict=False)]
    return statistics.median(rounds) if rounds else None


@dataclass(frozen=True)
class Effort:
    """Iterations of one turn, and rounds. updates: iterations that wait for backward before they step."""

    warm_up: int
    timed: int
    updates: int
    rounds: int


class Clock:
    """Reads when the device has come to a point of its work."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def mark(self) -> Any:
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

    def between(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next; all have been passed."""
        pairs = itertools.pairwise(marks)
        return [begin.elapsed_time(end) / 1e3 if self._cuda else end - begin for begin, end in pairs]


def run_rounds(
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    effort: Effort,
    clock: Clock,
    left: Callable[[], float],
    on_progress: Callable[[dict[str, Score]], None],
) -> dict[str, Score]:
    """Rounds of all contenders until there have been enough or there is no time for another.

    left: seconds that remain. on_progress: called after each turn. A contender that does not fit into memory or does
    not work is dropped, with the reason.
    """
    scores = {c.name: Score() for c in contenders}
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
                score.dropped = "" if score.rounds else "not run: no time was left"
                continue
            try:
                turn(contender, batches, effort, clock, score)
            except torch.OutOfMemoryError as error:
                score.dropped = f"does not fit: {str(error).partition('.')[0]}"
            except Broken as error:
                score.dropped = str(error)
            free_memory(cuda=batches[0][0].is_cuda)
            on_progress(scores)
        longest = max(longest, time.perf_counter() - start)
    return scores


def turn(contender: Contender, batches: Sequence[Batch], effort: Effort, clock: Clock, score: Score) -> None:
    """One contender's iterations of one round."""
    cycle = itertools.cycle(batches)
    cuda = batches[0][0].is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
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
        contender.metrics()  # waits for what is in flight
        clock.wait()
        score.rounds.append(clock.between(marks))
        score.steps.append(steps)
        for _ in range(effort.updates):
            contender.compute(next(cycle))
            clock.wait()
            contender.step()
            found = contender.metrics()
            if "update_s" in found:
                score.updates.append(found)
    finally:
        if cuda:
            score.reserved_bytes = max(score.reserved_bytes, torch.cuda.max_memory_reserved())
        contender.close()
