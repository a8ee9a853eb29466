"""How CPU updates and copies share host memory: what explains best the rates that they kept beside each other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dos.calibration.rounds import Figure, Link
from perfmodel import Op
from perfmodel.format import MIXED
from perfmodel.lanes import shared_speeds

UPDATE = "cpu_update_rate"

UNCONTENDED = 0.95
"""The least share of its own rate with which something counts as not slowed down by others."""

_TRIED = 201
"""Bandwidths of host memory that are tried."""


class _Meeting(NamedTuple):
    """CPU updates and copies, one way or both, that ran at once.

    demands: bytes/s of host memory by rate, without the other kind. kept: the shares of them while both ran.
    """

    demands: dict[str, float]
    kept: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes/s of all."""
        return math.fsum(demand * self.kept[name] for name, demand in self.demands.items())


def shares(figures: Mapping[str, Figure], link: Link) -> dict[str, Figure]:
    """Return `host_bandwidth` of one rank, and the weights of copies unless nothing was slowed down.

    The model (`perfmodel.lanes.shared_speeds`) lets CPU updates and copies run at their own rates until the bytes/s
    that they cause together reach the host bandwidth, and from there on shares it in proportion to weights. Of the
    shares of its rate that a copy kept over the CPU's, those and that bandwidth are taken which come nearest to all
    shares that were measured: of copies each way beside updates, and of both.

    figures: with those of `link.beside`, and the rate of updates alone by the same number of threads.
    """
    meetings = [_meeting(figures, link, ways) for ways in link.ways]
    slowed = [kept for _, kept in meetings if min(kept.values()) <= UNCONTENDED]
    copies = list(link.rates.values())
    seen = [[kept[name] / kept[UPDATE] for kept in slowed if name in kept] or [1.0] for name in copies]
    totals = [each.total for each in meetings]
    tried = itertools.product(
        *({*ratios, statistics.geometric_mean(ratios)} for ratios in seen),
        np.geomspace(min(totals), max(totals), _TRIED).tolist(),
    )

    def error(weights: Sequence[float], host: float) -> float:
        weight = dict(zip((UPDATE, *copies), (1.0, *weights), strict=True))
        found = 0.0
        for demands, kept in meetings:
            speeds = shared_speeds(list(demands.values()), [weight[name] for name in demands], host)
            found += sum(math.log(speed / kept[name]) ** 2 for name, speed in zip(demands, speeds, strict=True))
        return found

    *weights, host = min(tried, key=lambda each: error(each[:-1], each[-1]))
    spread = max(figure.spread for name, figure in figures.items() if "_beside" in name)
    found = {name.replace("_bandwidth", "_weight"): weight for name, weight in zip(copies, weights, strict=True)}
    found = {"host_bandwidth": host, **(found if slowed else {})}
    return {name: Figure(value, spread) for name, value in found.items()}


def _meeting(figures: Mapping[str, Figure], link: Link, ways: tuple[Op, ...]) -> _Meeting:
    update, *copies = (figures[name].value for name in link.names_beside(ways))
    alone = figures[UPDATE].value
    without = {link.rates[op]: link.rate_without(figures, op, ways) for op in ways}
    kept = {name: rate / without[name] for name, rate in zip(without, copies, strict=True)}
    return _Meeting({UPDATE: alone * MIXED.update_traffic, **without}, {UPDATE: update / alone, **kept})
