"""Timelines: spans of work on lanes. The engine records one, the simulator predicts one."""

from __future__ import annotations

import enum
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class Lane(enum.Enum):
    """A resource that serves one span at a time."""

    __hash__ = object.__hash__  # Enum's own is a call of Python for each look-up, in hooks and simulations

    CPU = "CPU"
    GPU = "GPU"
    H2D = "H2D"
    D2H = "D2H"
    READ = "disk read"
    WRITE = "disk write"


class Op(enum.Enum):
    """Work of a lane in a span."""

    __hash__ = object.__hash__  # Enum's own is a call of Python for each look-up, in hooks and simulations

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    """D2H: a gradient leaves, for an update on the CPU or because gradients are offloaded."""
    PREFETCH = "prefetch"
    """H2D: state goes to a slot, or comes to stay; offloaded gradients come up."""
    UPDATE = "update"
    """CPU or GPU."""
    FLUSH = "flush"
    """D2H: state comes home from a slot, or leaves the device for good."""
    PARAMETER = "parameter"
    """H2D: the new parameters of a CPU-updated subgroup arrive."""
    SAVE = "save"
    """D2H: tensors that backward will need leave during forward."""
    RESTORE = "restore"
    """H2D: they come back in backward."""
    WEIGHTS = "weights"
    """H2D: the weights of a block on the host arrive for its forward or backward."""
    READ = "read"
    """State comes from disk to the host."""
    WRITE = "write"
    """State goes from the host to disk."""


@dataclass(frozen=True)
class Span:
    """Work of one lane from `start` to `end`, in seconds since the timeline's origin.

    subgroup: index, or None for forward, backward, saved tensors and weights. nbytes: that a transfer moves.
    """

    lane: Lane
    op: Op
    subgroup: int | None
    start: float
    end: float
    nbytes: int = 0

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start

    def since(self, origin: float) -> Span:
        """The span in seconds since `origin`."""
        return Span(self.lane, self.op, self.subgroup, self.start - origin, self.end - origin, self.nbytes)

    @property
    def name(self) -> str:
        """For people: `prefetch 3`."""
        return self.op.value if self.subgroup is None else f"{self.op.value} {self.subgroup}"


_NAMES = {each: each.value for each in (*Lane, *Op)}
"""The values of enums, each of which takes two calls of Python, hundreds of times in a report."""


@dataclass(frozen=True)
class Timeline:
    """The spans of one iteration or one update, sorted by start.

    beside: forward and backward as measured around an update; drawn in the trace, counted nowhere.
    missing: why there are no spans, where a reader may have expected some.
    """

    spans: tuple[Span, ...]
    beside: tuple[Span, ...] = ()
    missing: str = ""

    def __bool__(self) -> bool:
        """Whether there are spans."""
        return bool(self.spans)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Timeline:
        """A timeline of spans in any order."""
        return cls(tuple(sorted(spans, key=lambda s: (s.start, s.end, _NAMES[s.lane], _NAMES[s.op], s.subgroup or 0))))

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0 when empty."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - self.spans[0].start

    def busy(self, lane: Lane) -> float:
        """Seconds during which the lane was serving; spans of streams that share it may overlap."""
        return math.fsum(end - start for start, end in self.times(lane))

    def times(self, lane: Lane) -> list[tuple[float, float]]:
        """Start and end of each time during which the lane was serving without a break, in order."""
        found: list[tuple[float, float]] = []
        for span in self.on(lane):
            if found and span.start <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], span.end)
            else:
                found.append((span.start, span.end))
        return found

    def beside_both(self, op: Op, one: Lane, other: Lane) -> float:
        """Seconds of the spans of an operation during which both of two lanes were serving."""
        both = _common(self.times(one), self.times(other))
        spans = [(span.start, span.end) for span in self.spans if span.op is op]
        return math.fsum(end - start for start, end in _common(both, spans))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes that have spans, and the processors and links in any case."""
        return tuple(lane for lane in Lane if lane not in (Lane.READ, Lane.WRITE) or self.on(lane))

    def on(self, lane: Lane) -> tuple[Span, ...]:
        """The lane's spans in order."""
        return tuple(s for s in self.spans if s.lane is lane)

    def chrome_trace(self) -> dict[str, object]:
        """The timeline in the Trace Event format that Perfetto and chrome://tracing open.

        The first start is at 0. One track per lane, more where spans of a lane overlap, one for compute
        beside, and arrows along each subgroup's way: from prefetch to update to flush, or from
        gradient to update to parameter.
        """
        names, tracks = self._tracks()
        # Perfetto drops spans before 0 without a word.
        origin = min((span.start for span in tracks), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "Deep Optimizer States"}}
        ]
        events += [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
            for track, name in enumerate(names)
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.op.value,
                "pid": 0,
                "tid": track,
                "ts": (span.start - origin) * 1e6,
                "dur": span.duration * 1e6,
                **({"args": {"bytes": span.nbytes}} if span.nbytes else {}),
            }
            for span, track in tracks.items()
        ]
        for number, (before, after) in enumerate(self._arrows()):
            # Within its slice, which is how a viewer knows where the arrow begins and ends.
            begin, end = (((span.start + span.end) / 2 - origin) * 1e6 for span in (before, after))
            arrow = {"name": "way", "cat": "way", "id": number, "pid": 0}
            events += [
                arrow | {"ph": "s", "tid": tracks[before], "ts": begin},
                arrow | {"ph": "f", "bp": "e", "tid": tracks[after], "ts": end},
            ]
        trace: dict[str, object] = {"traceEvents": events, "displayTimeUnit": "ms"}
        return trace | {"otherData": {"missing": self.missing}} if self.missing else trace

    def _tracks(self) -> tuple[list[str], dict[Span, int]]:
        """The names of the tracks, and each span's: viewers misdraw spans that overlap on one track."""
        names = [lane.value for lane in self.lanes]
        ends = [-math.inf] * len(names)
        tracks: dict[Span, int] = {}
        named = [(span.lane.value, span) for span in self.spans] + [("forward, backward", span) for span in self.beside]
        for name, span in sorted(named, key=lambda pair: pair[1].start):
            free = (i for i, other in enumerate(names) if other == name and ends[i] <= span.start)
            track = next(free, len(names))
            if track == len(names):
                names.append(name)
                ends.append(span.end)
            tracks[span], ends[track] = track, span.end
        return names, tracks

    def _arrows(self) -> list[tuple[Span, Span]]:
        """Consecutive spans of a subgroup on two lanes."""
        ways: dict[int, list[Span]] = {}
        for span in sorted(self.spans, key=lambda s: s.start):
            if span.subgroup is not None:
                ways.setdefault(span.subgroup, []).append(span)
        pairs = itertools.chain.from_iterable(itertools.pairwise(way) for way in ways.values())
        return [(one, other) for one, other in pairs if one.lane is not other.lane and one.end <= other.start]

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace as JSON. Warns if nothing is in it, and says why."""
        if self.missing:
            warnings.warn(f"the trace {path} shows nothing: {self.missing}", stacklevel=2)
        Path(path).write_text(json.dumps(self.chrome_trace()))


def _common(times: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times, from start to end, that two lists have in common, each in order and without overlaps."""
    found, i, j = list[tuple[float, float]](), 0, 0
    while i < len(times) and j < len(others):
        start, end = max(times[i][0], others[j][0]), min(times[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if times[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return found
