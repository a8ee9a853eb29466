"""Policies, and the corrections of an adaptive one: pure functions, without device and tensors."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial

from dos.arguments import is_number
from dos.machine.profiles import calibrated_rates
from perfmodel import Lane, Op, Plan, Timeline, Workload
from perfmodel.adaptive import AdaptivePlanner
from perfmodel.demand import demands
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, LANES, Stream
from perfmodel.policies import cpu_only, resident, static_ratio, stride
from perfmodel.simulate import serve
from perfmodel.tasks import Schedule

Policy = Callable[[Workload], Plan]

_KNOWN = (
    "'adaptive', 'cpu', 'stride:K' with K of 1 or more, 'resident', a ratio in [0, 1] (the share on the CPU), "
    "or a callable Workload -> Plan"
)


_BY_NAME: dict[str, Policy] = {"cpu": cpu_only, "resident": resident}


def resolve_policy(policy: str | float | Policy) -> Policy:
    """Return the function of the argument `policy`.

    Raises ValueError for an unknown name, a stride below 1 or a ratio outside [0, 1], TypeError for another type.
    """
    if callable(policy):
        return policy
    if is_number(policy):
        policy = float(policy)
        if not 0.0 <= policy <= 1.0:
            raise ValueError(f"policy: a ratio is the share updated on the CPU and lies in [0, 1], found {policy}")
        return partial(static_ratio, ratio=policy)
    if not isinstance(policy, str):
        raise TypeError(f"policy: expected {_KNOWN}, found {policy!r}")
    name, _, argument = policy.partition(":")
    if policy == "adaptive":
        return AdaptivePolicy()
    if policy in _BY_NAME:
        return _BY_NAME[policy]
    if name == "stride":
        try:
            k = int(argument)
        except ValueError:
            raise ValueError(f"policy: expected a whole number after 'stride:', found {policy!r}") from None
        if k < 1:
            raise ValueError(f"policy: a stride is 1 or more (2: every second subgroup on the GPU), found {policy!r}")
        return partial(stride, k=k)
    raise ValueError(f"policy: expected {_KNOWN}, found {policy!r}")


class AdaptivePolicy:
    """Returns the best plan under a profile that measurements correct; all state stays on the device where it fits.

    profile: must be set before the first call.
    """

    def __init__(self, profile: HardwareProfile | None = None) -> None:
        self.profile = profile
        self._planner = AdaptivePlanner()
        self._refinement = Refinement()

    def __call__(self, workload: Workload) -> Plan:
        assert self.profile is not None, "its owner sets the profile first"
        return self._planner(workload, self.profile)

    def observe(self, schedule: Schedule, workload: Workload, timeline: Timeline, threads: int = 0) -> None:
        """Correct the profile by a step's timeline. threads: of its plan."""
        if self.profile is not None:
            self.profile = self._refinement.correct(self.profile, schedule, workload, timeline, threads)


_GROUPS = ((Lane.GPU,), (Lane.CPU, Lane.H2D, Lane.D2H, Lane.READ, Lane.WRITE))
"""The groups of lanes that slow each other down: all except the GPU share host memory."""


class Refinement:
    """Corrects a profile by measured timelines: lasting changes are followed, single slow steps are not.

    Each lane's measured busy time is compared with the simulator's for the same schedule, contention included. The
    median ratio of the last REMEMBERED steps counts; when it is off by more than TOLERANCE, the rate behind the lane is
    divided by it. Then all ratios are forgotten, because the old rates predicted the times of lanes that share host
    memory.

    A lane that was corrected one way is corrected the other way by the median of twice as many steps, at each turn, up
    to LAST: plans show different ratios of a lane, and rates that followed each plan would have others made for ever.

    A lane counts only in steps in which it, and the lanes that slow it down, served only tasks of the schedule.

    A rate that was calibrated stays within MOST of what it was then, and one of a lane alone does not rise: a larger
    difference has another cause than the rate, which a plan made with another rate would not meet.
    """

    REMEMBERED = 5
    TOLERANCE = 0.05
    LAST = 8 * REMEMBERED
    MOST = 0.1
    SHORTEST_S = 1e-4
    """Lanes that were busy for less time do not count."""

    def __init__(self) -> None:
        self._ratios: dict[Lane, deque[float]] = {lane: deque(maxlen=self.REMEMBERED) for lane in Lane}
        self._slower: dict[Lane, bool] = {}
        """Whether it was when it was last off."""
        self._expected: tuple[tuple[HardwareProfile, Schedule, Workload], Timeline] | None = None
        self._corrected: HardwareProfile | None = None
        self._range: dict[str, tuple[float, float]] = {}
        """The least and the most that calibrated rates may become."""

    def correct(
        self, profile: HardwareProfile, schedule: Schedule, workload: Workload, timeline: Timeline, threads: int = 0
    ) -> HardwareProfile:
        """Return the profile after one more step; the same object if nothing changes.

        schedule: the one that was issued, of these subgroups. threads: of its plan.
        """
        # Gradients that were sent during backward met no uploads, and without the length of backward it is not known
        # for how long.
        unknown = not workload.backward_s and _waits_for_backward(schedule)
        at = profile.with_threads(threads)
        expected = self._simulated(at, schedule, workload)
        for lanes in _GROUPS:
            if (unknown and Lane.GPU not in lanes) or _served(timeline, lanes) != _served(expected, lanes):
                continue
            for lane in lanes:
                measured, predicted = timeline.busy(lane), expected.busy(lane)
                if min(measured, predicted) >= self.SHORTEST_S:
                    self._ratios[lane].append(measured / predicted)
        off = {lane: statistics.median(r) for lane, r in self._ratios.items() if len(r) == r.maxlen}
        off = {
            lane: ratio for lane, ratio in off.items() if abs(ratio - 1) > self.TOLERANCE and self._again(lane, ratio)
        }
        if not off:
            return profile
        busy = {lane for lane, ratios in self._ratios.items() if ratios}
        for ratios in self._ratios.values():
            ratios.clear()
        if self._corrected is not profile:
            self._range = _ranges(profile, self.MOST)
        rates = _corrected(profile, workload, off, busy, threads)
        rates |= {
            name: min(max(rates[name], least), most) for name, (least, most) in self._range.items() if name in rates
        }
        if any(rate != getattr(profile, name) for name, rate in rates.items()):
            profile = profile.corrected(**rates)
        self._corrected = profile
        return profile

    def _again(self, lane: Lane, ratio: float) -> bool:
        """Whether a lane is off the same way as it was last; else more steps are to show it."""
        before, self._slower[lane] = self._slower.get(lane, ratio > 1), ratio > 1
        if before is not self._slower[lane]:
            ratios = self._ratios[lane]
            self._ratios[lane] = deque(ratios, min(2 * len(ratios), self.LAST))
        return before is self._slower[lane]

    def _simulated(self, profile: HardwareProfile, schedule: Schedule, workload: Workload) -> Timeline:
        """Return the predicted timeline of the optimizer's own work."""
        key = profile, schedule, workload
        if self._expected is None or self._expected[0] != key:
            predicted = serve(schedule, workload, profile)
            self._expected = key, Timeline.of(span for span in predicted.spans if span.subgroup is not None)
        return self._expected[1]


def _waits_for_backward(schedule: Schedule) -> bool:
    """Return whether gradients are sent during backward."""
    tasks = schedule.tasks
    pieces = {number for number, task in enumerate(tasks) if task.op is Op.BACKWARD and task.size}
    return any(task.op is Op.GRADIENT and not pieces.isdisjoint(task.after) for task in tasks)


def _served(timeline: Timeline, lanes: tuple[Lane, ...]) -> Counter[tuple[Lane, Op, int | None]]:
    """Return the work that these lanes did, with the number of times."""
    return Counter((span.lane, span.op, span.subgroup) for span in timeline.spans if span.lane in lanes)


def _ranges(profile: HardwareProfile, most: float) -> dict[str, tuple[float, float]]:
    """Return the least and the most that each calibrated rate may become: `most` of it less or more."""
    found = {}
    for name in calibrated_rates(profile):
        rate = getattr(profile, name)
        found[name] = (1 - most) * rate, (1 + most) * rate
        if name != "host_bandwidth":  # that of a lane alone is the most that it ever has
            alone = getattr(profile, name.removesuffix("_duplex"))
            found[name] = (1 - most) * rate, min((1 + most) * rate, max(alone, rate))
    return found


def _corrected(
    profile: HardwareProfile, workload: Workload, slower: dict[Lane, float], busy: Collection[Lane], threads: int
) -> dict[str, float]:
    """Return the rates that explain lanes `slower` by these factors, with the threads of the profile.

    busy: the lanes that were measured, with these `threads`. Where host DRAM cannot serve the CPU, both links and the
    disk, if that was busy, at once, its rate is corrected, too, if CPU updates are slower, which take most of it, or
    both links where there are none. The disk alone never corrects it, because it takes the least of it and is slow for
    other reasons.
    """
    of_disk = (stream for stream in (Stream.READ, Stream.WRITE) if LANE_OF_STREAM[stream] in busy)
    at = profile.with_threads(threads)
    each = demands(workload.subgroups[0], at)
    wanted = sum(each[stream].rate for stream in (Stream.CPU, Stream.PREFETCH, Stream.FLUSH, *of_disk))
    rates = {
        name: getattr(profile, name) / ratio
        for lane, ratio in slower.items()
        for name in (LANES[lane].rate, LANES[lane].duplex)
        if name
    }
    most = {Lane.CPU} if Lane.CPU in busy else {Lane.H2D, Lane.D2H}
    if most <= slower.keys() and wanted > at.host_bandwidth_per_rank:
        on_host = [ratio for lane, ratio in slower.items() if lane in (Lane.CPU, Lane.H2D, Lane.D2H)]
        rates["host_bandwidth"] = profile.host_bandwidth / statistics.median(on_host)
    return rates


def plan_of(policy: Policy, workload: Workload) -> Plan:
    """Return the policy's plan. Raises TypeError or ValueError if it is no plan for this workload."""
    plan = policy(workload)
    if not isinstance(plan, Plan):
        raise TypeError(f"the policy must return a perfmodel.Plan, found {type(plan).__name__}")
    if len(plan) != len(workload.subgroups):
        raise ValueError(
            f"the policy returned a plan of {len(plan)} subgroups for a workload of {len(workload.subgroups)}"
        )
    return plan
