"""Measures side by side: contestants take turns, figures are medians, limits are values, one line of JSON ends it.

with measuring(arguments.json) as (console, progress):
    seconds = take_turns({"ours": ours, "theirs": theirs}, batches, warm_up=1)
rows = [{"ours_s": medians(seconds)["ours"], "over_theirs": ratio(seconds["ours"], seconds["theirs"])}]
limits = [Limit.at_most("slower than theirs", rows[0]["over_theirs"], 1.05)]
return finish({"rows": rows}, console, arguments.json, limits)
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

S = TypeVar("S")
T = TypeVar("T")
Progress = Callable[[str], object]
"""Shows people what is being measured."""

FILE_WIDTH = 170
"""Columns of tables that are not shown on a terminal, so that files have them whole."""
EMULATED_SWITCH_S = 1e-4
"""Seconds after which Python lets another of the threads go on that stand for links; it would be 5 ms."""


class Dropped(Exception):  # noqa: N818  (not an error: the others go on)
    """Raised by a contestant that takes no further turn."""


def take_turns(
    contestants: Mapping[str, Callable[[S], T]],
    rounds: Sequence[S],
    *,
    warm_up: int = 0,
    mirrored: bool = False,
    left: Callable[[], float] = lambda: math.inf,
    on_turn: Progress = lambda name: None,
) -> dict[str, list[T]]:
    """Results of all contestants by name, round by round: one turn each in every round, so that noise falls on all.

    rounds: the argument of each round; every contestant is called with it, and returns what was measured.
    warm_up: rounds at the beginning that do not count. mirrored: each round is gone through forth and back, so each
    contestant has two results of it. left: seconds that remain; no round is begun that would take longer, and no turn
    after them. on_turn: is called with a contestant's name before its turn.
    """
    found: dict[str, list[T]] = {name: [] for name in contestants}
    playing = list(contestants)
    longest_s = 0.0
    for number, given in enumerate(rounds):
        if number and left() < 1.1 * longest_s:
            break
        begin = time.perf_counter()
        for name in playing + playing[::-1] if mirrored else list(playing):
            if left() < 0 or name not in playing:
                continue
            on_turn(name)
            try:
                result = contestants[name](given)
            except Dropped:
                playing.remove(name)
                continue
            if number >= warm_up:
                found[name].append(result)
        longest_s = max(longest_s, time.perf_counter() - begin)
    return found


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes."""
    begin = clock()
    work()
    return clock() - begin


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median over the rounds of each contestant that has had a turn."""
    return {name: statistics.median(values) for name, values in results.items() if values}


def ratio(some: Sequence[float], other: Sequence[float]) -> float | None:
    """How many times as long as the other some take: the median of the ratios within rounds, None without a round.

    A change of load between two rounds cancels out.
    """
    ratios = [a / b for a, b in zip(some, other, strict=False)]
    return statistics.median(ratios) if ratios else None


def bits_of(model: nn.Module, optimizer: Optimizer | None = None) -> list[Tensor]:
    """Copies of the bytes of parameters and, with an optimizer, of its state."""
    import torch

    entries = () if optimizer is None else optimizer.state.values()
    state = (t for entry in entries for t in entry.values() if isinstance(t, torch.Tensor))
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in (*model.parameters(), *state)]


def all_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are pairwise the same."""
    return all(a.equal(b) for a, b in zip(some, others, strict=True))


@dataclass(frozen=True)
class Limit:
    """A figure that was measured and what is allowed for it.

    measured: None if there is no figure. allowed: in words, such as "at most 1.1". met: None if it was not measured.
    note: of what, or compared with what.
    """

    name: str
    measured: float | None
    allowed: str
    met: bool | None
    note: str = ""

    @classmethod
    def at_most(cls, name: str, measured: float | None, allowed: float, note: str = "") -> Limit:
        return cls(name, measured, f"at most {allowed:g}", None if measured is None else measured <= allowed, note)

    @classmethod
    def at_least(cls, name: str, measured: float | None, allowed: float, note: str = "") -> Limit:
        return cls(name, measured, f"at least {allowed:g}", None if measured is None else measured >= allowed, note)

    @property
    def missed(self) -> bool:
        """Whether it was measured and is not what is allowed."""
        return self.met is False


def missed(limits: Iterable[Limit]) -> list[str]:
    """The names of those that are missed."""
    return [limit.name for limit in limits if limit.missed]


def console_of(as_json: bool) -> Console:
    """The console on which a command prints tables, wide where it is no terminal; stderr if stdout has JSON."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


@contextmanager
def measuring(as_json: bool, *, emulated: bool = True) -> Iterator[tuple[Console, Progress]]:
    """The console of a command, and what says there what is being measured.

    as_json: tables go to stderr, so that stdout has the line of JSON alone. emulated: torch computes on one thread, as
    one core computes for the accelerator, and another is the host; threads that stand for links hardly wait
    for Python's lock, as hardware waits for none. The garbage collector leaves out what was imported, which would take
    it a tenth of a second in whichever iteration it runs.
    """
    interval_s = sys.getswitchinterval()
    if emulated:
        import torch
        import torch._dynamo  # as the first step of an optimizer does

        torch.set_num_threads(1)
        sys.setswitchinterval(EMULATED_SWITCH_S)
        gc.collect()
        gc.freeze()
    console = console_of(as_json)
    try:
        with console.status("measuring") as status:
            yield console, status.update
    finally:
        sys.setswitchinterval(interval_s)
        gc.unfreeze()


def finish(values: Any, console: Console, as_json: bool, limits: Sequence[Limit] | None = None) -> int:
    """Say which limits are missed, print the one line of JSON if it was asked for; the exit status.

    values: what JSON has; with limits also `missed`, their names. The status is 1 if a limit is missed, 0 otherwise.
    """
    if limits is not None:
        values = {**values, "missed": missed(limits)}
        console.print(f"missed: {', '.join(values['missed']) or 'nothing'}")
    if as_json:
        print(json.dumps(values))
    return int(bool(missed(limits or ())))
