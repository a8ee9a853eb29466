"""The outcomes of a sweep side by side: series along its axis, speedups, tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.paper.sweep.predict import Outcome
from experiments.paper.sweep.spec import Configuration, Sweep

Results = Mapping[Configuration, Outcome]
Table = list[list[str]]
"""Rows of cells; the first is the heading."""

BASELINES = ("zero3_offload", "cpu")
"""What speedups are over: the first of these policies that a sweep has."""
KINDS = ("published", "measured", "simulated")
METRICS = ("update", "iteration")

_NAMES = {
    "zero3_offload": "ZeRO-Offload",
    "async_grad_only": "asynchronous gradients",
    "dos": "the paper's schedule",
    "cpu": "CPU-only, our engine",
    "ratio": "static ratio, our engine",
    "stride": "the paper's stride, our engine",
}


@dataclass(frozen=True)
class Series:
    """One of the compared along an axis. outcomes: aligned with the axis; None where there is no run."""

    policy: str
    memory: str | float | None
    outcomes: tuple[Outcome | None, ...]

    @property
    def name(self) -> str:
        memory = {"ratio": "the paper's memory", "trace": "free memory"}.get(
            str(self.memory), f"{tick(self.memory)} GiB"
        )
        return f"adaptive, {memory}" if self.policy == "adaptive" else _NAMES[self.policy]

    def values(self, kind: str, metric: str) -> list[float | None]:
        """Seconds along the axis. kind: of KINDS. metric: of METRICS."""
        field = f"{metric}_s" if kind == "simulated" else f"{kind}_{metric}_s"
        return [getattr(outcome, field, None) for outcome in self.outcomes]

    def has(self, kind: str, metric: str) -> bool:
        return any(value is not None for value in self.values(kind, metric))


@dataclass(frozen=True)
class Comparison:
    """The series of one facet of a sweep. facet: what it is of, empty if there is only one."""

    axis: str
    ticks: tuple[str, ...]
    facet: str
    series: tuple[Series, ...]

    def speedups(self, series: Series, kind: str, metric: str) -> list[float | None]:
        """How many times as long the baseline takes, of the same kind (measured: simulated and scaled-down alike)."""
        baselines = [s for policy in BASELINES for s in self.series if s.policy == policy]
        if not baselines:
            return [None] * len(self.ticks)
        pairs = zip(baselines[0].values(kind, metric), series.values(kind, metric), strict=True)
        return [base / value if base is not None and value else None for base, value in pairs]

    def table(self, metric: str) -> Table:
        """Seconds, and in brackets the speedup, one column for each series and kind."""
        columns = [(s, kind) for s in self.series for kind in KINDS if s.has(kind, metric)]
        cells = [
            [_cell(*pair) for pair in zip(s.values(kind, metric), self.speedups(s, kind, metric), strict=True)]
            if s.policy not in BASELINES
            else [_cell(value, None) for value in s.values(kind, metric)]
            for s, kind in columns
        ]
        heading = [self.axis.replace("_", " "), *(f"{s.name}\n{kind}" for s, kind in columns)]
        return [heading, *([tick, *(column[row] for column in cells)] for row, tick in enumerate(self.ticks))]


def compare(sweep: Sweep, results: Results) -> list[Comparison]:
    """What a sweep with an axis compares, one for each of its facets. A run that has no axis is at all of its ticks."""
    if sweep.axis is None:
        return []
    ticks = _distinct(results, sweep.axis)
    found = []
    for facet in _facets(sweep, results):
        members = {c: o for c, o in results.items() if _agrees(c, facet)}
        series = []
        for policy, memory in dict.fromkeys((c.policy, c.memory) for c in members):
            same = {c: o for c, o in members.items() if (c.policy, c.memory) == (policy, memory)}
            outcomes = [next((o for c, o in same.items() if _agrees(c, {sweep.axis: tick})), None) for tick in ticks]
            series.append(Series(policy, memory, tuple(outcomes)))
        label = ", ".join(f"{key.replace('_', ' ')} {tick(value)}" for key, value in facet.items())
        found.append(Comparison(sweep.axis, tuple(map(tick, ticks)), label, tuple(series)))
    return found


def listing(results: Results) -> Table:
    """One line for each run: the keys in which runs differ, and what they take."""
    keys = [key for key in vars(next(iter(results))) if len(_distinct(results, key)) > 1]
    heading = [key.replace("_", " ") for key in keys]
    heading += ["update", "iteration", "resident", "streamed", "on CPU", "of the bound", "note"]
    lines = [heading]
    for config, o in results.items():
        counts = ["" if n is None else str(n) for n in (o.resident, o.streamed, o.on_cpu)]
        bound = f"{o.update_s / o.bound_s:.2f}" if o.bound_s and o.update_s else ""
        times = [_cell(o.update_s, None), _cell(o.iteration_s, None)]
        lines.append([*(tick(getattr(config, key)) for key in keys), *times, *counts, bound, o.note])
    return lines


def _facets(sweep: Sweep, results: Results) -> Iterator[dict[str, object]]:
    """The combinations of the facets' values that there are runs of."""
    values = [_distinct(results, key) for key in sweep.facets]
    used = [key for key, found in zip(sweep.facets, values, strict=True) if found]
    for combination in itertools.product(*(found for found in values if found)):
        facet = dict(zip(used, combination, strict=True))
        if any(_agrees(config, facet) for config in results):
            yield facet


def _agrees(config: Configuration, values: Mapping[str, object]) -> bool:
    return all(getattr(config, key) in (value, None) for key, value in values.items())


def _distinct(results: Results, key: str) -> Sequence[object]:
    found = dict.fromkeys(getattr(config, key) for config in results)
    found.pop(None, None)
    return tuple(found)


def tick(value: object) -> str:
    """A value as people write it: 100M rather than 100000000, 4 rather than 4.0."""
    if isinstance(value, int) and not isinstance(value, bool):
        for unit, name in ((10**9, "B"), (10**6, "M")):
            if value >= unit:
                return f"{value / unit:g}{name}"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _cell(seconds: float | None, speedup: float | None) -> str:
    if seconds is None:
        return "-"
    text = f"{seconds:.2f} s" if seconds >= 0.995 else f"{seconds:.3f} s"
    return text if speedup is None else f"{text} ({speedup:.2f}×)"
