"""The least update time that any plan could have on a machine: a linear program over its lanes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy  # which loads `optimize`, three quarters of a second, when it is first asked for

from perfmodel.demand import Demand, demands, operation_demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, H2D, LANES, Stream, speeds_by_busy_lanes
from perfmodel.plan import Placement
from perfmodel.simulate import UPDATE_ALONE, Phase, Scope
from perfmodel.workload import WEIGHT_WINDOW, SubgroupLoad, Workload, peak_room

MOST_SUMS = 100_000
"""The most sums of sizes of subgroups that are tried."""


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

    Subgroups may be split over placements and lanes never wait for each other, so every plan's time is
    at least this. The variables:

        x, y, z         the parts of each subgroup on the CPU, streamed and resident; x + y + z = 1
        t, u            for each set of CPU, H2D and D2H the time during which exactly those are busy:
                        t while the GPU updates resident subgroups, which it does first, u afterwards
        early           gradients that leave beside an overlapped backward, in seconds of D2H
        filling         slots that are filled beside it, in seconds of H2D
        first           slots that are filled for the first time, beside it or not, likewise
        away            bytes of saved tensors that leave, over those of all state
        stall           time for which an overlapped backward waits for them
        disk            the parts of each subgroup on disk
        reading, writing, both      the time for which the disk reads, writes or does both, after backward
        ahead           windows that are filled before that, in seconds of reading
        weights         the share of the blocks' weights that streams
        spared          parameters that the CPU has updated and that stay with it for that, in seconds of H2D
        others          time for which compute waits in the other micro-batches
        T               the time after backward; it, `stall` and `others` are minimised

    The constraints are the rows of `_solve`, where each has its name. The capacity of a lane is the sum of its speeds
    over all those sets of lanes, each times its t or u.

    Residents are launched together, so that a launch counts in none of them but in their upper limit, `residents`.
    `forward` and `backward` are the seconds of those that are overlapped. Beside a forward all goes on
    but updates on the GPU, which computes it. Speeds are the simulator's: `lanes.lane_speeds`.

    Raises ValueError if the profile's rates are so far apart that the program cannot be solved.
    """
    seconds, shares = _solve(workload, profile, scope)
    faster = {lane.value: (service.rate, service.duplex or service.rate) for lane, service in LANES.items()}
    faster["host DRAM"] = "host_bandwidth", "host_bandwidth"
    if math.isinf(workload.host_free_bytes):
        faster = {resource: rates for resource, rates in faster.items() if not resource.startswith("disk")}

    def improved(resource: str) -> float:
        rates = {rate: 1.01 * getattr(profile, rate) for rate in faster[resource]}
        return _solve(workload, profile.replace(**rates), scope)[0]

    return Bound(seconds, min(faster, key=improved) if seconds > 0 else "nothing", shares)


def _solve(workload: Workload, profile: HardwareProfile, scope: Scope) -> tuple[float, dict[Placement, float]]:
    """The optimum of `lower_bound`'s program, and the shares of the placements there."""
    # Weights that stream in any plan move with updates on the device. Of others it is not known.
    away = workload.streaming(()) if workload.blocks_most == 0 else frozenset()
    classes = Counter((load, i in away) for i, load in enumerate(workload.subgroups))
    loads = [load for load, _ in classes]
    costs = [_costs(load, profile, streams=streams) for load, streams in classes]
    counts = np.array(list(classes.values()), dtype=float)
    numel = counts * np.array([load.numel for load in loads])
    state = np.array([load.state_bytes for load in loads], dtype=float)
    n = len(counts)

    def total(*streams: Stream, part: int = 0) -> np.ndarray:
        return counts * np.array([sum(c[stream][part] for stream in streams) for c in costs])

    each, spills = workload.subgroups[0], math.isfinite(workload.host_free_bytes)
    saves = [operation_demand(Stream.SAVE, saved.nbytes, each, profile) for saved in workload.activations]
    fetches = [operation_demand(Stream.WEIGHTS, block.nbytes, each, profile) for block in workload.blocks]
    speeds = _speeds_by_busy_lanes(costs, saves, fetches, profile)
    cpu, h2d, d2h = speeds.T
    before = workload.backward_s if scope.backward is Phase.OVERLAPPED else 0.0
    after = workload.forward_s if scope.forward is Phase.OVERLAPPED else 0.0
    one = dict.fromkeys(("early", "filling", "first", "T", "away", "stall", "reading", "writing", "both", "ahead"), 1)
    sizes = dict.fromkeys("xyz", n) | dict.fromkeys("tu", len(speeds)) | one | {"disk": n}
    if workload.blocks:
        sizes |= dict.fromkeys(("weights", "spared", "others"), 1)

    def row(**coefficients: np.ndarray | float) -> np.ndarray:
        return np.concatenate([np.broadcast_to(coefficients.get(name, 0.0), size) for name, size in sizes.items()])

    most = min(sum(saved.nbytes for saved in workload.activations), workload.activation_host_bytes)
    shared = workload.shared_free_bytes
    staging = min(workload.update_free_bytes, shared + (most if workload.shares_peak else 0))
    # A slot takes at least the state of each subgroup that passes through it.
    fitting = np.floor(staging / np.maximum(state, 1.0))
    gpu, flush, prefetch, gradient, parameter = (
        total(s) for s in (Stream.GPU, Stream.FLUSH, Stream.PREFETCH, Stream.GRADIENT, Stream.PARAMETER)
    )
    # Gradients that are offloaded leave whatever updates them. Residents have them come up, and weights that stream.
    returned = np.array([load.returned_bytes > 0 for load in loads])
    leaves = ~returned if scope.backward is not Phase.OVERLAPPED else np.ones(n)  # else they have left before
    gradient = gradient * leaves
    offloaded = gradient * returned
    come, go = (
        counts
        * np.array([max(0.0, c[s].seconds - _alone(load, s, profile)) for c, load in zip(costs, loads, strict=True)])
        for s in (Stream.PREFETCH, Stream.FLUSH)
    )
    takes = counts * state
    scale = max(float(takes.sum()), 1.0)
    held = takes / scale
    filled_bytes = min((takes[i] / prefetch[i] for i in range(n) if prefetch[i] > 0), default=0.0)  # by a second of it
    fill = min(staging / filled_bytes if filled_bytes else math.inf, float(prefetch.sum()))
    least = min(most, workload.activation_least_bytes)
    gone = peak_room(workload.activations, int(least))  # of peak_free_bytes already
    back = scale / profile.h2d_bandwidth if scope.backward is Phase.OVERLAPPED else 0.0
    saved = scale / profile.d2h_bandwidth if scope.forward is Phase.OVERLAPPED else 0.0
    blocks = sorted(block.nbytes for block in workload.blocks)
    weight_bytes = sum(blocks)
    compute_s = workload.forward_s + workload.backward_s
    fetch = weight_bytes / profile.h2d_bandwidth
    fetch_forward, fetch_backward = (fetch * (phase is Phase.OVERLAPPED) for phase in (scope.forward, scope.backward))
    fetch_slowly = sum(one.seconds for one in fetches) / h2d[h2d > 0].min()
    # The most that is there yet when a pass begins, and need not come for it.
    there = sum(blocks[-WEIGHT_WINDOW:]) / profile.h2d_bandwidth if blocks else 0.0
    streams_most = sum(blocks[workload.blocks_least :]) / max(weight_bytes, 1)
    streams_least = sum(blocks[: len(blocks) - int(min(workload.blocks_most, len(blocks)))]) / max(weight_bytes, 1)
    together = np.maximum(gpu - counts * profile.launch_latency_s, 0.0)  # residents have one launch
    # Each with the limit that it may not exceed.
    rows = {
        # Work of the CPU and of the links, in the time for which they are busy or beside backward.
        "CPU": (row(x=total(Stream.CPU), t=-cpu, u=-cpu), 0.0),
        "H2D": (
            row(x=parameter, y=prefetch, z=come, t=-h2d, u=-h2d, filling=-1, weights=fetch_forward, spared=-1),
            0.0,
        ),
        "streaming up": (row(y=prefetch, u=-h2d, first=-1), 0.0),
        "D2H": (
            row(x=gradient, y=flush + offloaded, z=go + offloaded, t=-d2h, u=-d2h, early=-1, away=saved),
            0.0,
        ),
        "streaming down": (row(y=flush, u=-d2h, away=saved), 0.0),
        # Beside backward, which waits no longer than saved tensors take to come back.
        "backward, D2H": (row(early=1, stall=-1), before),
        "backward, H2D": (row(filling=1, away=back, weights=fetch_backward, stall=-1), before + there),
        "stall": (row(away=-back, weights=-fetch_slowly, stall=1), 0.0),
        # Gradients that leave early are those of subgroups on the CPU.
        "early": (row(x=-gradient, y=-offloaded, z=-offloaded, early=1), 0.0),
        # The GPU updates residents first, streamed subgroups after them, and computes the forward at the end.
        "residents": (row(z=-gpu, t=1), 0.0),
        "others": (row(z=together, u=1, T=-1), after),
        "GPU": (row(y=gpu, z=together, T=-1), 0.0),
        "fetching": (row(y=prefetch, z=together, first=-1, T=-1), after),
        "filling": (row(filling=1, first=-1), 0.0),
    }
    staying = weight_bytes / scale

    def beside_weights(free: float) -> float:
        """The free memory that is left if all weights stay; no less than those of blocks that have to."""
        return max(free - staying, -streams_most * staying) if workload.blocks else free

    read, write = total(Stream.READ), total(Stream.WRITE)
    windows_read, windows_written = (workload.windows * max(each / counts) for each in (read, write))
    unwritten = windows_written * workload.reverses
    limits: dict[str, list[tuple[float, float | None]]] = {
        **dict.fromkeys(("x", "z", "disk"), [(0.0, 1.0)] * n),
        "y": [(0.0, 1.0 if size <= staging else 0.0) for size in state],
        "first": [(0.0, fill)],
        "away": [(least / scale, most / scale)],
        "ahead": [(0.0, windows_read)],
        "weights": [(streams_least, streams_most)],
    }
    host = profile.host_bandwidth_per_rank
    if math.isfinite(host):
        on_cpu = (total(Stream.GRADIENT, part=1) * leaves + total(Stream.CPU, Stream.PARAMETER, part=1)) / host
        streamed = total(Stream.PREFETCH, Stream.FLUSH, part=1) / host
        beside_state = (come * profile.h2d_bandwidth + (go + offloaded) * profile.d2h_bandwidth) / host
        up, down = profile.h2d_bandwidth / host, profile.d2h_bandwidth / host
        on_disk = total(Stream.READ, Stream.WRITE, part=1) / host if spills else 0.0
        ahead = {"early": -down, "filling": -up, "away": saved * down, "ahead": -profile.disk_read_bandwidth / host}
        ahead |= {"weights": fetch_forward * up, "spared": -up}
        kept = unwritten * profile.disk_write_bandwidth / host
        with_gradients = streamed + offloaded * profile.d2h_bandwidth / host
        rows["host DRAM"] = row(x=on_cpu, y=with_gradients, z=beside_state, disk=on_disk, T=-1, **ahead), after + kept
        rows["DRAM, others"] = row(y=streamed, z=together, first=-up, T=-1, away=saved * down), after
    rows["slots"] = row(y=(prefetch + gpu + flush) / np.maximum(fitting, 1.0), T=-1, stall=-1), before + after
    if math.isfinite(workload.peak_free_bytes):
        limit = beside_weights((workload.peak_free_bytes - gone) / scale)
        rows["memory"] = row(z=held, away=-1, weights=-staying), limit
    if math.isfinite(shared):
        more = float(workload.shares_peak)
        limit = beside_weights((shared - more * gone) / scale)
        rows["memory, shared"] = row(z=held, first=filled_bytes / scale, away=-more, weights=-staying), limit
    if workload.blocks:
        # Of each block's parameters and fetches only the bytes are known to be in proportion.
        upload_s = dict(zip(classes, parameter / counts, strict=True))
        spared = (
            sum(upload_s[workload.subgroups[i], i in away] for i in range(b.start, b.stop)) / max(b.nbytes, 1)
            for b in workload.blocks
        )
        rows["spared"] = row(spared=1, weights=-max(spared) * weight_bytes), 0.0
        rows["spared, CPU"] = row(spared=1, x=-parameter), 0.0
    if workload.blocks and Phase.ABSENT not in (scope.backward, scope.forward):
        others = workload.micro_batches - 1
        rows["micro-batches"] = (
            row(weights=2 * others * fetch, away=others * back, others=-1),
            others * (compute_s + 2 * there),
        )
    if spills:
        held_on_host = [load.host_bytes for load in loads]
        taken = counts * np.array(held_on_host)
        size, free = max(float(taken.sum()), 1.0), _whole(Counter(workload.subgroups), workload.host_free_bytes)
        most_resident = max(taken / np.maximum(counts * state, 1)) * (min(workload.peak_free_bytes, shared) + most)
        if workload.reverses and size - free - most_resident > workload.windows * max(held_on_host):
            # All windows are taken as the step begins: nothing is read before a write, nor written after the last read.
            limits |= {"reading": [(min(read / counts), None)], "writing": [(min(write / counts), None)]}
        read_beside = profile.disk_read_bandwidth_duplex / profile.disk_read_bandwidth
        write_beside = profile.disk_write_bandwidth_duplex / profile.disk_write_bandwidth
        rows |= {
            # State that does not fit on the host is read and written, but for the state that is in windows yet.
            "host": (row(x=taken / size, y=taken / size, disk=-taken / size), free / size),
            "disk read": (row(disk=read, reading=-1, both=-read_beside, ahead=-1), 0.0),
            "disk write": (row(disk=write, writing=-1, both=-write_beside), unwritten),
            "disk": (row(reading=1, writing=1, both=1, T=-1), after),
            "ahead": (row(ahead=1, stall=-1), windows_read if workload.reverses else before),
        }
    program = partial(
        scipy.optimize.linprog,
        row(T=1, stall=1, others=1),
        A_ub=np.array([coefficients for coefficients, _ in rows.values()]),
        b_ub=np.array([limit for _, limit in rows.values()]),
        A_eq=np.array([row(x=each, y=each, z=each) for each in np.eye(n)]),
        b_eq=np.ones(n),
        bounds=[limit for name, size in sizes.items() for limit in limits.get(name, [(0.0, None)] * size)],
        method="highs",
    )
    solution = program()
    if solution.x is None:  # presolve may call a program of far too short times infeasible
        solution = program(options={"presolve": False})
    if solution.x is None or solution.fun is None:
        names = ("host_bandwidth", *(service.rate for service in LANES.values()))
        rates = {name: float(getattr(profile, name)) for name in names}
        lowest, *_, highest = sorted(rates, key=rates.__getitem__)
        raise ValueError(
            f"no lower bound can be computed with profile {profile.name!r}: its rates are too far apart, {lowest} is "
            f"{rates[lowest]:.3g} and {highest} {rates[highest]:.3g}; measure them with `python -m dos.calibrate`"
        )
    parts = (solution.x[: 3 * n].reshape(3, n) @ numel) / max(float(numel.sum()), 1.0)
    order = (Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT)
    return float(solution.fun), {p: float(share) for p, share in zip(order, parts, strict=True)}


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


def _alone(load: SubgroupLoad, stream: Stream, profile: HardwareProfile) -> float:
    """Seconds in which state travels without anything beside it."""
    return operation_demand(stream, load.state_bytes, load, profile).seconds


def _whole(classes: Counter[SubgroupLoad], free: float) -> float:
    """The most bytes that whole subgroups take of the `free` bytes of a host.

    With many sizes not all sums are tried, and the result is `free`.
    """
    sums = {0}
    for load, count in classes.items():
        if len(sums) * count > MOST_SUMS:
            return free
        sums = {total + number * load.host_bytes for total in sums for number in range(count + 1)}
        sums = {total for total in sums if total <= free}
    return max(sums)


def _speeds_by_busy_lanes(
    costs: Sequence[dict[Stream, Demand]], saves: Sequence[Demand], fetches: Sequence[Demand], profile: HardwareProfile
) -> np.ndarray:
    """Speeds of CPU, H2D and D2H, one row for each set of them that is busy, 0 for the others.

    Where operations differ in their demand on host DRAM the least one counts: no plan is faster.
    """

    def least(*streams: Stream, others: Sequence[Demand] = ()) -> float:
        found = [*others, *(c[stream] for c in costs for stream in streams)]
        return min((each.rate for each in found if each.traffic > 0), default=0.0)

    asked = {
        CPU: least(Stream.CPU),
        H2D: least(Stream.PARAMETER, Stream.PREFETCH, others=fetches),
        D2H: least(Stream.GRADIENT, Stream.FLUSH, others=saves),
    }
    speeds = speeds_by_busy_lanes(asked, profile)
    busy = np.arange(len(speeds))[:, None] >> np.arange(len(asked)) & 1
    return speeds * busy
