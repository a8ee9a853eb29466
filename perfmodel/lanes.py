"""Discrete events over lanes: which task runs when, given streams, dependencies and shared host DRAM bandwidth.

A lane serves one task at a time: among the streams whose next task is ready, the one that has been ready longest, then
the one issued first. The CPU takes, of its tasks that are ready, the one issued first, so that none waits for what
another one lacks; the engine has the same rule (`dos.step.turns`). Activations and weights go before state, and
interrupt it: a device lets them in where a piece of state ends, of 32 MiB, which is taken as no time (on an H200 it was
3% of what was queued before). Two streams take turns there, so that the shorter copy ends first: where it comes later
it interrupts the longer one. A copy beside one in the other direction runs at the duplex rate, and whatever touches
host DRAM shares it by `shared_speeds`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from perfmodel.hardware import HardwareProfile
from perfmodel.timeline import Lane


class Stream(enum.IntEnum):
    """A queue of tasks; two feed the GPU, three or four each link, one each way from and to the disk.

    All are in order, but for the CPU's and for that of parameters, which are sent as the CPU has updated them.
    """

    CPU = 0
    GPU = 1
    PREFETCH = 2
    PARAMETER = 3
    GRADIENT = 4
    FLUSH = 5
    COMPUTE = 6
    """The model's own forward and backward on the GPU."""
    SAVE = 7
    RESTORE = 8
    READ = 9
    WRITE = 10
    WEIGHTS = 11
    HOST = 12
    """The thread that calls `step()`, which queues what the others serve."""


CPU, GPU, H2D, D2H, DISK_READ, DISK_WRITE, HOST = range(7)
"""The numbers of lanes: their places in LANES, behind which comes the thread that calls `step()`."""


class Service(NamedTuple):
    """The service of a lane: its streams and its speed.

    streams: one or two that feed it, and perhaps one or two that go before them.
    rate, latency: the figures of a profile for its work alone: bytes/s or parameters/s, and a fixed cost in seconds.
    through_host: whether it serves copies, whose bytes go through host DRAM once.
    beside, duplex: while that lane is busy, too, this is the rate.
    weight: its part of host DRAM that cannot serve all, over the CPU's: that figure of a profile, or a number.
    """

    streams: tuple[Stream, ...]
    rate: str
    latency: str
    through_host: bool
    beside: int | None = None
    duplex: str = ""
    weight: str | float = 1.0

    def seconds(self, size: float, profile: HardwareProfile) -> float:
        """Seconds of work alone. size: bytes or parameters."""
        return float(getattr(profile, self.latency) + size / getattr(profile, self.rate))


_SERVED_FIRST = 1e3
"""The weight of the disk, the smallest user of host DRAM: it keeps its rate until nearly nothing is left for others."""
LANES = {
    Lane.CPU: Service((Stream.CPU,), "cpu_update_rate", "cpu_latency_s", False),
    Lane.GPU: Service((Stream.GPU, Stream.COMPUTE), "gpu_update_rate", "launch_latency_s", False),
    Lane.H2D: Service(
        (Stream.PREFETCH, Stream.PARAMETER, Stream.WEIGHTS, Stream.RESTORE),
        "h2d_bandwidth",
        "copy_latency_s",
        True,
        D2H,
        "h2d_bandwidth_duplex",
        "h2d_weight",
    ),
    Lane.D2H: Service(
        (Stream.GRADIENT, Stream.FLUSH, Stream.SAVE),
        "d2h_bandwidth",
        "copy_latency_s",
        True,
        H2D,
        "d2h_bandwidth_duplex",
        "d2h_weight",
    ),
    Lane.READ: Service(
        (Stream.READ,),
        "disk_read_bandwidth",
        "disk_latency_s",
        True,
        DISK_WRITE,
        "disk_read_bandwidth_duplex",
        _SERVED_FIRST,
    ),
    Lane.WRITE: Service(
        (Stream.WRITE,),
        "disk_write_bandwidth",
        "disk_latency_s",
        True,
        DISK_READ,
        "disk_write_bandwidth_duplex",
        _SERVED_FIRST,
    ),
}
"""All lanes. One more is a row more, at the end."""
_LANES = tuple(LANES.values())
LANE_OF_STREAM = {stream: lane for lane, service in LANES.items() for stream in service.streams}
NEVER = len(Stream)
"""A stream without tasks, for lanes that fewer feed."""
_FED = [
    tuple(map(int, (*streams, NEVER, NEVER, NEVER)[:4]))
    for streams in (*(service.streams for service in LANES.values()), (Stream.HOST,))
]
"""Each lane's streams, by its number; the last two go before the others."""
_URGENT = frozenset(stream for fed in _FED for stream in fed[2:])
_FEEDS = [next(number for number, fed in enumerate(_FED) if stream in fed) for stream in Stream]
"""The number of the lane that a stream feeds."""
PIECE_BYTES = 1 << 25
"""The most bytes that any copy moves. Between pieces of state of this size other copies can run: those of another
stream, or of the caller's next batch."""
_NUMBERS = list(range(NEVER))
"""Of streams, as integers alone: with members of an enum as places in lists a simulation takes a quarter longer."""
_AT_ONCE, _NEXT = -2.0, -1.0
"""Since when tasks are ready that interrupt others, and that were interrupted."""
_TURNS, _UPLOADS = int(Stream.CPU), int(Stream.PARAMETER)
Speeds = dict[tuple[float, ...], list[float]]
"""Speeds of all lanes, by the bytes/s of host DRAM that each would cause alone; -1 where one is idle."""


def run_tasks(
    tasks: Sequence[tuple[int, float, float, Sequence[int]]], profile: HardwareProfile, known: Speeds | None = None
) -> tuple[list[float], list[float]]:
    """Start and end of each task, in seconds from 0.

    tasks: in issue order: stream; seconds that it takes alone; bytes/s of host DRAM traffic meanwhile, or of compute
        what `demand.speed_beside_updates` returns; earlier tasks, by number, that must have ended, besides its
        predecessor in the stream if that is in order.
    known: speeds under this profile that other runs have found; this one adds to them.
    """
    if not tasks:
        return [], []
    streams, seconds, demand, after_of = map(list, zip(*tasks, strict=True))
    stream_of = [_NUMBERS[stream] for stream in streams]
    infinite = math.inf
    queues, waits, dependents = _queued(stream_of, after_of)
    turns = queues[_TURNS]
    # Since when each stream's next task has been ready; infinite while it is not, or runs.
    ready = [0.0 if queue and not waits[queue[-1]] else infinite for queue in queues]
    start, end = [math.nan] * len(waits), [math.nan] * len(waits)
    speeds_of = {} if known is None else known
    running, left, demands = [-1] * len(_FED), [0.0] * len(_FED), [-1.0] * len(_FED)
    now, busy, free = 0.0, list[int](), list(range(len(_FED)))  # free: those that may begin something
    while True:
        for lane in free:
            stream, other, first, second = _FED[lane]
            since = ready[stream]
            if ready[second] < ready[first]:
                first = second
            if ready[first] < infinite:
                stream, since = first, _AT_ONCE
            elif ready[other] < since or (ready[other] == since < infinite and queues[other][-1] < queues[stream][-1]):
                stream, since = other, ready[other]
            held = running[lane]
            if since == _AT_ONCE and held >= 0 and stream_of[held] not in _URGENT:
                seconds[held], ready[stream_of[held]] = left[lane], _NEXT
                running[lane] = held = -1
                busy.remove(lane)
            if since < infinite and held < 0:
                ready[stream] = infinite
                running[lane] = task = heappop(turns) if stream == _TURNS else queues[stream][-1]
                left[lane], demands[lane] = seconds[task], demand[task]
                if start[task] != start[task]:  # not a number: it was not interrupted
                    start[task] = now
                busy.append(lane)
        if not busy:
            return start, end
        key = tuple(demands)
        speeds = speeds_of.get(key)
        if speeds is None:
            speeds = speeds_of[key] = lane_speeds({lane: demands[lane] for lane in busy}, profile)
        step = infinite
        for lane in busy:
            alone = left[lane] / speeds[lane]
            if alone < step:
                step = alone
        now, least, free = now + step, step * 1e-12, []
        for lane in busy:
            left[lane] = rest = left[lane] - step * speeds[lane]
            if rest <= least:
                free.append(lane)
        for lane in free[:]:
            busy.remove(lane)
            task = running[lane]
            running[lane], demands[lane] = -1, -1.0
            end[task] = now
            stream = stream_of[task]
            if stream == _TURNS:
                if turns:
                    ready[_TURNS] = now
                for waiting in dependents[task]:
                    if stream_of[waiting] == _UPLOADS:
                        queues[_UPLOADS].insert(0, waiting)
            else:
                queue = queues[stream]
                queue.pop()
                if queue and not waits[queue[-1]]:
                    ready[stream] = now
            for waiting in dependents[task]:
                waits[waiting] -= 1
                stream = stream_of[waiting]
                if waits[waiting] or (stream != _TURNS and queues[stream][-1] != waiting):
                    continue
                lane, ready[stream] = _FEEDS[stream], now
                free.append(lane)
                if stream == _TURNS:
                    heappush(turns, waiting)
                elif left[lane] * demands[lane] > PIECE_BYTES and left[lane] > seconds[waiting]:
                    ready[stream] = _AT_ONCE


def _queued(
    stream_of: Sequence[int], after_of: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Each stream's tasks, the last first; the number of tasks that each task waits for; those that wait for it.

    Of the CPU's a heap of those that are ready. Parameters that it updates are queued when it has.
    """
    waits = [len(after) for after in after_of]
    dependents: list[list[int]] = [[] for _ in waits]
    queues: list[list[int]] = [[] for _ in range(NEVER + 1)]
    for task in range(len(waits) - 1, -1, -1):
        stream = stream_of[task]
        for other in after_of[task]:
            dependents[other].append(task)
        if stream == _TURNS:
            if not waits[task]:
                heappush(queues[_TURNS], task)
        elif stream != _UPLOADS or not any(stream_of[other] == _TURNS for other in after_of[task]):
            queues[stream].append(task)  # in reverse: a stream's next task is popped from the end
    return queues, waits, dependents


def speeds_by_busy_lanes(demands: Mapping[int, float], profile: HardwareProfile) -> np.ndarray:
    """Speeds of these lanes over their speeds alone: a row for each set of them that is busy, 1 where one is not.

    A row's number has a bit for each lane, in their order. demands: as for `lane_speeds`.
    """
    rows = np.ones((1 << len(demands), len(demands)))
    for number, row in enumerate(rows):
        among = {lane: demands[lane] for place, lane in enumerate(demands) if number >> place & 1}
        speeds = lane_speeds(among, profile)
        row[:] = [speeds[lane] if lane in among else 1.0 for lane in demands]
    return rows


def shared_speeds(demands: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """The share of its own rate that each of several concurrent users of a capacity keeps.

    demands: the rate of each alone, in the unit of the capacity (bytes/s). weights: of any scale.

    All keep their rate while the capacity suffices. Beyond, shares are in proportion to weights, and what users with a
    share of 1 leave goes to the others; users without demand have 1. No share falls when another user demands less.
    """
    speeds, asked = [1.0] * len(demands), sum(demands)
    if asked <= capacity:
        return speeds
    heavy_first = sorted((user for user in range(len(demands)) if demands[user] > 0), key=lambda user: -weights[user])
    weighted = sum(demand * weight for demand, weight in zip(demands, weights, strict=True))
    for place, user in enumerate(heavy_first):
        if capacity * weights[user] < weighted:
            for other in heavy_first[place:]:
                speeds[other] = capacity * weights[other] / weighted
            break
        capacity -= demands[user]
        weighted -= demands[user] * weights[user]
    return speeds


def lane_speeds(demands: Mapping[int, float], profile: HardwareProfile) -> list[float]:
    """Speeds of all lanes over their speeds alone, and if it is busy of the thread that calls `step()`.

    demands: of the busy lanes, by number: bytes/s of host DRAM that each would cause alone; of the GPU as for
        `run_tasks`.
    """
    speeds = [
        getattr(profile, lane.duplex) / getattr(profile, lane.rate)
        if number in demands and lane.beside in demands
        else 1.0
        for number, lane in enumerate(_LANES)
    ]
    if CPU in demands and demands.get(GPU):
        speeds[GPU] = demands[GPU]
    if HOST in demands:
        speeds.append(1 / profile.slowdown if CPU in demands else 1.0)
    busy = [number for number in demands if number not in (GPU, HOST)]
    weights = [w if isinstance(w := _LANES[number].weight, float) else getattr(profile, w) for number in busy]
    wanted = [demands[number] * speeds[number] for number in busy]
    for number, share in zip(busy, shared_speeds(wanted, weights, profile.host_bandwidth_per_rank), strict=True):
        speeds[number] *= share
    return speeds
