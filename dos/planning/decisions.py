"""Makes the plans for a device, and corrects the rates behind them by measured steps."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from dos.calibration.measure import measure_minimum, name_of
from dos.devices import Device
from dos.machine.profiles import resolve_profile
from dos.machine.terminal import tell
from dos.machine.threads import set_kernel_threads
from dos.planning.decide import Facts, decide
from dos.planning.monitor import Budget, MemoryMonitor
from dos.planning.policies import AdaptivePolicy, Policy, plan_of
from dos.planning.report import Report, why_changed
from dos.step.issue import Step
from dos.step.iteration import Iteration
from dos.step.pace import Pace
from perfmodel import Plan, Timeline, Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.tasks import Schedule

logger = logging.getLogger("dos.accelerator")

TOLD_AT = 3
"""The step about which one line is told: the first ones make state, and measure."""


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
    memory: of the device. pace: how long forward and backward last.
    stepped: the iteration whose step was issued last.
    held: returns the bytes of state on the device. away: returns those of saved tensors that have moved by the plan.
        Both may be called on any thread. host, pool: host memory of state and of saved tensors.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        profile: HardwareProfile | str | Path | None,
        budget: Budget,
        *,
        held: Callable[[], int],
        away: Callable[[], int],
        host: HostMemory,
        pool: HostMemory,
    ) -> None:
        """policy, profile, budget: the user's arguments."""
        self.plan: Plan | None = None
        self.stepped: Iteration | None = None
        self.memory = MemoryMonitor(device, lambda: held() - away(), budget)
        self.pace = Pace(queues=device.queues)
        self._device = device
        self._policy = policy
        self._adaptive = policy if isinstance(policy, AdaptivePolicy) else None
        self._asked = deque[tuple[Workload, Plan]](maxlen=2)
        """The last workloads, of a step and with less memory, with the policy's plans."""
        self._profile = profile
        self._held, self._host, self._pool = held, host, pool
        self.ended: Report | None = None
        self._learned = 0
        """The number of steps that have ended."""
        self._ran: tuple[Schedule, Workload, Timeline] | None = None
        """The last step with its workload and measured times, until `refine` has used them."""
        self._why = ""
        self._planned: tuple[Workload | None, HardwareProfile | None] = None, None
        """The workload and the profile for which the plan was made."""

    @property
    def follows_memory(self) -> bool:
        """Whether plans follow the memory that is free."""
        return self._adaptive is not None

    def decide(self, facts: Facts, now: Iteration) -> Plan:
        """Return the plan of this iteration. Raises ValueError or TypeError if the policy returns no plan."""
        if self._adaptive is not None and self._adaptive.profile is None:
            self._adaptive.profile = self._find_profile()
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
        self._asked.append((workload, plan))
        return plan

    def begin_step(self, plan: Plan, now: Iteration) -> None:
        """Note that a step of this plan is being issued."""
        assert now.workload is not None, "the plan was made for it"
        before, self.plan, self.stepped, now.issued = self.plan, plan, now, plan
        if before is None or not _alike(before, plan):
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
            self._ran = step.schedule, stepped.workload, step.ran

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

    def _find_profile(self) -> HardwareProfile:
        """Return the user's profile, the one measured on this machine, or a rough measurement now."""
        known = self._device.known_profile
        if self._profile is None and known is not None:
            return known
        with torch.no_grad():
            found = resolve_profile(self._profile, name_of(self._device)) or measure_minimum(self._device)
        if known is None:
            set_kernel_threads(found.cpu_threads)  # its rate of updates was measured with this number
        return found


def _alike(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ only in order, which alternates where state is on disk."""
    return len(plan) == len(other) and dataclasses.replace(plan, order=other.order) == other
