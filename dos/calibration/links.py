"""Measures both ways of a link, between the host and the device or the disk: alone, at once, and beside updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from dos.calibration.rounds import Figure, Rounds, Work, mean
from perfmodel import Op, Span


class Link(NamedTuple):
    """What is to be measured of a link.

    rates: the fields of HardwareProfile, by operation. latency: that of the fixed cost.
    update: what the rate of CPU updates beside it is called.
    nbytes, small: of a transfer, and of one that shows the fixed cost.
    transfer: makes some transfers one way, of so many bytes each; gives when they ran.
    """

    rounds: Rounds
    rates: Mapping[Op, str]
    latency: str
    update: str
    nbytes: int
    small: int
    transfer: Callable[[Op, int], list[Span]]

    def alone(self) -> dict[str, Figure]:
        """Bytes/s of each way alone, and seconds of fixed cost: the mean of both."""
        found = {op: self.rounds.fit(partial(self.transfer, op), self.nbytes, self.small) for op in self.rates}
        rates = {name: found[op][0] for op, name in self.rates.items()}
        return {**rates, self.latency: mean([fixed for _, fixed in found.values()])}

    def duplex(self, alone: Mapping[str, Figure]) -> dict[str, Figure]:
        """Bytes/s of each way while both run; the fixed cost counted apart, as alone."""
        alone_s, seconds = self._seconds(alone), self._together(alone)
        return {f"{name}_duplex": seconds[op].rate(alone[name].value * alone_s[op]) for op, name in self.rates.items()}

    def beside(self, alone: Mapping[str, Figure], update: Work, numel: int) -> dict[str, Figure]:
        """Bytes/s of each way and parameters/s of `update`, of so many, while all three run; fixed costs included."""
        seconds = self._together(alone, update)
        rates = {f"{name}_beside": seconds[op].rate(self.nbytes) for op, name in self.rates.items()}
        return {self.update: seconds[Op.UPDATE].rate(numel), **rates}

    def _together(self, alone: Mapping[str, Figure], update: Work | None = None) -> dict[Op, Figure]:
        works = {op: partial(self.transfer, op, self.nbytes) for op in self.rates}
        return self.rounds.together(works, max(self._seconds(alone).values()), update)

    def _seconds(self, alone: Mapping[str, Figure]) -> dict[Op, float]:
        """Of a transfer alone."""
        return {op: alone[self.latency].value + self.nbytes / alone[name].value for op, name in self.rates.items()}
