"""The only author of plans: facts in, plan out; and the rates behind them, corrected by measured steps."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dos.calibration.measure import measure_minimum, name_of
from dos.devices import Device
from dos.machine.profiles import resolve_profile
from dos.machine.terminal import tell
from dos.machine.threads import lane_threads
from dos.planning.monitor import Budget, MemoryMonitor
from dos.planning.policies import AdaptivePolicy, Policy, plan_of
from dos.planning.report import Report, why_changed
from dos.state.homes import Homes, housed
from dos.state.subgroup import Subgroup
from dos.step.issue import Step
from dos.step.iteration import Iteration
from dos.step.late_host import MOST, LateHost, StepTimes
from dos.step.pace import Pace
from dos.step.prepare import Rooms
from perfmodel import Lane, Op, Plan, SubgroupLoad, Timeline, Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Tier
from perfmodel.policies import spilled
from perfmodel.tasks import Schedule

logger = logging.getLogger("dos.accelerator")

TOLD_AT = 3
"""The step about which one line is told: the first ones make state, and measure."""


@dataclass(frozen=True)
class Facts:
    """Everything from which a plan follows.

    workload: subgroups, memory, pace, saved tensors, and the limits of the host's memory.
    saved_bytes: bytes of saved tensors that have moved to the host in this forward; infinite before its end. State may
        take the memory of tensors only once they have moved, because callers may still refer to them.
    blocks: the blocks whose weights stay on the device, once the device has denied memory to more; None before.
    denied: the subgroups to which the device has denied memory in this step.
    rooms: see `Rooms`; None without a disk, and before a step.
    beside_forward: whether the next forward runs beside the step, so that both must fit in memory.
    """

    workload: Workload
    saved_bytes: float = math.inf
    blocks: frozenset[int] | None = None
    denied: frozenset[int] = frozenset()
    rooms: Rooms | None = None
    beside_forward: bool = False

    def left(self, plan: Plan, resident_bytes: int) -> float:
        """Return the bytes of device memory for more state, or slots, beside the state that is resident now.

        State that moves away in a step keeps its memory until the step ends, while the next forward may peak.
        """
        if not self.beside_forward:
            return math.inf
        moved = min(plan.activation_bytes, max(self.saved_bytes, self.workload.activation_least_bytes))
        room = self.workload.shared_free(int(moved)) - self.workload.weight_bytes(plan.blocks_on_device)
        return room - resident_bytes


class HostMemory(Protocol):
    """Bytes of host memory, and those of them that are pinned. May be read on any thread."""

    @property
    def nbytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...


class Decisions:
    """Makes the plans for one device.

    plan: of the last step; None before it. ended: the report of the last complete step, None before it; may be read on
        any thread.
    follows_memory: whether plans follow the memory that is free.
    memory: of the device. pace: how long forward and backward last. late_host: how late updates make the host.
    step_times: what `step()` takes the host.
    stepped: the iteration whose step was issued last.
    held: returns the bytes of state on the device. counted: see `MemoryMonitor`. Both may be called on any thread.
    host, pool: host memory of state and of saved tensors.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        profile: HardwareProfile | str | Path | None,
        budget: Budget,
        *,
        held: Callable[[], int],
        counted: Callable[[], int],
        host: HostMemory,
        pool: HostMemory,
    ) -> None:
        """policy, profile, budget: the user's arguments."""
        self.plan: Plan | None = None
        self.stepped: Iteration | None = None
        self.memory = MemoryMonitor(device, counted, budget)
        self.pace, self.late_host, self.step_times = Pace(queues=device.queues), LateHost(), StepTimes()
        self._device = device
        self._policy = policy
        self._adaptive = policy if isinstance(policy, AdaptivePolicy) else None
        self.follows_memory = self._adaptive is not None
        self._asked = deque[tuple[Workload, Plan]](maxlen=2)
        """The last workloads, of a step and with less memory, with the policy's plans."""
        self._profile = profile
        self._threads: int | None = None
        """Of plans whose policy says none; None: not looked for."""
        self._held, self._host, self._pool = held, host, pool
        self.ended: Report | None = None
        self._learned = 0
        """The number of steps that have ended."""
        self._ran: tuple[Schedule, Workload, Timeline, int] | None = None
        """The last step with its workload, measured times and threads, until `refine` has used them."""
        self._learned_of: Plan | None = None
        """The plan of the last step that has ended."""
        self._why = ""
        self._planned: tuple[Workload | None, HardwareProfile | None] = None, None
        """The workload and the profile for which the plan was made."""

    def decide(self, facts: Facts, now: Iteration) -> Plan:
        """Return the plan of this iteration. Raises ValueError or TypeError if the policy returns no plan."""
        if self._threads is None:
            self._find_rates()
        now.workload, now.withheld = facts.workload, self.memory.withheld
        return decide(facts, self._ask)

    def _ask(self, workload: Workload) -> Plan:
        """Return the policy's plan, computed once per workload, so that no policy is asked twice while a step is made.

        Of an adaptive policy the rates may have changed since.
        """
        for before, plan in self._asked:
            if before is workload or (self._adaptive is None and before == workload):
                return plan
        plan = plan_of(self._policy, workload)
        if self._threads and not plan.threads:
            plan = dataclasses.replace(plan, threads=self._threads)
        self._asked.append((workload, plan))
        return plan

    def begin_step(self, plan: Plan, now: Iteration) -> None:
        """Note that a step of this plan is being issued."""
        assert now.workload is not None, "the plan was made for it"
        before, self.plan, self.stepped, now.issued = self.plan, plan, now, plan
        if before != plan:
            (workload, profile), self._planned = self._planned, (now.workload, self.profile)
            self._why = why_changed(workload, now.workload, profile, self.profile)
            if logger.isEnabledFor(logging.INFO):
                report = self._report(now)
                logger.info("%s", report.change(), extra={"metrics": report.metrics()})

    def learn(self, step: Step, timeline: Timeline) -> None:
        """Learn from a step that has ended. timeline: of the schedule's tasks and of unused transits."""
        stepped = step.iteration
        stepped.read_moves()
        if stepped.workload is None or stepped.issued is None:  # of the latter, backward has issued a part alone
            return
        # Before the profile is corrected: the report has the rates for which the plan was made.
        before, self.ended = self.ended, self._report(stepped, timeline, step.origin)
        self._learned += 1
        if self._learned == TOLD_AT and before is not None:
            tell(partial(self.ended.summary, step.origin - before.origin))
        if stepped.alone:
            self.refine()  # no hook has seen a gradient since the step before, as where a graph is replayed
            self._ran = step.schedule, stepped.workload, step.ran, stepped.issued.threads
        if self.profile is not None and self._device.queues:
            profile = self.profile.with_threads(stepped.issued.threads)
            if stepped.workload.in_backward:
                self._learn_lateness(step, stepped.workload, timeline, profile)
            else:
                self._learn_host(step, stepped.workload, stepped.issued, timeline, profile)

    def _learn_lateness(self, step: Step, work: Workload, timeline: Timeline, profile: HardwareProfile) -> None:
        """Learn from a backward in which updates ran how late they made the host."""
        if work.blocks or work.micro_batches > 1:  # it waits for weights, and gradients add up beside it
            return
        spans = step.iteration.spans(step.origin)
        lasted = next((span for span in spans if span.op is Op.BACKWARD), None)
        if lasted is not None:
            beside = [min(s.end, lasted.end) - max(s.start, lasted.start) for s in timeline.spans if s.lane is Lane.CPU]
            beside_s = sum(seconds for seconds in beside if seconds > 0)
            self.late_host.add(lasted.end - lasted.start, beside_s, work.backward_s, profile.slowdown)

    def _learn_host(self, step: Step, work: Workload, plan: Plan, timeline: Timeline, profile: HardwareProfile) -> None:
        """Learn what a step took the host, and how late its updates on the CPU made the host in the next forward."""
        before, self._learned_of = self._learned_of, plan
        after, spans = step.iteration.following, timeline.on(Lane.CPU)
        if after is None or plan != before:  # what moves to other places takes time, too
            return
        slowdown = profile.slowdown if spans else 1.0
        handing_s, queuing_s = step.handing_s, step.queuing_s
        rest_s = after.began - step.began - handing_s - queuing_s
        if not work.forward_s:  # it waits for its updates
            rest_s -= step.iteration.blocked_s(step.began, after.began)
        elif after.first and not work.blocks:
            blocked_s = step.iteration.blocked_s(after.began, after.first)
            begin, end = after.began - step.origin, after.first - step.origin
            beside_s = sum(max(0.0, min(span.end, end) - max(span.start, begin)) for span in spans)
            lasted_s, beside_s = end - begin - blocked_s, max(0.0, beside_s - blocked_s)
            self.late_host.add(lasted_s, beside_s, work.forward_s, slowdown)
            # Hooks wait for updates, and the threads that update take Python's lock.
            rest_s += max(0.0, lasted_s - work.forward_s - MOST * beside_s)
        self.step_times.add(slowdown, (handing_s, step.handed), (queuing_s, step.queued), (rest_s, 1))

    def refine(self) -> None:
        """Correct the rates by the last step. Called as backward begins: behind the step the device would wait."""
        ran, self._ran = self._ran, None
        if ran is not None and self._adaptive is not None:
            self._adaptive.observe(*ran)

    @property
    def profile(self) -> HardwareProfile | None:
        """The present rates; None if the policy needs none."""
        return None if self._adaptive is None else self._adaptive.profile

    def _report(self, iteration: Iteration, measured: Timeline | None = None, origin: float = 0.0) -> Report:
        """Return the report of a step with the present figures."""
        assert iteration.issued is not None, "that of the step"
        assert iteration.workload is not None, "the plan was made for it"
        return Report(
            iteration=iteration,
            plan=iteration.issued,
            workload=iteration.workload,
            profile=self.profile,
            measured=measured,
            origin=origin,
            reading=self.memory.reading,
            held_bytes=self._held(),
            host_bytes=self._host.nbytes,
            pool_bytes=self._pool.nbytes,
            pinned_bytes=self._host.pinned_bytes + self._pool.pinned_bytes,
            why=self._why,
            real=self._device.known_profile is None,
            late_s=self.pace.late_s,
            late_in_backward_s=self.pace.late_in_backward_s,
        )

    def _find_rates(self) -> None:
        """Find the profile of an adaptive policy, and the number of threads with which its rates were measured.

        A fixed policy uses as many as are best by the machine's profile, if it has one.
        """
        found = None if self._adaptive is None else self._adaptive.profile
        known = self._device.known_profile
        if found is None:
            found = self._find_profile(known)
        if self._adaptive is not None:
            self._adaptive.profile = found
        chosen = lane_threads(chosen=True)
        # An emulated device is as fast as it is with any number of threads.
        self._threads = 0 if known is not None or found is None else chosen or found.cpu_threads
        if self._adaptive is not None and found is not None and (chosen or known is not None):
            self._adaptive.profile = found.with_threads(self._threads).replace(by_threads=())

    def _find_profile(self, known: HardwareProfile | None) -> HardwareProfile | None:
        """Return the user's profile, the one measured on this machine, or for an adaptive policy a rough one.

        known: the device's own.
        """
        if self._profile is None and known is not None:
            return known
        with torch.no_grad():
            found = resolve_profile(self._profile, name_of(self._device))
            return measure_minimum(self._device) if found is None and self._adaptive is not None else found


def decide(facts: Facts, policy: Policy) -> Plan:
    """Return the plan for these facts; no other function changes a plan.

    policy: the user's. Raises ValueError or TypeError if a policy returns something other than a plan.
    """
    work = facts.workload
    plan = policy(work)
    if plan.on_disk or work.host_free_bytes < math.inf:
        plan = spilled(plan, work)
    # User code may still refer to tensors that should move: state gets only the memory of tensors that have moved.
    if plan.activation_bytes > facts.saved_bytes:
        less = dataclasses.replace(work, activation_host_bytes=max(facts.saved_bytes, work.activation_least_bytes))
        plan = dataclasses.replace(spilled(policy(less), less), activation_bytes=plan.activation_bytes)
    plan = plan.on_host(facts.denied)
    if work.blocks:
        plan = dataclasses.replace(plan, blocks_on_device=_blocks(plan, work) if facts.blocks is None else facts.blocks)
    return plan if facts.rooms is None else _where_there_is_room(plan, facts.rooms)


def _blocks(plan: Plan, work: Workload) -> frozenset[int]:
    """Return the blocks whose weights stay: the plan's, or as many as the workload allows."""
    count = len(plan.blocks_on_device)
    allowed = int(min(max(count, work.blocks_least), work.blocks_most, len(work.blocks)))
    return plan.blocks_on_device if count == allowed else work.staying(allowed)


def _where_there_is_room(plan: Plan, rooms: Rooms) -> Plan:
    """Return the plan with state on disk for which the host has no room, or none until other state has moved."""
    resting = [i for i in rooms.homes if plan.stays(i) is Tier.HOST]
    made, homes = ({i: each[i] for i in resting} for each in (rooms.made, rooms.homes))
    # State that moves home from disk passes through windows, too. If some state does not fit without windows, windows
    # are needed, and take memory from all.
    beside_windows = rooms.room - max(0, rooms.through - rooms.windows)
    passes = bool(plan.on_disk or rooms.from_disk)
    found = housed(made, homes, beside_windows if passes else rooms.room)
    if len(found) < len(resting) and not passes:
        found = housed(made, homes, beside_windows)
    return dataclasses.replace(plan, on_disk=plan.on_disk | {i for i in resting if i not in found})


def host_limits(homes: Homes, subgroups: Sequence[Subgroup], loads: Sequence[SubgroupLoad]) -> dict[str, Any]:
    """Return the fields of a workload that limit state on the host. loads: of these subgroups.

    Raises MemoryError if the host's share is too little even for windows.
    """
    homes.host.lower_share()
    limit = homes.host.limit
    if homes.disk is None or limit is None:
        return {}
    gradients = homes.host.gradient_bytes
    count, window = homes.windows_needed(subgroups)
    # State on disk could move home only through windows.
    fits = not homes.disk.nbytes and gradients + sum(load.host_bytes for load in loads) <= limit
    least = gradients + count * window
    if not fits and least > limit:
        raise MemoryError(
            f"state on disk passes through at least {count} windows of {window} bytes on the host"
            f"{f', beside {gradients} bytes of offloaded gradients' if gradients else ''}, found "
            f"host_memory={limit}; choose {least} or more, or a smaller subgroup_size if that can be"
        )
    return {"host_free_bytes": math.inf if fits else limit - least, "windows": count}
