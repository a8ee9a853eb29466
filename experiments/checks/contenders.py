"""Who takes part: AdamW on the device, no optimizer at all, and DOSAdam under any policy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from dos.deciding.controller import AdaptivePolicy, Policy
from experiments.checks.contest import Probe
from experiments.checks.machine import Machine
from experiments.checks.training import SETTINGS, Batch, Job, Reference, free_memory
from experiments.checks.vitals import Timed
from experiments.gpt import GPT
from perfmodel import Plan, Timeline, Workload
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.schedule import Schedule
from perfmodel.simulate import Phase, Scope, makespan


class OnDevice:
    """A model of its own, made anew for each turn, with torch.optim.AdamW wholly on the device, or with nothing.

    masters: see Reference; None for no optimizer at all.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        machine: Machine,
        *,
        masters: bool | None,
        before: Callable[[], object],
    ) -> None:
        self.name = name
        self._job, self._machine, self._masters, self._before = job, machine, masters, before
        self._model: GPT | None = None
        self._reference: Reference | None = None

    def open(self) -> None:
        self._before()
        self._model = self._job.model(self._machine.torch_device)
        if self._masters is not None:
            self._reference = Reference(list(self._model.parameters()), masters=self._masters)

    def close(self) -> None:
        self._model = self._reference = None
        free_memory(self._machine.device is None)

    def compute(self, batch: Batch) -> None:
        assert self._model is not None
        self._model(*batch).backward()

    def step(self) -> None:
        assert self._model is not None
        if self._reference is not None:
            emulated = self._machine.device
            if emulated is None:
                self._reference.step()
            else:
                emulated.launch(0, self._reference.step, self._job.numel).wait()
        self._model.zero_grad()

    def probe(self) -> Probe | None:
        return None

    def finish(self) -> None:
        pass


class Switch(AdaptivePolicy):
    """The policy of an optimizer that runs under one policy after the other, on the same memory.

    An adaptive policy to those who ask, so that every plan is asked for anew. workload: the last one.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__(profile)
        self.current: Policy = AdaptivePolicy(profile)
        self.workload: Workload | None = None

    def __call__(self, workload: Workload) -> Plan:
        self.workload = workload
        return self.current(workload)

    def observe(self, schedule: Schedule, workload: Workload, timeline: Timeline) -> None:
        if isinstance(self.current, AdaptivePolicy):
            self.current.observe(schedule, workload, timeline)


class Rig:
    """A model and one DOSAdam, which all contenders of that kind share.

    profile: calibrated; for predictions, and what adaptive policies begin with.
    live: optimizer state may use what memory is free; otherwise what `budget` says.
    """

    def __init__(
        self,
        job: Job,
        machine: Machine,
        profile: HardwareProfile,
        subgroup_size: int,
        *,
        live: bool,
    ) -> None:
        self.profile = profile
        self.switch = Switch(profile)
        self.subgroups = -(-job.numel // subgroup_size)
        self.slot_bytes = SPLIT.state_bytes * subgroup_size
        self.budget = 0
        self.model = job.model(machine.torch_device)
        self.optimizer = Timed(
            self.model.parameters(),
            policy=self.switch,
            subgroup_size=subgroup_size,
            memory_budget=None if live else lambda: self.budget,
            device=machine.device,
            **SETTINGS,
        )

    def leave(self) -> None:
        """Take all optimizer state off the device; it comes back when a plan wants it."""
        self.optimizer.synchronize()
        self.optimizer.state  # noqa: B018  (reading it brings state home)
        self.model.zero_grad()


class Ours:
    """DOSAdam under one policy. share: of the state, for which there is memory; None: all that is free."""

    def __init__(self, name: str, rig: Rig, policy: Policy, share: float | None = None) -> None:
        self.name = name
        self.share = share
        self._rig = rig
        self._policy = policy
        self._hooks: list[tuple[float, float]] = []

    def open(self) -> None:
        rig = self._rig
        rig.switch.current = self._policy
        # Half a subgroup more than the whole ones that fit, so that rounding cannot make them one fewer.
        rig.budget = int((round((self.share or 0.0) * rig.subgroups) + 0.5) * rig.slot_bytes)

    def close(self) -> None:
        self._rig.optimizer.synchronize()
        self._rig.optimizer.zero_grad()

    def compute(self, batch: Batch) -> None:
        optimizer = self._rig.optimizer
        optimizer.in_forward = optimizer.in_backward = 0.0
        self._rig.model(*batch).backward()
        self._hooks.append((optimizer.in_forward, optimizer.in_backward))

    def hooks(self) -> dict[str, float]:
        """Seconds for which the optimizer's hooks hold up the host in one iteration, medians of all."""
        forward, backward = map(statistics.median, zip(*self._hooks, strict=True)) if self._hooks else (0.0, 0.0)
        return {"hooks_in_forward_s": forward, "hooks_in_backward_s": backward}

    def step(self) -> None:
        self._rig.optimizer.step()
        self._rig.optimizer.zero_grad()

    def probe(self) -> Probe | None:
        rig = self._rig
        rig.optimizer.synchronize()
        timeline, plan, workload = rig.optimizer.timeline(), rig.optimizer.plan(), rig.switch.workload
        if not timeline or plan is None or workload is None:
            return None
        # The part of backward beside which gradients left in this step.
        workload = dataclasses.replace(workload, forward_s=0.0, backward_s=max(0.0, -first_start(timeline)))
        return Probe(timeline, plan, workload, predicted(plan, workload, rig.profile))

    def finish(self) -> None:
        self._rig.optimizer.synchronize()


def first_start(timeline: Timeline) -> float:
    return min((span.start for span in timeline.spans), default=0.0)


def scope_of(workload: Workload) -> Scope:
    """The update, beside a backward if gradients leave during it."""
    return Scope(Phase.OVERLAPPED if workload.backward_s else Phase.ABSENT)


def predicted(plan: Plan, workload: Workload, profile: HardwareProfile) -> float:
    """Seconds from the call of step() to the last end, as the model has it."""
    return makespan(plan, workload, profile, scope_of(workload)) - workload.backward_s
