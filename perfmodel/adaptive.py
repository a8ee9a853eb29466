"""The adaptive policy: which subgroups stay on the GPU, which are streamed and which are updated on the CPU."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, H2D, lane_speeds
from perfmodel.plan import Placement, Plan
from perfmodel.simulate import Costs, Scope, exposed
from perfmodel.workload import SubgroupLoad, Workload

MAX_SLOTS = 8
"""Three keep both links busy; more let prefetches go on while the GPU updates resident subgroups."""
SLOTS_TRIED = (0, 1, 2, 4)
"""Where memory for slots is taken from residents."""
ENDS = 4
"""What the steady state does not see is less than the time of so many subgroups: what comes closer is simulated."""
FEW = 12
"""Up to this many subgroups every division is simulated."""
SIMULATED = 50
"""Up to this many the divisions near the steady one are, beyond it those of a sample."""
SAMPLE = 18
"""Subgroups of that sample, with several slots and no forward beside it: else it has SIMULATED."""
INSTANT = 1e-15
"""Seconds of an operation that has neither size nor fixed cost."""


def adaptive(workload: Workload, profile: HardwareProfile) -> Plan:
    """The plan with the least exposed time that the model finds.

    1. Resident: as many subgroups as fit into the memory free at the peak; on no scarce lane do they cost anything.
    2. The rest is divided between CPU and streamed; how many are on the CPU is the one number to find. It is found
       where lanes that work without pause end soonest (`_steady`).
    3. The pipeline's first and last operations, which that does not see, are simulated for some divisions of a
       problem of at most SIMULATED subgroups, and the division moves to where the simulated time is least. So is what
       hides behind a forward, and what takes turns in a single slot.

    Streamed and CPU subgroups alternate evenly, so that no lane waits, and parameters arrive evenly for the forward.
    Where slots take their memory from what could be resident, some divisions of it between both are compared.
    """
    memory = _memory_divided(workload)
    divisions = sorted((_Division(workload, profile, *each) for each in memory), key=lambda d: d.steady_s)
    if len(workload.subgroups) > FEW:
        divisions = [d for d in divisions[:2] if d.steady_s <= divisions[0].close_s]
    return min((division.decided() for division in divisions), key=lambda found: found[1])[0]


def _memory_divided(workload: Workload) -> list[tuple[float, int]]:
    """Bytes for residents, with a number of slots beside them; several where both share their memory."""
    peak, shared, slot = workload.peak_free_bytes, workload.shared_free_bytes, max(workload.slot_bytes, 1)
    slots = int(min(MAX_SLOTS, workload.update_free_bytes / slot))
    if math.isinf(shared) or min(peak, shared) >= workload.state_bytes:
        return [(peak, slots)]
    tried = sorted({min(slots, most) for most in SLOTS_TRIED if most * slot <= shared})
    return [(min(peak, shared - count * slot), count) for count in tried]


class AdaptivePlanner:
    """What DOSAdam runs: `adaptive` that remembers the last plan, and keeps all state on the device where it fits.

    A share for the CPU would then relieve the GPU of some milliseconds, at the price of traffic in every iteration.
    """

    def __init__(self) -> None:
        self._inputs: tuple[Workload, HardwareProfile] | None = None
        self._plan: Plan | None = None

    def __call__(self, workload: Workload, profile: HardwareProfile) -> Plan:
        if self._plan is None or self._inputs != (workload, profile):
            fits = workload.state_bytes <= min(workload.peak_free_bytes, workload.shared_free_bytes)
            self._plan = _all_resident(workload) if fits else adaptive(workload, profile)
            self._inputs = (workload, profile)
        return self._plan


def _all_resident(workload: Workload) -> Plan:
    n = len(workload.subgroups)
    return Plan((Placement.GPU_RESIDENT,) * n, tuple(range(n)), slots=0)


class _Division:
    """How many subgroups of one workload the CPU updates; the others are resident as far as they fit, then streamed."""

    def __init__(self, workload: Workload, profile: HardwareProfile, resident_bytes: float, slots: int) -> None:
        self._workload = workload
        self._profile = profile
        self._n = len(workload.subgroups)
        self._mean = _mean(workload.subgroups)
        self._scope = Scope.beside(workload)
        self._slots = slots
        self._resident = _fitting(workload, resident_bytes)
        held = sum(workload.subgroups[i].numel for i in self._resident)
        self._room = held / max(self._mean.numel, 1)
        self._least = 0.0 if self._slots else self._n - self._room
        self._least_whole = math.ceil(self._least - 1e-9)
        self._costs: dict[int, float] = {}
        self._steady_s = _steady(workload, profile, Costs.of(self._mean, profile), self._room, self._slots)
        self.steady = _lowest(self._steady_s, self._least, float(self._n))
        self.steady_s = self._steady_s(self.steady)
        self.close_s = self.steady_s * (1 + ENDS / self._n)

    def decided(self) -> tuple[Plan, float]:
        """The plan and its exposed seconds: simulated, or the steady state's and what a sample has for the ends."""
        if self._n <= SIMULATED:
            best = self._simulated_best()
            return self._assign(best), self._cost(best)
        if self._workload.forward_s or self._slots == 1:
            # What hides behind the forward, or what one slot's turns take, is a share of the subgroups.
            each = self._n / SIMULATED
            near = round(self._sample(SIMULATED)._simulated_best() * each)
            best = min(self._descend(near, step=round(each / 2)), self._n, key=self._cost)
            return self._assign(best), self._cost(best)
        more, ends_s = self._sample(SAMPLE).ends()
        on_cpu = min(max(round(self.steady + more), self._least), float(self._n))
        return self._assign(on_cpu), self._steady_s(on_cpu) + ends_s

    def ends(self) -> tuple[float, float]:
        """For the pipeline's ends: subgroups that belong on the CPU, and seconds, beyond those of the steady state."""
        best, cost = self._simulated_best(), self._cost
        bottom = float(best)
        if self._least + 2 <= best <= self._n - 2:
            below = (cost(best - 2), cost(best - 1))
            above = (cost(best + 1), cost(best + 2))
            fall, rise = below[1] - below[0], above[1] - above[0]
            if rise - fall > 1e-9 * above[1]:
                crossing = best + (below[1] + fall - above[0] + rise) / (rise - fall)
                bottom = min(max(crossing, best - 1.0), best + 1.0)
        return bottom - self.steady, cost(best) - self._steady_s(best)

    def _simulated_best(self) -> int:
        """The number of subgroups on the CPU with the least simulated time."""
        lowest, highest = self._least_whole, self._n
        if self._n <= FEW:
            return min(range(lowest, highest + 1), key=self._cost)
        # Streaming all, or all but one, can be better still than the valley that the steady state is in.
        ends: Sequence[int] = (highest, lowest, min(lowest + 1, highest))
        if not self._workload.forward_s:  # of which the steady state knows nothing
            ends = [x for x in ends if self._steady_s(x) <= self.close_s]
        return min((self._descend(round(self.steady)), *ends), key=self._cost)

    def _descend(self, near: int, step: int = 1) -> int:
        """The bottom of the valley of simulated times that `near` is in, by steps of so many subgroups."""
        better = min(max(near, self._least_whole), self._n)
        best = None
        while best != better:
            best = better
            tried = [x for x in (best, best - step, best + step) if self._least_whole <= x <= self._n]
            better = min(tried, key=self._cost)
        return better

    def _cost(self, on_cpu: int) -> float:
        """Simulated seconds that are exposed with so many subgroups on the CPU."""
        known = self._costs.get(on_cpu)
        if known is None:
            plan = self._assign(on_cpu)
            known = self._costs[on_cpu] = exposed(plan, self._workload, self._profile, self._scope)
        return known

    def _sample(self, size: int) -> _Division:
        """The same problem with so many mean subgroups."""
        share = size / self._n
        work = self._workload
        held = round(self._room * share) * self._mean.state_bytes
        spare = work.peak_free_bytes - sum(work.subgroups[i].state_bytes for i in self._resident)
        times = work.forward_s * share, work.backward_s * share
        smaller = Workload((self._mean,) * size, *times, held + spare, work.update_free_bytes)
        return _Division(smaller, self._profile, held, self._slots)

    def _assign(self, on_cpu: float) -> Plan:
        """The plan with this many mean subgroups on the CPU."""
        loads = self._workload.subgroups
        resident = self._resident
        spare = self._n - on_cpu
        if spare < self._room:
            resident = resident[: round(spare * len(resident) / self._room)]
        placements = [Placement.CPU] * self._n
        for i in resident:
            placements[i] = Placement.GPU_RESIDENT
        rest = [i for i in range(self._n) if placements[i] is Placement.CPU]
        streamed = max(0.0, spare - self._room) * self._mean.numel
        share = min(1.0, streamed / max(sum(loads[i].numel for i in rest), 1)) if self._slots else 0.0
        owed = (0.5 - share) * self._mean.numel  # so that the first is streamed and the GPU starts at once
        for i in rest:
            owed += share * loads[i].numel
            if share and owed >= (0.5 - 1e-9) * loads[i].numel:
                placements[i] = Placement.GPU_STREAMED
                owed -= loads[i].numel
        count = placements.count(Placement.GPU_STREAMED)
        return Plan(tuple(placements), tuple(range(self._n)), min(self._slots, count))


def _steady(
    workload: Workload, profile: HardwareProfile, costs: Costs, room: float, slots: int
) -> Callable[[float], float]:
    """Exposed seconds by number of subgroups on the CPU, if lanes waited for each other in the long run only.

    First the GPU updates the resident subgroups, while the CPU works and slots are filled. Then CPU and links work off
    what is left, at the speeds of `lanes.lane_speeds` for those still busy. Gradients that did not leave before take
    turns with flushes on the D2H link, and the CPU updates no faster than they come.
    """
    n = len(workload.subgroups)
    gradient, flush, prefetch, cpu_s = (
        max(cost[0], INSTANT) for cost in (costs.gradient, costs.flush, costs.prefetch, costs.cpu_update)
    )
    gpu_s = costs.gpu_update[0]
    demands = {CPU: costs.cpu_update[1] / cpu_s, H2D: costs.prefetch[1] / prefetch, D2H: costs.flush[1] / flush}
    cpu_alone = lane_speeds({CPU: demands[CPU]}, profile)[CPU]

    known: dict[tuple[int, ...], list[float]] = {}

    def seconds(on_cpu: float) -> float:
        streamed = max(0.0, n - room - on_cpu)
        first_s = min(room, n - on_cpu) * gpu_s if streamed else 0.0
        before_s = workload.backward_s + first_s
        late = max(0.0, on_cpu - before_s / gradient)  # gradients still to leave
        ahead = on_cpu - late - first_s * cpu_alone / cpu_s  # gradients that the CPU has yet to use
        turns = cpu_s / (gradient + flush) * (1 + max(0.0, ahead) / late) if late > 0 and streamed else math.inf
        work = {
            CPU: on_cpu * cpu_s - first_s * cpu_alone,
            H2D: on_cpu * costs.parameter[0] + max(0.0, streamed * prefetch - min(before_s, slots * prefetch)),
            D2H: late * gradient + streamed * flush,
        }
        left = {lane: s for lane, s in work.items() if s > 0}
        now = first_s
        while left:
            speeds = known.get(tuple(left))
            if speeds is None:
                speeds = known[tuple(left)] = lane_speeds({lane: demands[lane] for lane in left}, profile)
            if CPU in left and D2H in left and turns * speeds[D2H] < speeds[CPU]:
                slower = demands[CPU] * (turns * speeds[D2H] / speeds[CPU])
                speeds = lane_speeds({lane: demands[lane] for lane in left} | {CPU: slower}, profile)
                speeds[CPU] = turns * speeds[D2H]
            first = min(left, key=lambda lane: left[lane] / speeds[lane])
            step = left[first] / speeds[first]
            now += step
            left = {lane: s - step * speeds[lane] for lane, s in left.items() if lane != first}
        staging = first_s + streamed * (prefetch + gpu_s + flush) / slots if slots else 0.0
        # Taken for the exposed time beside a forward, too: an update that ends early brings parameters early.
        return max(now, staging, (n - on_cpu) * gpu_s)

    return seconds


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of [low, high] with one valley is lowest, to 1e-4 of high (golden section)."""
    tolerance = max(high, 10.0) * 1e-4
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _mean(loads: Sequence[SubgroupLoad]) -> SubgroupLoad:
    """The mean subgroup, to the nearest byte, in the format that most have."""
    sizes = [f.name for f in dataclasses.fields(SubgroupLoad) if f.name != "format"]
    means = (round(sum(getattr(load, f) for load in loads) / len(loads)) for f in sizes)
    return SubgroupLoad(*means, format=statistics.mode(load.format for load in loads))


def _fitting(workload: Workload, free: float) -> list[int]:
    """Subgroups whose state fits into so many bytes, larger ones first."""
    loads = workload.subgroups
    found = []
    for i in sorted(range(len(loads)), key=lambda i: -loads[i].state_bytes):
        if loads[i].state_bytes <= free:
            free -= loads[i].state_bytes
            found.append(i)
    return found
