"""The least time of any plan on a machine: sums of work by lane, over a grid of shares on CPU and GPU."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.demand import Demand, demands, operation_demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, DISK_READ, DISK_WRITE, H2D, LANES, Stream, speeds_by_busy_lanes
from perfmodel.plan import Placement
from perfmodel.simulate import UPDATE_ALONE, Phase, Scope
from perfmodel.workload import WEIGHT_WINDOW, SubgroupLoad, Workload, peak_room

MOST_SUMS = 100_000
"""The most sums of sizes of subgroups that are tried."""
FARTHEST = 1e24
"""Rates that are farther apart leave no digits of sums."""
EXACT, NEAR, FEW = 1e-8, 3e-4, 32
"""The share by which the bound may be below the least that its assumptions allow; and the one with which more than few
cells are left as they are."""
FIRST_CELLS, PARTS, CELLS_AT_ONCE, ROUNDS, FEW_ROUNDS = 16, 4, 128, 12, 2
"""Cells of each share at first, and the parts into which the lowest ones are divided, this many at a time; where more
rounds for each dimension were needed, the bound is less exact. Few are enough where the least moves little."""


Cells = tuple[np.ndarray, np.ndarray]
"""Lower and upper ends of ranges, a row for each cell: of the share of the parameters on the CPU, of that and the one
which is streamed together, and of the share of weights that stream."""


@dataclass(frozen=True)
class Bound:
    """A lower bound, the resource that it hangs on, and the placements that reach it.

    seconds: of the update alone, or, with compute in the scope, the seconds that the update adds to it.
    binding: the resource that would shorten it most if it were 1% faster: `CPU`, `GPU`, `H2D`, `D2H`, `disk read`,
        `disk write`, `host DRAM`; `nothing` if all hides behind compute.
    shares: of the parameters, per placement, where the bound is reached.
    """

    seconds: float
    binding: str
    shares: dict[Placement, float]


def lower_bound(workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> Bound:
    """The least time any plan can take under the simulator's rates and the workload's memory.

    Of a step that finds all as its plan wants it: parameters that the host has to fetch after updates
    on the device, as halves of their masters, come on top.

    A plan divides the parameters into shares on the CPU, streamed and resident, and keeps a share of weights on the
    device. `_Sums` has each lane's work for such shares. Lanes never wait for each other, so no plan with these shares
    is faster than the busiest lanes under the simulator's sharing of host DRAM. All sums grow with each share, so the
    time at the lower ends of a cell, a range of each share, is a bound for the cell. The cells that may have the least
    are divided until their bounds are exact.

    Raises ValueError if the profile's rates are so far apart that sums of both have no digits of one.
    """
    names = ("host_bandwidth", *(service.rate for service in LANES.values()))
    rates = {name: float(getattr(profile, name)) for name in names}
    lowest, *_, highest = sorted((name for name in rates if math.isfinite(rates[name])), key=rates.__getitem__)
    if rates[highest] > FARTHEST * rates[lowest]:
        raise ValueError(
            f"no lower bound can be computed with profile {profile.name!r}: its rates are too far apart, {lowest} is "
            f"{rates[lowest]:.3g} and {highest} {rates[highest]:.3g}; measure them with `python -m dos.calibrate`"
        )
    if scope.backward is Phase.UPDATED:  # all of the update may hide behind compute
        alone = lower_bound(workload, profile)
        seconds = max(0.0, alone.seconds - scope.compute_s(workload))
        return Bound(seconds, alone.binding if seconds else "nothing", alone.shares)
    sums = _Sums(workload, profile, scope)
    seconds, best, (on_cpu, at_home, stream), cells = _least(sums, sums.cells, ROUNDS)
    # Of shares that are as good, those with the most residents.
    alike = np.array([(on_cpu, u, stream) for u in np.linspace(on_cpu, at_home, 33)])
    at_home = alike[sums.seconds(alike, alike) <= best * (1 + NEAR) + 1e-12][0, 1]
    faster = {lane.value: (service.rate, service.duplex or service.rate) for lane, service in LANES.items()}
    faster["host DRAM"] = "host_bandwidth", "host_bandwidth"
    if math.isinf(workload.host_free_bytes):
        faster = {resource: rates for resource, rates in faster.items() if not resource.startswith("disk")}

    def improved(resource: str) -> float:
        faster_ones = {rate: 1.01 * getattr(profile, rate) for rate in faster[resource]}
        return _least(_Sums(workload, profile.replace(**faster_ones), scope), cells, FEW_ROUNDS)[1]

    shares = float(on_cpu), float(at_home - on_cpu), float(1.0 - at_home)
    order = (Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT)
    binding = min(faster, key=improved) if seconds > 0 else "nothing"
    return Bound(seconds, binding, dict(zip(order, shares, strict=True)))


def _least(sums: _Sums, cells: Cells, rounds: int) -> tuple[float, float, np.ndarray, Cells]:
    """A bound of all plans, the time at the best point that was found, that point, and the lowest cells in the end."""
    low, high = cells
    varies = [column for column in range(3) if (high[:, column] > low[:, column]).any()]
    found, best, point = sums.seconds(low, high), math.inf, high[0]
    for _ in range(rounds * len(varies)):
        order = np.argsort(found, kind="stable")[:CELLS_AT_ONCE]
        ends = np.stack([low[order], high[order]])
        at = np.concatenate(
            [np.column_stack([ends[x, :, 0], ends[u, :, 1], ends[0, :, 2]]) for x in (0, 1) for u in (0, 1)]
        )
        at[:, 0] = np.minimum(at[:, 0], at[:, 1])
        tried = sums.seconds(at, at)
        if tried.min() < best:
            best, point = float(tried.min()), at[tried.argmin()]
        kept = found < best * (1 - EXACT)
        if not kept.any() or (found.min() > best * (1 - NEAR) and np.count_nonzero(kept) > FEW):
            break
        chosen = order[kept[order]]
        kept[chosen] = False
        # Each in the dimension in which that raises the bounds of its parts most.
        parts = np.stack([_divided(low[chosen], high[chosen], column) for column in varies])
        bounds = np.stack([sums.seconds(*each.reshape(2, -1, 3)).reshape(-1, PARTS) for each in parts])
        gains = np.minimum(bounds, best).mean(axis=2) * (1 + 1e-9 * (high - low)[chosen][:, varies].T)
        column, row = gains.argmax(axis=0), np.arange(len(chosen))
        low, high = (
            np.concatenate([each[kept], parts[column, end, row].reshape(-1, 3)]) for end, each in enumerate((low, high))
        )
        found = np.concatenate([found[kept], bounds[column, row].ravel()])
    lowest = np.argsort(found, kind="stable")[: 4 * CELLS_AT_ONCE]
    return min(float(found.min()), best * (1 - EXACT)), best, point, (low[lowest], high[lowest])


def _divided(low: np.ndarray, high: np.ndarray, column: int) -> np.ndarray:
    """The lower and upper ends of the parts of each cell, of equal width in one dimension."""
    ends = np.repeat(np.stack([low, high])[:, :, None], PARTS, axis=2)
    edges = np.linspace(low[:, column], high[:, column], PARTS + 1, axis=-1)
    ends[0, ..., column], ends[1, ..., column] = edges[:, :-1], edges[:, 1:]
    return ends


class _Classes:
    """The subgroups of a workload by class: those of one size, whose weights stream in any plan or may stay.

    away: the subgroups whose weights stream in any plan.
    number: of each class, by load and whether its weights stream in any plan.
    loads, counts, costs: the load of each class, the number of its subgroups, and the demand of one by stream.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile) -> None:
        # Weights that stream in any plan move with updates on the device. Of others it is not known.
        self.away = workload.streaming(()) if workload.blocks_most == 0 else frozenset()
        self.number = Counter((load, i in self.away) for i, load in enumerate(workload.subgroups))
        self.loads, self.counts = [load for load, _ in self.number], np.array(list(self.number.values()), dtype=float)
        self.costs = [_costs(load, profile, streams=streams) for load, streams in self.number]
        self._profile = profile
        self._size = self.counts * np.maximum([load.numel for load in self.loads], 1)

    def least(self, totals: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least of `totals`, by class, for a share of the parameters: of those that have least each."""
        order = np.argsort(totals / self._size, kind="stable")
        shares = np.cumsum(self._size[order]) / self._size.sum()
        return np.append(0.0, shares), np.append(0.0, np.cumsum(np.asarray(totals)[order]))

    def total(self, *streams: Stream, part: int = 0) -> np.ndarray:
        """Seconds of streams by class; bytes of host DRAM traffic with part=1."""
        return self.counts * np.array([sum(c[stream][part] for stream in streams) for c in self.costs])

    def beyond(self, stream: Stream) -> np.ndarray:
        """Seconds of a stream for what goes with the state."""
        alone = [operation_demand(stream, load.state_bytes, load, self._profile).seconds for load in self.loads]
        return np.maximum(self.total(stream) - self.counts * alone, 0.0)

    def work(self, *, overlaps_backward: bool) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Work by class, for updates on the CPU, on the device from the host, and of residents."""
        total, counts = self.total, self.counts
        returned = np.array([load.returned_bytes > 0 for load in self.loads])
        gradient = total(Stream.GRADIENT) * (1.0 if overlaps_backward else ~returned)  # else they have left before
        offloaded = gradient * returned
        gpu, prefetch, flush = total(Stream.GPU), total(Stream.PREFETCH), total(Stream.FLUSH)
        come, go = self.beyond(Stream.PREFETCH), self.beyond(Stream.FLUSH) + offloaded
        zero = np.zeros(len(counts))
        # Bytes of host DRAM: of gradients that leave for the CPU, or leave though they are offloaded, and of residents.
        left = total(Stream.GRADIENT, part=1) * (gradient > 0)
        back = left * returned
        held = counts * [load.state_bytes for load in self.loads]
        moved = total(Stream.PREFETCH, Stream.FLUSH, part=1)
        return {
            "CPU": (total(Stream.CPU), zero, zero),
            "parameters": (total(Stream.PARAMETER), zero, zero),
            "H2D": (zero, prefetch, come),
            "D2H": (gradient, flush + offloaded, go),
            "gradients": (gradient, offloaded, offloaded),
            "GPU": (zero, gpu, np.maximum(gpu - counts * self._profile.launch_latency_s, 0.0)),
            "slots": (zero, prefetch + gpu + flush, zero),
            "host": (total(Stream.CPU, Stream.PARAMETER, part=1) + left, moved + back, moved - 2 * held + back),
            "state": (zero, zero, held),
        }


class _Sums:
    """The work of each lane for plans of one workload, by their shares.

    Of backward's, forward's and the updates' work each lane has to do its own after backward, but for what can go on
    beside it: gradients that leave, slots and windows that are filled. Beside a forward all goes on but updates on the
    GPU, which computes it. Residents are launched together. Gradients that are offloaded leave whatever updates them,
    and come up for updates on the GPU, through slots that backward does not fill.
    """

    def __init__(self, workload: Workload, profile: HardwareProfile, scope: Scope) -> None:
        self._workload, self._profile, self._scope = workload, profile, scope
        self._beside = scope.backward is Phase.OVERLAPPED
        self._forward_s = workload.forward_s if scope.forward is Phase.OVERLAPPED else 0.0
        classes = _Classes(workload, profile)
        work = classes.work(overlaps_backward=self._beside)
        self._tables = {name: [classes.least(each) for each in by_placement] for name, by_placement in work.items()}
        self._slot_bytes = workload.slot_bytes
        self._free = workload.peak_free_bytes
        if not (workload.blocks or workload.activations):
            free = min(workload.peak_free_bytes, workload.shared_free_bytes)
            self._free = _whole([load.state_bytes for load in workload.subgroups], free)
        self._one_slot = any(load.returned_bytes > 0 for load in classes.loads)  # in any case
        self._most_prefetch = max(c[Stream.PREFETCH].seconds for c in classes.costs)
        self._sum_weights(classes)
        self._sum_saved_tensors()
        self._price_links(classes)
        self._spills = math.isfinite(workload.host_free_bytes)
        if self._spills:
            self._sum_disk(classes)

    def _sum_weights(self, classes: _Classes) -> None:
        workload = self._workload
        blocks = sorted(block.nbytes for block in workload.blocks)
        self._weights = float(sum(blocks))
        self.streams_most = sum(blocks[workload.blocks_least :]) / max(self._weights, 1)
        self.streams_least = sum(blocks[: len(blocks) - int(min(workload.blocks_most, len(blocks)))]) / max(
            self._weights, 1
        )
        trained = sum(block.nbytes for block in workload.blocks if block.stop)
        self._untrained = self._weights - trained  # backward ends where nothing is trained any more
        # The most that is there yet when a pass begins, and need not come for it.
        self._there = sum(blocks[-WEIGHT_WINDOW:]) / self._profile.h2d_bandwidth

        def spared(part: int) -> float:
            """The most that uploads of parameters fall if all weights stream, in seconds or bytes."""
            uploads = classes.total(Stream.PARAMETER, part=part) / classes.counts
            upload = dict(zip(classes.number, uploads, strict=True))
            parts = [
                sum(upload[workload.subgroups[i], i in classes.away] for i in range(block.start, block.stop))
                / max(block.nbytes, 1)
                for block in workload.blocks
            ]
            return self._weights * max(parts, default=0.0)

        self._spared = spared(0), spared(1)

    def _sum_saved_tensors(self) -> None:
        workload = self._workload
        sums = list(itertools.accumulate((saved.nbytes for saved in workload.activations), initial=0))
        moves = min(sums[-1], workload.activation_host_bytes)
        self._leave_least = max(nbytes for nbytes in sums if nbytes <= min(workload.activation_least_bytes, moves))
        self._gone = peak_room(workload.activations, int(min(workload.activation_least_bytes, moves)))
        self._gained = max(0.0, peak_room(workload.activations, sums[-1]) - self._gone)  # at most

    def _price_links(self, classes: _Classes) -> None:
        workload, profile, costs = self._workload, self._profile, classes.costs
        each = workload.subgroups[0]
        saves = [operation_demand(Stream.SAVE, saved.nbytes, each, profile) for saved in workload.activations]
        fetches = [operation_demand(Stream.WEIGHTS, block.nbytes, each, profile) for block in workload.blocks]
        links = least_speeds(
            {
                CPU: [c[Stream.CPU] for c in costs],
                H2D: [c[s] for c in costs for s in (Stream.PARAMETER, Stream.PREFETCH)] + fetches,
                D2H: [c[s] for c in costs for s in (Stream.GRADIENT, Stream.FLUSH)] + saves,
            },
            profile,
        )
        self._prices = prices(links)
        self._cpu_traffic = max(c[Stream.CPU].rate for c in costs)
        idle = links[:, 0] == 0  # the CPU, while backward lasts
        self._fastest = np.maximum(links[idle].max(axis=0), 1.0)
        self._beside_speed = (links[idle] @ self._prices.T).max(axis=0)

    def _sum_disk(self, classes: _Classes) -> None:
        workload, loads, costs = self._workload, classes.loads, classes.costs
        held = np.array([max(load.host_bytes, 1) for load in loads], dtype=float)
        self._at_home = classes.least(classes.counts * [load.host_bytes for load in loads])
        self._home = _whole([load.host_bytes for load in workload.subgroups], workload.host_free_bytes)
        read, write = (np.array([c[stream].seconds for c in costs]) for stream in (Stream.READ, Stream.WRITE))
        self._read = float((read / held).min()), workload.windows * float(read.max())
        self._write = float((write / held).min())
        state = [load.state_bytes for load in loads]
        self._state = float((state / held).min()), workload.windows * max(state)
        ways = {DISK_READ: [c[Stream.READ] for c in costs], DISK_WRITE: [c[Stream.WRITE] for c in costs]}
        self._disk_prices = prices(least_speeds(ways, self._profile.replace(host_bandwidth=math.inf)))

    @property
    def cells(self) -> Cells:
        """Cells of all shares."""
        state, share = self._tables["state"][2][::-1]
        room = min(self._free, self._workload.shared_free_bytes) + self._gained
        least = 1.0 - float(np.interp(room, state, share)) if room < state[-1] else 0.0  # at home
        on_cpu, at_home = (np.linspace(first, 1.0, FIRST_CELLS + 1) for first in (0.0, least))
        ends = [
            [(x, u, stream) for x in on_cpu[part] for u in at_home[part]]
            for part, stream in ((slice(-1), self.streams_least), (slice(1, None), self.streams_most))
        ]
        low, high = np.array(ends)
        some = low[:, 0] <= high[:, 1]
        return low[some], high[some]

    def seconds(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Seconds that any plan adds to compute, by cell; infinite where there is no memory for one."""
        work, profile, table = self._workload, self._profile, self._tables
        on_cpu, at_home, stream = low.T
        streamed, resident = np.maximum(at_home - high[:, 0], 0.0), np.maximum(1.0 - high[:, 1], 0.0)
        shares = on_cpu, streamed, resident

        def sum_of(name: str, *placements: int) -> np.ndarray:
            found = (np.interp(shares[p], *table[name][p]) for p in placements or range(3))
            return np.sum(list(found), axis=0)

        # Memory: state that stays, a slot, weights that stay, and saved tensors that make room for them.
        state, stay = sum_of("state", 2), (1.0 - high[:, 2]) * self._weights
        needed = state + np.maximum(stay - (1.0 - self.streams_most) * self._weights, 0.0)
        stays = (1.0 - self.streams_most) * self._weights
        slot = np.where(streamed > 0, 0.0 if self._one_slot else self._slot_bytes, 0.0)
        free, shared = max(self._free - stays, 0.0), max(work.shared_free_bytes - stays, 0.0)
        short = np.maximum(needed - free, 0.0)
        if work.shares_peak:
            short = np.maximum(short, needed + slot - shared)
        left = shared + self._gained * work.shares_peak - needed
        slots = np.floor(np.minimum(work.update_free_bytes, np.maximum(left, 0.0)) / max(self._slot_bytes, 1) + 1e-9)
        slots = np.maximum(slots, float(self._one_slot))
        no_room = (short > self._gained) | (needed + slot > shared + self._gained * work.shares_peak)
        no_room |= (streamed > 0) & (slots < 1) & (self._slot_bytes > 0)
        leave = np.maximum(self._leave_least, np.where(short > 0, short + self._gone, 0.0))

        # Backward, beside which saved tensors and weights come.
        absent, whole = scope_of(self._scope)
        backward_s = 0.0 if absent else work.backward_s
        restore, fetch = leave / profile.h2d_bandwidth, self._weights / profile.h2d_bandwidth
        fetch_back = np.maximum(stream * self._weights - self._untrained, 0.0) / profile.h2d_bandwidth
        comes = np.zeros_like(restore) if absent else restore + fetch_back
        stall = np.maximum(comes / self._fastest[1] - self._there - backward_s, 0.0)
        before = (backward_s + stall) * self._beside
        others = np.zeros_like(stall)
        if whole:
            more = comes + stream * fetch - 2 * self._there * bool(work.blocks)
            others = (work.micro_batches - 1) * np.maximum(
                more / self._fastest[1] - work.backward_s - work.forward_s, 0.0
            )

        # Each lane's work after backward.
        saved = leave / profile.d2h_bandwidth if self._forward_s else 0.0
        fetched = (fetch, self._weights) if self._forward_s else (0.0, 0.0)
        # By weights that stream more comes, but for parameters that the CPU has updated and that stay with it.
        more_s, more_bytes = (
            (each - spared) * (stream if each > spared else high[:, 2])
            for each, spared in zip(fetched, self._spared, strict=True)
        )
        comes_s = np.maximum(sum_of("parameters", 0) + more_s, fetched[0] * stream)
        up, down = sum_of("H2D") + comes_s, sum_of("D2H") + saved
        early = np.minimum(sum_of("gradients"), before * self._fastest[2])
        # Backward fills no slots where offloaded gradients pass through them.
        filling = 0.0 if self._one_slot else np.where(slots > 0, slots, 0.0)
        filled = np.minimum(filling * self._most_prefetch, before * self._fastest[1])
        filled = np.minimum(filled, sum_of("H2D"))
        lanes = np.stack([sum_of("CPU", 0), up, down], axis=-1)
        called = np.minimum((work.ahead_s + stall) * (work.ahead_s > 0), before)  # since then the CPU updates, too
        begun = np.minimum(lanes[:, 0], called)
        ahead = np.stack([begun, filled, early], axis=-1) @ self._prices.T
        ahead = np.minimum(ahead, (before - called)[:, None] * self._beside_speed + called[:, None])
        seconds = (lanes @ self._prices.T - ahead).max(axis=-1)
        seconds = np.maximum(seconds, sum_of("GPU") + self._forward_s)
        with np.errstate(invalid="ignore"):
            turns = (sum_of("slots", 1) - filled) / np.maximum(slots, 1.0)
        seconds = np.maximum(seconds, np.where(streamed > 0, turns, 0.0))
        rate = profile.host_bandwidth_per_rank
        moved = filled * profile.h2d_bandwidth + early * profile.d2h_bandwidth + begun * self._cpu_traffic
        before_s = np.minimum(moved / rate, before)
        traffic = (sum_of("host") + more_bytes + leave * bool(self._forward_s)) / rate - before_s
        seconds = np.maximum(seconds, traffic) - self._forward_s
        if self._spills:
            seconds = np.maximum(seconds, self._disk(at_home, traffic, backward_s + stall))
        return np.where(no_room, math.inf, np.maximum(seconds, 0.0) + stall + others)

    def _disk(self, at_home: np.ndarray, traffic: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Seconds that the disk adds. traffic: seconds of host DRAM for other work; before: seconds of backward."""
        on_disk = np.maximum(np.interp(at_home, *self._at_home) - self._home, 0.0)
        read = np.maximum(on_disk * self._read[0] - np.minimum(self._read[1], before), 0.0)
        write = on_disk * self._write
        lanes = np.stack([read, write], axis=-1)
        # Forward that waits for all the rest does not wait for writes.
        forward_s = 0.0 if self._scope.forward is Phase.ABSENT else self._workload.forward_s
        both = (lanes @ self._disk_prices.T).max(axis=-1) - forward_s
        first = np.minimum(self._state[1], before * self._profile.disk_read_bandwidth)
        moved = np.maximum(2 * on_disk * self._state[0] - first, 0.0) / self._profile.host_bandwidth_per_rank
        return np.maximum.reduce([both, read - self._forward_s, traffic + moved - forward_s])


def scope_of(scope: Scope) -> tuple[bool, bool]:
    """Whether there is no backward, and whether both are there."""
    return scope.backward is Phase.ABSENT, Phase.ABSENT not in (scope.backward, scope.forward)


def _costs(load: SubgroupLoad, profile: HardwareProfile, *, streams: bool) -> dict[Stream, Demand]:
    """The demand of a subgroup on each stream's lane. streams: whether its weights are on the host in any plan."""
    found = demands(load, profile)
    weights = load.parameter_bytes if streams else 0
    if weights or load.returned_bytes:
        up, down = load.state_bytes + load.returned_bytes + weights, load.state_bytes + weights
        found[Stream.PREFETCH] = operation_demand(Stream.PREFETCH, up, load, profile)
        found[Stream.FLUSH] = operation_demand(Stream.FLUSH, down, load, profile)
    if streams:
        found[Stream.PARAMETER] = Demand(0.0, 0.0)
    return found


def _whole(sizes: Sequence[int], free: float) -> float:
    """The most bytes that whole subgroups of these sizes take of the `free` bytes of a host or a device.

    With many sizes not all sums are tried, and the result is `free`.
    """
    sums = {0}
    for size, count in Counter(sizes).items():
        if len(sums) * count > MOST_SUMS:
            return free
        sums = {total + number * size for total in sums for number in range(count + 1)}
        sums = {total for total in sums if total <= free}
    return max(sums)


def least_speeds(operations: dict[int, list[Demand]], profile: HardwareProfile) -> np.ndarray:
    """Speeds of lanes, one row for each set of them that is busy, 0 for the others.

    Where operations differ in their demand on host DRAM the least one counts: no plan is faster.
    """
    asked = {
        lane: min((each.rate for each in found if each.seconds > 0), default=0.0) for lane, found in operations.items()
    }
    speeds = speeds_by_busy_lanes(asked, profile)
    return speeds * (np.arange(len(speeds))[:, None] >> np.arange(len(asked)) & 1)


def prices(speeds: np.ndarray) -> np.ndarray:
    """Seconds that a second of each lane's work is worth, in rows, each as much as can be at these speeds.

    No set of busy lanes does work that is worth more than a second in a second, so the worth of all work is a bound of
    its time; the most of all rows is the least time in which sets of lanes in turn could do it.
    """
    n = speeds.shape[1]
    limits = np.vstack([speeds[1:], np.eye(n)])
    most = np.append(np.ones(len(speeds) - 1), np.zeros(n))
    chosen = np.array(list(itertools.combinations(range(len(limits)), n)))
    square = limits[chosen]
    solved = np.abs(np.linalg.det(square)) > 1e-12
    found = np.linalg.solve(square[solved], most[chosen][solved][..., None])[..., 0]
    found = found[(found >= -1e-12).all(axis=1)].clip(0.0)
    return np.unique(found / np.maximum(found @ speeds.T, 1.0).max(axis=1, keepdims=True), axis=0)
