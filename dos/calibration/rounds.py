"""Times work in rounds, after all ranks have begun together: medians with their spread."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfmodel import Op, Span

Exchange = Callable[[Any], list[Any]]
"""Returns the values of all ranks to each of them, once all have called."""


Work = Callable[[], list[Span]]
"""Runs some jobs of a kind; returns their spans."""


@dataclass(frozen=True)
class Figure:
    """The median of some runs and their spread, the interquartile range over the median."""

    value: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
        return cls(middle, (high - low) / middle)

    def rate(self, amount: float) -> Figure:
        """Return `amount` per second, of a figure in seconds in which `amount` is done."""
        return Figure(amount / self.value, self.spread)

    def without(self, fixed: Figure, amount: float) -> Figure:
        """Return this rate, at which `amount` was done, without a fixed cost in seconds."""
        seconds = amount / self.value
        return Figure(amount / max(seconds - fixed.value, seconds / 2), self.spread)


@dataclass(frozen=True)
class Effort:
    """The duration and the size of measurements.

    seconds: the least for each figure. repeats: the least number for each figure, besides the warm-up.
    limit_s: seconds of all figures together, without disks; they take precedence over `seconds` and `repeats`.
    host_numel, device_numel: parameters updated at once on the host and on the device, far more than caches hold.
    copy_bytes: bytes of one transfer. disk_bytes: the most bytes of one read or write.
    emulated_s: seconds that one update or transfer of an emulated device may last.
    formats: whether updates are measured in all formats of the state, or only in mixed precision.
    """

    seconds: float
    repeats: int
    host_numel: int
    device_numel: int
    copy_bytes: int
    emulated_s: float = 0.0
    formats: bool = True
    disk_bytes: int = 2**26
    limit_s: float = math.inf


class Rounds:
    """Times work for as long as the effort says. All figures are means over the ranks.

    parts: the figures that are still to come, which share the time that is left until `ends`, by the clock.
    """

    def __init__(self, effort: Effort, exchange: Exchange, clock: Callable[[], float] = time.perf_counter) -> None:
        self.effort = effort
        self.exchange = exchange
        self.parts, self.ends = 1, math.inf
        self._clock = clock

    def limit(self, seconds: float, parts: int) -> None:
        """Let so many figures together take so many seconds from now on, or little more."""
        self.parts, self.ends = parts, self._clock() + seconds

    def _latest(self, turns: int) -> float:
        """Return when a figure that begins now must end. turns: its share in `parts`, from which it is taken off."""
        now, share = self._clock(), turns / max(turns, self.parts)
        self.parts -= turns
        return now + share * (self.ends - now)

    def timed(self, run: Callable[[], list[list[float]]], turns: int = 1) -> list[Figure]:
        """Return a figure for each list of times that `run` returns, over rounds that all ranks begin together.

        turns: the factor of the effort's seconds.
        """
        # All ranks begin together: one that measures alone would find the links and host DRAM free of the others.
        self.exchange(None)
        latest = self._latest(turns)
        samples: list[list[float]] = [[] for _ in run()]  # warm-up: first touch, compilation, threads
        end = min(self._clock() + turns * self.effort.seconds, latest)
        rounds = 0
        while not rounds or self._clock() < (latest if rounds < self.effort.repeats else end):
            for list_, more in zip(samples, run(), strict=True):
                list_ += more
            rounds += 1
        return [self.agree(Figure.of(list_)) for list_ in samples]

    def fit(self, run: Callable[[int], list[Span]], size: int, small: int) -> tuple[Figure, Figure]:
        """Return the size done in a second, and the fixed cost in seconds, by a line of time through two sizes.

        run: runs some jobs of a size and returns their spans.
        """

        def seconds(size: int) -> list[list[float]]:
            return [[span.duration for span in run(size)]]

        many, few = (self.timed(partial(seconds, n))[0] for n in (size, small))
        fixed = (few.value * size - many.value * small) / (size - small)
        fixed = min(max(fixed, 0.0), many.value / 2)
        return Figure(size / (many.value - fixed), many.spread), Figure(fixed, few.spread)

    def together(self, works: Mapping[Op, Work], slowest_s: float, update: Work | None = None) -> dict[Op, Figure]:
        """Return the seconds of one job of each work, and of `update`, while all of them run repeatedly.

        slowest_s: the approximate seconds of the slowest job.
        """
        stop = threading.Event()
        self.exchange(None)
        rounds = self.effort.repeats + 2  # the first and the last may have been alone for a while

        def repeat(work: Work) -> list[Span]:
            found = work()
            while not stop.is_set():
                found += work()
            return found

        updates: list[Span] = []
        with ThreadPoolExecutor(len(works)) as pool:
            futures = {op: pool.submit(repeat, work) for op, work in works.items()}
            try:
                latest = self._latest(1)
                end = min(self._clock() + max(self.effort.seconds, rounds * slowest_s), latest)
                while update is not None and (
                    not updates or self._clock() < (latest if len(updates) < rounds else end)
                ):
                    updates += update()
                time.sleep(max(0.0, end - self._clock()))
            finally:
                stop.set()
        spans = {op: future.result() for op, future in futures.items()}
        if update is not None:
            spans[Op.UPDATE] = updates
        begin, end = max(of_op[0].start for of_op in spans.values()), min(of_op[-1].end for of_op in spans.values())
        beside = {op: [s for s in of_op if begin <= s.start and s.end <= end] or of_op for op, of_op in spans.items()}
        return {op: self.agree(Figure.of([s.duration for s in of_op])) for op, of_op in beside.items()}

    def agree(self, figure: Figure) -> Figure:
        """Return the mean over all ranks."""
        return mean(self.exchange(figure))


def mean(figures: Sequence[Figure]) -> Figure:
    """Return the mean value with the largest spread."""
    return Figure(statistics.fmean(f.value for f in figures), max(f.spread for f in figures))


class Link(NamedTuple):
    """The measurements of a link.

    rates: the fields of HardwareProfile, by operation. latency: the field of the fixed cost.
    update: the name of the rate of CPU updates beside both ways.
    nbytes, small: bytes of a transfer, and of a small one, which shows the fixed cost.
    transfer: runs some transfers one way, with the bytes of each; returns their spans.
    """

    rounds: Rounds
    rates: Mapping[Op, str]
    latency: str
    update: str
    nbytes: int
    small: int
    transfer: Callable[[Op, int], list[Span]]

    def alone(self) -> dict[str, Figure]:
        """Measure the bytes/s of each way alone, and the mean of their fixed costs in seconds."""
        found = {op: self.rounds.fit(partial(self.transfer, op), self.nbytes, self.small) for op in self.rates}
        rates = {name: found[op][0] for op, name in self.rates.items()}
        return {**rates, self.latency: mean([fixed for _, fixed in found.values()])}

    def duplex(self, alone: Mapping[str, Figure]) -> dict[str, Figure]:
        """Measure the bytes/s of each way while both run, without the fixed cost, as alone."""
        alone_s, seconds = self._seconds(alone), self._together(alone, self.rates)
        return {f"{name}_duplex": seconds[op].rate(alone[name].value * alone_s[op]) for op, name in self.rates.items()}

    @property
    def ways(self) -> list[tuple[Op, ...]]:
        """Each way, and both."""
        return [*((op,) for op in self.rates), tuple(self.rates)]

    def names_beside(self, ways: tuple[Op, ...]) -> list[str]:
        """Return the names of the rates of updates and of copies these ways while all of them run."""
        if len(ways) > 1:
            return [self.update, *(f"{self.rates[op]}_beside" for op in ways)]
        name = self.rates[ways[0]]
        return [f"{self.update}_{name.removesuffix('_bandwidth')}", f"{name}_beside_update"]

    def beside(self, alone: Mapping[str, Figure], update: Work, numel: int, ways: tuple[Op, ...]) -> dict[str, Figure]:
        """Measure parameters/s of `update` and bytes/s of these ways while all of them run, fixed costs included.

        numel: parameters of one update.
        """
        seconds = self._together(alone, ways, update)
        rates = [seconds[Op.UPDATE].rate(numel), *(seconds[op].rate(self.nbytes) for op in ways)]
        return dict(zip(self.names_beside(ways), rates, strict=True))

    def rate_without(self, figures: Mapping[str, Figure], op: Op, ways: tuple[Op, ...]) -> float:
        """Return the bytes/s of one of these ways while no updates run, fixed costs included."""
        name = self.rates[op]
        without = figures[name if len(ways) == 1 else f"{name}_duplex"].value
        return self.nbytes / self._seconds(figures)[op] * without / figures[name].value

    def _together(
        self, alone: Mapping[str, Figure], ways: Collection[Op], update: Work | None = None
    ) -> dict[Op, Figure]:
        works = {op: partial(self.transfer, op, self.nbytes) for op in ways}
        return self.rounds.together(works, max(self._seconds(alone).values()), update)

    def _seconds(self, alone: Mapping[str, Figure]) -> dict[Op, float]:
        """Return the seconds of a transfer alone, by operation."""
        return {op: alone[self.latency].value + self.nbytes / alone[name].value for op, name in self.rates.items()}
