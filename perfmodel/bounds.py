"""The least update time that any plan could have on a machine: a linear program over its lanes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from perfmodel.hardware import HardwareProfile, changed
from perfmodel.lanes import CPU, D2H, H2D, lane_speeds
from perfmodel.plan import Placement
from perfmodel.simulate import UPDATE_ALONE, Costs, Phase, Scope
from perfmodel.workload import Workload


@dataclass(frozen=True)
class Bound:
    """A lower bound and what it is made of.

    seconds: of the update alone, or, with compute in the scope, of what the update adds to it.
    binding: what would shorten it most if it were 1% more: `CPU`, `GPU`, `H2D`, `D2H`, `host DRAM`; `nothing` if
        all hides behind compute.
    shares: of the parameters, per placement, where the bound is reached.
    """

    seconds: float
    binding: str
    shares: dict[Placement, float]


def lower_bound(workload: Workload, profile: HardwareProfile, scope: Scope = UPDATE_ALONE) -> Bound:
    """The least time any plan can take under the simulator's rates and the workload's memory.

    Subgroups may be split over placements and lanes never wait for each other, so every plan's time is at least this.
    With x_i, y_i, z_i the parts of subgroup i on the CPU, streamed and resident (x_i + y_i + z_i = 1), t_A the time
    during which exactly the lanes A of CPU, H2D and D2H are busy while the GPU updates resident subgroups (it does
    them first), and u_A the same afterwards, minimise T such that

        CPU         sum x cpu_update                 <= sum over A with CPU of (t_A + u_A) speed_A(CPU)
        H2D         sum x parameter + y prefetch     <= sum over A with H2D of (t_A + u_A) speed_A(H2D)
        D2H         sum x gradient + y flush         <= sum over A with D2H of (t_A + u_A) speed_A(D2H)
        streaming   sum y prefetch, sum y flush      <= the same sums over u_A alone, but for the first filling of slots
        time        sum t_A <= sum z gpu_update,  sum u_A <= T - sum z gpu_update
        GPU         sum (y + z) gpu_update           <= T
        host DRAM   sum of all bytes moved           <= T x bandwidth of the rank
        fetching    sum y prefetch + z gpu_update    <= T, but for the first filling of slots
        slots       sum y (prefetch + update + flush) <= T x slots that fit
        memory      sum z state                      <= free at the peak; with what fills slots ahead, what is shared

    speed_A are the simulator's: duplex links and host DRAM shared by `lanes.shared_rates`. Beside an overlapped
    backward gradients may leave and slots be filled, which is taken off the work of the links; beside an overlapped
    forward everything may go on, which is added to the T of all rows but the GPU's, which computes the forward itself.
    """
    seconds, shares = _solve(workload, profile, scope)
    faster = {
        "CPU": ("cpu_update_rate",),
        "GPU": ("gpu_update_rate",),
        "H2D": ("h2d_bandwidth", "h2d_bandwidth_duplex"),
        "D2H": ("d2h_bandwidth", "d2h_bandwidth_duplex"),
        "host DRAM": ("host_bandwidth",),
    }

    def improved(resource: str) -> float:
        rates = {rate: 1.01 * getattr(profile, rate) for rate in faster[resource]}
        return _solve(workload, changed(profile, rates), scope)[0]

    return Bound(seconds, min(faster, key=improved) if seconds > 0 else "nothing", shares)


def _solve(workload: Workload, profile: HardwareProfile, scope: Scope) -> tuple[float, dict[Placement, float]]:
    """The optimum of `lower_bound`'s program, and the shares of the placements there."""
    classes = Counter(workload.subgroups)
    costs = [Costs.of(load, profile) for load in classes]
    counts = np.array(list(classes.values()), dtype=float)
    numel = counts * np.array([load.numel for load in classes])
    state = np.array([load.state_bytes for load in classes], dtype=float)
    n = len(counts)

    def total(*operations: str, part: int = 0) -> np.ndarray:
        return counts * np.array([sum(getattr(c, name)[part] for name in operations) for c in costs])

    # Variables: x, y, z (n each), t_A, u_A (one for each set of busy lanes), seconds of gradients beside backward, of
    # first fillings of slots beside backward, of all first fillings, T.
    speeds = _speeds_by_busy_lanes(costs, profile)
    cpu, h2d, d2h = speeds.T
    zero, none = np.zeros(n), np.zeros(len(speeds))
    before = workload.backward_s if scope.backward is Phase.OVERLAPPED else 0.0
    after = workload.forward_s if scope.forward is Phase.OVERLAPPED else 0.0

    def row(
        x: np.ndarray,
        y: np.ndarray,
        z: np.ndarray,
        first: np.ndarray,
        then: np.ndarray,
        seconds: float,
        early: float = 0,
        before_end: float = 0,
        ahead: float = 0,
    ) -> np.ndarray:
        return np.concatenate([x, y, z, first, then, [early, before_end, ahead, seconds]])

    staging = min(workload.update_free_bytes, workload.shared_free_bytes)
    resident = min(workload.peak_free_bytes, workload.shared_free_bytes)
    room = staging / max(float(state.min()), 1.0)
    fitting = math.floor(room) if math.isfinite(room) else math.inf
    slowest = max(c.prefetch[0] for c in costs)
    fill = min(fitting, float(counts.sum())) * slowest
    gpu, flush, prefetch = total("gpu_update"), total("flush"), total("prefetch")
    rows = [
        (row(total("cpu_update"), zero, zero, -cpu, -cpu, 0), 0.0),
        (row(total("parameter"), prefetch, zero, -h2d, -h2d, 0, before_end=-1), 0.0),
        (row(zero, prefetch, zero, none, -h2d, 0, ahead=-1), 0.0),
        (row(total("gradient"), flush, zero, -d2h, -d2h, 0, -1), 0.0),
        (row(zero, flush, zero, none, -d2h, 0), 0.0),
        (row(-total("gradient"), zero, zero, none, none, 0, 1), 0.0),
        (row(zero, zero, -gpu, none + 1, none, 0), 0.0),
        (row(zero, zero, gpu, none, none + 1, -1), after),
        (row(zero, gpu, gpu, none, none, -1), 0.0),
        (row(zero, prefetch, gpu, none, none, -1, ahead=-1), after),
        (row(zero, zero, zero, none, none, 0, before_end=1, ahead=-1), 0.0),
    ]
    host = profile.host_bandwidth_per_rank
    if math.isfinite(host):
        on_cpu = total("gradient", "cpu_update", "parameter", part=1) / host
        streamed = total("prefetch", "flush", part=1) / host
        up, down = profile.h2d_bandwidth / host, profile.d2h_bandwidth / host
        rows.append((row(on_cpu, streamed, zero, none, none, -1, -down, before_end=-up), after))
        rows.append((row(zero, streamed, gpu, none, none, -1, ahead=-up), after))
    scale = max(float(counts @ state), 1.0)
    if 0 < fitting < math.inf:
        rows.append((row(zero, (prefetch + gpu + flush) / fitting, zero, none, none, -1), before + after))
    if math.isfinite(resident):
        rows.append((row(zero, zero, counts * state / scale, none, none, 0), resident / scale))
    shared = workload.shared_free_bytes
    if math.isfinite(shared) and slowest > 0:
        # What was fetched ahead lies in slots, beside what is resident.
        slots = float(state.min()) / slowest / scale
        rows.append((row(zero, zero, counts * state / scale, none, none, 0, ahead=slots), shared / scale))
    solution = optimize.linprog(
        row(zero, zero, zero, none, none, 1),
        A_ub=np.array([coefficients for coefficients, _ in rows]),
        b_ub=np.array([limit for _, limit in rows]),
        A_eq=np.hstack([np.eye(n), np.eye(n), np.eye(n), np.zeros((n, 2 * len(speeds) + 4))]),
        b_eq=np.ones(n),
        bounds=[(0.0, 1.0)] * n
        + [(0.0, 1.0 if size <= staging else 0.0) for size in state]
        + [(0.0, 1.0)] * n
        + [(0.0, None)] * (2 * len(speeds))
        + [(0.0, before), (0.0, before), (0.0, fill), (0.0, None)],
        method="highs",
    )
    if solution.x is None or solution.fun is None:
        raise RuntimeError(f"the bound's linear program failed: {solution.message}")
    parts = (solution.x[: 3 * n].reshape(3, n) @ numel) / max(float(numel.sum()), 1.0)
    order = (Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT)
    return float(solution.fun), {p: float(share) for p, share in zip(order, parts, strict=True)}


def _speeds_by_busy_lanes(costs: Sequence[Costs], profile: HardwareProfile) -> np.ndarray:
    """Speeds of CPU, H2D and D2H, one row for each set of them that is busy.

    Where operations differ in their demand on host DRAM the least one counts: no plan is faster.
    """

    def least(*operations: str) -> float:
        found = [getattr(c, name) for c in costs for name in operations]
        return min((traffic / seconds for seconds, traffic in found if traffic > 0), default=0.0)

    demands = (least("cpu_update"), least("parameter", "prefetch"), least("gradient", "flush"))
    rows = []
    for busy in itertools.product((True, False), repeat=3):
        speeds = lane_speeds([d if b else -1.0 for d, b in zip(demands, busy, strict=True)], profile)
        rows.append([s if b else 0.0 for s, b in zip((speeds[CPU], speeds[H2D], speeds[D2H]), busy, strict=True)])
    return np.array(rows)
