"""Time of an update by the balance of its lanes: a closed form, for all numbers of subgroups on the CPU at once.

The work of each lane is a pile, and all piles are worn down together, each at the speed that its lane has beside the
lanes that are still busy. The moments at which single transfers begin are left out, so that this takes a hundredth of a
simulation's time, and is within a few per cent of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.compute import backward_pieces, forward_pieces
from perfmodel.demand import Demand, demands, operation_demand, speed_beside_updates
from perfmodel.division import Division
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, DISK_READ, DISK_WRITE, H2D, Stream, speeds_by_busy_lanes
from perfmodel.timeline import Op
from perfmodel.weights import WeightFetches
from perfmodel.workload import SubgroupLoad, Workload

SHARING = {
    CPU: Stream.CPU,
    H2D: Stream.PREFETCH,
    D2H: Stream.FLUSH,
    DISK_READ: Stream.READ,
    DISK_WRITE: Stream.WRITE,
}
"""The lanes that share host DRAM, each with the stream whose traffic stands for it; the disk's last."""
UP, DOWN = 1, 2
"""The places of H2D and D2H among them."""
COLUMNS = len(Stream) + 2
RETURNED, HOME = len(Stream), len(Stream) + 1
"""The columns behind those of the streams: offloaded gradients that come up again, and weights that go home."""
TIE = 1e-3
"""Of two plans that take equally long, the one whose lanes are busy for less is better by this share of the time."""


@dataclass
class _Mix:
    """Numbers of subgroups by what happens to them, by division of memory (rows) and number on the CPU (columns).

    of_others: on the CPU, of those for which there is no room to be resident. streamed, staying: the rest of those, and
    residents. passing: of these, with offloaded gradients that come up through slots. slots: that are in use.
    other, resident: seconds of each stream for the mean subgroup of both kinds.
    """

    of_others: np.ndarray
    streamed: np.ndarray
    staying: np.ndarray
    passing: np.ndarray
    of_residents: np.ndarray
    slots: np.ndarray
    other: np.ndarray
    resident: np.ndarray

    def on_cpu_s(self, stream: int) -> np.ndarray:
        """Seconds of a stream for the subgroups that the CPU updates."""
        return self.of_others * self.other[:, [stream]] + self.of_residents * self.resident[:, [stream]]

    def streamed_s(self, stream: int) -> np.ndarray:
        """Seconds of a stream for the streamed subgroups."""
        return self.streamed * self.other[:, [stream]]


class Balance:
    """The closed form of one workload, whatever memory there is for it."""

    def __init__(self, workload: Workload, profile: HardwareProfile, hidden_s: float = 0.0) -> None:
        """hidden_s: of compute behind which all of the update may hide; the workload says nothing of it."""
        self._hidden_s = hidden_s
        self._kept = speed_beside_updates(workload, profile)
        self._workload = workload
        self._profile = profile
        kinds = {load: self._seconds(load) for load in set(workload.subgroups)}
        self._each = np.array([kinds[load] for load in workload.subgroups])
        """Seconds alone, by subgroup and stream."""
        streams = {load: self._seconds(load, streams=True) for load in kinds} if workload.blocks else kinds
        self._streams = np.array([streams[load] for load in workload.subgroups]) - self._each
        """The seconds that are added if its weights are on the host."""
        self._fetches: dict[frozenset[int], tuple[float, float, float, float]] = {}
        self._spills = math.isfinite(workload.host_free_bytes)
        typical = demands(max(workload.subgroups, key=lambda load: load.numel), profile)
        lanes = list(SHARING.items())[: None if self._spills else -2]
        speeds = speeds_by_busy_lanes({lane: typical[stream].rate for lane, stream in lanes}, profile)
        self._speeds = np.stack([speeds, _in_turn(speeds, typical)])
        """Speeds of the lanes by which of them are busy: with several slots, and with one."""

    def exposed(self, divisions: Sequence[Division]) -> np.ndarray:
        """Seconds by which the update makes an iteration longer: a row for each division of memory.

        Columns: the number of subgroups on the CPU, from 0 to all that it can update. Infinite where others had to be
        streamed without slots.
        """
        work, mix = self._workload, self._mix(divisions)
        update, flush, prefetch = (mix.other[:, [s]] for s in (Stream.GPU, Stream.FLUSH, Stream.PREFETCH))
        launch = np.minimum(self._profile.launch_latency_s, mix.resident[:, [Stream.GPU]])
        # Residents have one launch together, but for those that wait for gradients.
        at_once = mix.staying - mix.passing
        residents = at_once * (mix.resident[:, [Stream.GPU]] - launch) + launch * (at_once > 0)
        passing = mix.passing * mix.resident[:, [Stream.GPU]]
        gpu = residents + passing + mix.streamed_s(Stream.GPU)
        one = np.array([[division.slots <= 1] for division in divisions])
        saved_up, saved_down, stall = self._saved(divisions)
        fetch, weights_up, back_waits, forward_waits = self._weights(divisions)
        returned, home = (mix.other[:, [s]] for s in (RETURNED, HOME))
        filled = np.minimum(mix.slots * prefetch, np.maximum(0.0, work.backward_s - saved_up - weights_up))
        if work.returns:  # backward does not fill slots then
            filled = np.zeros_like(filled)
        piles = self._piles(mix, one, filled)
        if work.blocks and work.backward_s:
            stall = np.maximum(stall, np.maximum(back_waits, saved_up + weights_up - work.backward_s))
        if work.blocks and work.forward_s:
            piles[..., UP] += weights_up
        ends = self._worn_down(piles, one.astype(int))

        # With several slots, prefetches and flushes always run beside each other; with one, never.
        up, down = (np.where(one, 1.0, self._speeds[0, 1 << UP | 1 << DOWN, lane]) for lane in (UP, DOWN))
        some = mix.streamed > 0
        ups = np.maximum(ends[..., UP], np.where(some, piles[..., UP] / up, 0.0))
        downs = np.maximum(ends[..., DOWN], np.where(some, piles[..., DOWN] / down, 0.0))
        turns = mix.streamed * ((prefetch + returned) / up + update + (flush + home) / down)
        turns = turns + passing + mix.passing * (mix.resident[:, [RETURNED]] / up + mix.resident[:, [HOME]] / down)
        turns = turns - filled - np.where(one, prefetch * some, 0.0)
        slowest = np.maximum(np.maximum(prefetch / up, flush / down), update)
        last_parameter = np.maximum(mix.other, mix.resident)[:, [Stream.PARAMETER]]
        times = [
            ends[..., 0] + last_parameter * (mix.of_others + mix.of_residents > 0),
            ups + np.where(one, 0.0, some * (update + flush)),
            downs + some * update,
            np.where(some | (mix.passing > 0), residents + some * flush / down + turns / np.maximum(mix.slots, 1), 0.0),
            np.where(some, residents + mix.streamed * slowest + flush, 0.0),
            gpu,
            *np.moveaxis(ends[..., DOWN + 1 :], -1, 0),
        ]
        seconds = np.maximum.reduce(np.broadcast_arrays(*times))
        if work.forward_s:
            # Its last piece waits for the last parameters; updates on the GPU take turns with it.
            last = work.forward_s / len(work.subgroups) + fetch
            begins = self._returned(mix)
            late = self._late_s(np.maximum(ends[..., 0] - begins, 0.0), work.forward_s)
            seconds = np.maximum(seconds + last, np.maximum(gpu, begins) + late + work.forward_s + forward_waits)
            seconds = np.maximum(seconds, downs + saved_down) - work.forward_s
        if work.micro_batches > 1 and work.forward_s and work.backward_s:
            forward_waits = np.maximum(forward_waits, np.maximum(saved_down, weights_up) - work.forward_s)
            seconds = seconds + (work.micro_batches - 1) * (stall + forward_waits)
        if self._hidden_s:
            seconds = np.maximum(seconds - self._hidden_s, gpu)  # which takes turns with compute
            seconds = np.maximum(seconds, self._late_s(ends[..., 0], self._hidden_s)) if self._kept else seconds
        seconds = seconds + stall + TIE * ends[..., : DOWN + 1].mean(axis=-1)
        return np.where(some & ~np.array([[division.streams] for division in divisions]), np.inf, seconds)

    def _returned(self, mix: _Mix) -> np.ndarray | float:
        """Seconds after backward at which `step()` returns, and the next forward begins."""
        host, on_cpu = self._workload.host, mix.of_others + mix.of_residents
        slowdown = np.where(on_cpu > 0, self._profile.slowdown, 1.0)
        return np.maximum(host.seconds(on_cpu, mix.streamed) * slowdown - self._workload.ahead_s, 0.0)

    def _late_s(self, cpu_s: np.ndarray, compute_s: float) -> np.ndarray | float:
        """Seconds by which compute is longer beside updates that keep the CPU busy for so long."""
        return (1 - self._kept) * np.minimum(cpu_s, compute_s / self._kept) if self._kept else 0.0

    def _seconds(self, load: SubgroupLoad, *, streams: bool = False) -> list[float]:
        found = [0.0] * COLUMNS
        for stream, each in demands(load, self._profile).items():
            found[stream] = each.seconds
        if load.returned_bytes:  # it is on the host in any case
            found[Stream.GRADIENT] = 0.0
            weights = load.parameter_bytes * streams
            returned = operation_demand(Stream.PREFETCH, load.returned_bytes + weights, load, self._profile)
            found[RETURNED] = returned.seconds
        if streams:
            found[Stream.PARAMETER] = 0.0
            found[HOME] = operation_demand(Stream.FLUSH, load.parameter_bytes, load, self._profile).seconds
        return found

    def _mix(self, divisions: Sequence[Division]) -> _Mix:
        n = len(self._each)
        held = np.zeros((len(divisions), n))
        for row, division in zip(held, divisions, strict=True):
            row[list(division.residents)] = 1.0
        streams = np.zeros_like(held)
        for row, division in zip(streams, divisions, strict=True):
            row[list(self._workload.streaming(division.blocks))] = 1.0
        residents = held.sum(axis=1, keepdims=True)
        returned = self._workload.returns
        on_cpu = np.arange(n + 1.0)[None, :]
        of_others = np.minimum(on_cpu, n - residents)
        streamed = n - residents - of_others
        staying = residents - (on_cpu - of_others)
        return _Mix(
            of_others,
            streamed,
            staying,
            passing=returned * staying,
            of_residents=on_cpu - of_others,
            slots=np.minimum(
                [[max(division.slots, returned)] for division in divisions], streamed + returned * staying
            ),
            other=((1 - held) @ self._each + (1 - held) * streams @ self._streams) / np.maximum(n - residents, 1),
            resident=(held @ self._each + held * streams @ self._streams) / np.maximum(residents, 1),
        )

    def _piles(self, mix: _Mix, one: np.ndarray, filled: np.ndarray) -> np.ndarray:
        """Seconds of work that each lane has after backward, the last axis. filled: those of slots filled before."""
        work, on_disk = self._workload, self._on_disk(mix)
        gradients, parameters = mix.on_cpu_s(Stream.GRADIENT), mix.on_cpu_s(Stream.PARAMETER)
        # The last gradient has nothing left beside which to leave. Those of state on disk wait for a window.
        early = np.minimum(gradients * (1 - on_disk), work.backward_s * (1 - 1 / len(self._each)))
        prefetches, flushes = mix.streamed_s(Stream.PREFETCH), mix.streamed_s(Stream.FLUSH)
        returned, home = (mix.streamed_s(s) + mix.staying * mix.resident[:, [s]] for s in (RETURNED, HOME))
        # One slot is filled, updated and emptied in turn, as if that had one lane; parameters only wait for filling.
        cycles = prefetches + mix.streamed_s(Stream.GPU) + flushes + mix.passing * mix.resident[:, [Stream.GPU]]
        prefetch, update, flush = (mix.other[:, [s]] for s in (Stream.PREFETCH, Stream.GPU, Stream.FLUSH))
        meet = prefetch / np.maximum(prefetch + update + flush, 1e-300)
        # Since the step was issued the CPU has updated what had arrived by then.
        speed = self._speeds[0, 1 | 1 << DOWN, 0]
        left = early / np.maximum(gradients, 1e-300)  # of the gradients, the share that has
        left = np.where(gradients > 0, left, (1 - on_disk) * (1 - 1 / len(self._each)))
        begun = np.minimum(mix.on_cpu_s(Stream.CPU) * left, min(work.ahead_s, work.backward_s) * speed)
        found = [
            mix.on_cpu_s(Stream.CPU) - begun,
            np.where(one, cycles + parameters * meet + home, prefetches + parameters) + returned - filled,
            gradients - early + np.where(one, 0.0, flushes + home),
        ]
        if self._spills:
            found += [on_disk * (mix.on_cpu_s(s) + mix.streamed_s(s)) for s in (Stream.READ, Stream.WRITE)]
        return np.stack(np.broadcast_arrays(*found), axis=-1)

    def _on_disk(self, mix: _Mix) -> np.ndarray | float:
        """The share of the subgroups that are not resident which is on disk."""
        if not self._spills:
            return 0.0
        work, at_home = self._workload, len(self._each) - mix.staying
        each = sum(load.host_bytes for load in work.subgroups) / len(work.subgroups)
        return np.clip((at_home * each - work.host_free_bytes) / np.maximum(at_home * each, 1), 0.0, 1.0)

    def _saved(self, divisions: Sequence[Division]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of H2D and of D2H for the saved tensors that move, and for which backward waits for them."""
        found = {}
        for nbytes in {division.activation_bytes for division in divisions}:
            left = self._workload.moved(nbytes)
            each = np.array([saved.nbytes for saved in left], dtype=float)
            arrived = np.cumsum(each[::-1])[::-1] / self._profile.h2d_bandwidth_duplex  # the last saved first
            late = arrived - self._workload.backward_s * np.array([saved.due for saved in left])
            total = each.sum()
            stall = float(late.max(initial=0.0))
            found[nbytes] = total / self._profile.h2d_bandwidth, total / self._profile.d2h_bandwidth, stall
        up, down, stalls = np.array([found[division.activation_bytes] for division in divisions]).T[..., None]
        return up, down, stalls

    def _weights(self, divisions: Sequence[Division]) -> np.ndarray:
        """Seconds of a pass: of the longest fetch of weights, of all, and for which backward and forward wait."""
        for blocks in {division.blocks for division in divisions} - self._fetches.keys():
            self._fetches[blocks] = self._fetching(blocks) if self._workload.blocks else (0.0,) * 4
        return np.array([self._fetches[division.blocks] for division in divisions]).T[..., None]

    def _fetching(self, on_device: frozenset[int]) -> tuple[float, float, float, float]:
        """The same for one division, by a schedule of compute and fetches alone."""
        work, ends, free = self._workload, list[float](), {Stream.COMPUTE: 0.0, Stream.WEIGHTS: 0.0}
        each_s = dict(zip((Op.BACKWARD, Op.FORWARD), work.seconds_by_size, strict=True))
        each_s[Op.WEIGHTS] = 1 / self._profile.h2d_bandwidth_duplex

        def add(what: tuple[Op, Stream], subgroup: int | None, size: int, after: tuple[int, ...]) -> int:
            op, stream = what
            begins = free[stream]
            for task in after:
                if ends[task] > begins:
                    begins = ends[task]
            free[stream] = begins + each_s[op] * size
            ends.append(free[stream])
            return len(ends) - 1

        weights = WeightFetches(add, work, on_device)
        backward_pieces(add, work, 0, weights)
        backward = free[Stream.COMPUTE]
        weights.begin(backward=False, updated=True)
        forward_pieces(add, work, 0, [(part, size, ()) for part, size in work.runs], weights)
        streamed = [block.nbytes for b, block in enumerate(work.blocks) if b not in on_device]
        most, every = (nbytes / self._profile.h2d_bandwidth for nbytes in (max(streamed, default=0), sum(streamed)))
        return most, every, backward - work.backward_s, free[Stream.COMPUTE] - backward - work.forward_s

    def _worn_down(self, piles: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """Seconds after which each lane has no work left. kind: of speeds, by row."""
        # The lanes are the first axis meanwhile, over which sums and the least take a fraction of the time.
        left = np.ascontiguousarray(np.moveaxis(piles, -1, 0))
        now, ends = np.zeros(left.shape[1:]), np.zeros_like(left)
        by_lane = self._speeds.reshape(-1, len(left)).T
        for _ in left:
            busy = left > 0
            among = sum((lane * (1 << number) for number, lane in enumerate(busy)), kind * self._speeds.shape[1])
            speeds = by_lane.take(among, axis=1)
            needed = np.where(busy, left / speeds, np.inf)
            step = needed.min(axis=0)
            through = needed <= step
            step[np.isinf(step)] = 0.0
            now = now + step
            left = np.where(through, 0.0, np.maximum(left - speeds * step, 0.0))
            ends = np.where(busy, now, ends)
        return np.moveaxis(ends, 0, -1)


def _in_turn(speeds: np.ndarray, typical: dict[Stream, Demand]) -> np.ndarray:
    """Speeds where H2D stands for a slot that is filled, updated and emptied in turn."""
    found = speeds.copy()
    prefetch, update, flush = (typical[s].seconds for s in (Stream.PREFETCH, Stream.GPU, Stream.FLUSH))
    for busy in range(len(speeds)):
        if busy >> UP & 1 and not busy >> DOWN & 1 and prefetch + update + flush > 0:
            idle = busy ^ 1 << UP
            filling, updating, emptying = speeds[busy], speeds[idle], speeds[idle | 1 << DOWN]
            seconds = prefetch / filling[UP], update, flush / emptying[DOWN]
            found[busy] = np.average([filling, updating, emptying], axis=0, weights=seconds)
            found[busy, UP] = (prefetch + update + flush) / sum(seconds)
    return found
