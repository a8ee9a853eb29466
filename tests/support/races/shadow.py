"""Who accessed which bytes last, by vector clocks: finds two accesses that nothing orders, whatever the timing was."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import NamedTuple

Clock = Mapping[int, int]
"""What is known of each actor: all accesses up to this time of it come before."""
Place = tuple[CodeType, int]
"""A line of code."""


class Actor:
    """A queue whose accesses are in order: a thread, a stream or the caller's queue on a device."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.time = 1
        self.clock: dict[int, int] = {number: 1}
        self.changes = 0

    def send(self) -> Clock:
        """Return all that comes before whatever receives it. Later accesses do not."""
        sent = dict(self.clock)
        self.time += 1
        self.clock[self.number] = self.time
        return sent

    def receive(self, clock: Clock) -> None:
        """Come behind what was sent."""
        mine = self.clock
        for number, time in clock.items():
            if time > mine.get(number, 0) and number != self.number:
                mine[number] = time
                self.changes += 1


class Access(NamedTuple):
    """An access of an actor. job: the number of the job in which it is, 0 in none.

    spared: accesses by these actors, in jobs up to a number, are no race with this one.
    releases: whether the memory is another's from then on.
    """

    actor: Actor
    time: int
    what: str
    writes: bool
    places: tuple[Place, ...]
    job: int = 0
    spared: Mapping[int, int] = {}
    releases: bool = False

    def __str__(self) -> str:
        lines = " < ".join(f"{code.co_filename}:{line} {code.co_name}" for code, line in self.places)
        return f"{'write' if self.writes else 'read'} by {self.what}, {self.actor.name}, issued at {lines}"


class Race(NamedTuple):
    """Two accesses of bytes from `first` to `end`, one of them a write, that nothing orders."""

    before: Access
    after: Access
    first: int
    end: int

    @property
    def key(self) -> tuple[object, ...]:
        """The same for two races of one cause."""
        return tuple((a.what, a.actor.name, a.writes, a.places[:1]) for a in (self.before, self.after))


class _Bytes:
    """Neighbouring bytes that were accessed alike, up to `end`."""

    __slots__ = ("end", "reads", "write")

    def __init__(self, end: int, write: Access | None, reads: dict[int, Access]) -> None:
        self.end, self.write, self.reads = end, write, reads


class Shadow:
    """The last write of each byte, and the reads since."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._of: dict[int, _Bytes] = {}

    def access(self, first: int, end: int, access: Access, known: Clock) -> Iterator[Race]:
        """Note an access; yield the races with those before. known: what comes before it."""
        found = self._of.get(first)
        for start, each in [(first, found)] if found is not None and found.end == end else self._cover(first, end):
            write = each.write
            if write is not None and not _ordered(write, access, known):
                yield Race(write, access, start, each.end)
            if not access.writes:
                each.reads[access.actor.number] = access
                continue
            for read in each.reads.values():
                if not _ordered(read, access, known):
                    yield Race(read, access, start, each.end)
            each.write = access
            if each.reads:
                each.reads = {}

    def forget(self, first: int, end: int) -> None:
        """Forget all accesses: the memory is another's now."""
        if self._starts and first < end:
            for start, _ in list(self._overlapping(first, end)):
                self._split(start, first)
                self._split(max(start, first), end)
            low, high = bisect.bisect_left(self._starts, first), bisect.bisect_left(self._starts, end)
            for start in self._starts[low:high]:
                del self._of[start]
            del self._starts[low:high]

    def _cover(self, first: int, end: int) -> list[tuple[int, _Bytes]]:
        """Return parts that together are these bytes."""
        found, at = list[tuple[int, _Bytes]](), first
        for start, _ in list(self._overlapping(first, end)):
            self._split(start, first)
            start = max(start, first)
            self._split(start, end)
            if at < start:
                found.append((at, self._add(at, start)))
            found.append((start, self._of[start]))
            at = self._of[start].end
        if at < end:
            found.append((at, self._add(at, end)))
        return found

    def _overlapping(self, first: int, end: int) -> Iterator[tuple[int, _Bytes]]:
        place = max(0, bisect.bisect_right(self._starts, first) - 1)
        while place < len(self._starts) and self._starts[place] < end:
            each = self._of[self._starts[place]]
            if each.end > first:
                yield self._starts[place], each
            place += 1

    def _split(self, start: int, at: int) -> None:
        each = self._of[start]
        if start < at < each.end:
            self._add(at, each.end, each.write, dict(each.reads))
            each.end = at

    def _add(self, start: int, end: int, write: Access | None = None, reads: dict[int, Access] | None = None) -> _Bytes:
        bisect.insort(self._starts, start)
        self._of[start] = _Bytes(end, write, {} if reads is None else reads)
        return self._of[start]


def _ordered(before: Access, access: Access, known: Clock) -> bool:
    return (
        known.get(before.actor.number, 0) >= before.time
        or before.actor is access.actor
        or access.job <= before.spared.get(access.actor.number, -1)
        or before.job <= access.spared.get(before.actor.number, -1)
    )
