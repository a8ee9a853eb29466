"""The accelerator's side of an optimizer: decides where to update, moves gradients early, runs the step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dos.controller import AdaptivePolicy, Controller, Policy
from dos.devices import Copy, Device, EmulatedDevice
from dos.engine import Engine
from dos.gradients import Departures
from dos.measure import measure_minimum, name_of
from dos.memory import MemoryMonitor
from dos.profiles import resolve_profile
from dos.registry import Registry
from dos.subgroup import ParameterRecord, Subgroup
from dos.work import SubgroupUpdate
from perfmodel import Placement, Plan, Timeline
from perfmodel.hardware import HardwareProfile


class Accelerator:
    """One device, the engine on it, and what is known of both.

    plan, timeline: of the last step; None before it.
    """

    def __init__(
        self, device: Device, registry: Registry, policy: Policy, profile: HardwareProfile | str | Path | None
    ) -> None:
        self.device = device
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self._engine = Engine(device)
        self._registry = registry
        self._policy = policy
        self._controller = Controller(policy)
        self._profile = profile
        self._memory = MemoryMonitor(device)
        self._departures = Departures()
        self._ahead: Plan | None = None

    def finish_with(self, owner: object) -> None:
        """Let work in flight end when its owner is collected or the interpreter exits, before anybody reads results."""
        weakref.finalize(owner, self._engine.finish)

    def decide(self) -> Plan | None:
        """Where to update this iteration; None if there is nothing on the device.

        Raises ValueError or TypeError for a plan that cannot be run.
        """
        if not self._registry.accelerated:
            return None
        policy = self._policy
        if isinstance(policy, AdaptivePolicy) and policy.profile is None:
            policy.profile = self._find_profile()
        workload = self._memory.workload(self._registry.loads(), self._engine.held_bytes)
        plan = self._controller.plan(workload)
        self._engine.check(plan, self._registry.accelerated)
        return plan

    def gradient_ready(self, record: ParameterRecord) -> None:
        """Start a gradient on its way to where this iteration's plan wants it, and perhaps state on its way here."""
        if self._ahead is None:
            self._memory.sample_peak(self._engine.held_bytes)
            try:
                self._ahead = self.decide()
            except (TypeError, ValueError):
                return  # the step will say what is wrong
        plan = self._ahead
        if plan is None:
            return
        index = self._registry.index
        self._departures.gradient_ready(
            record,
            wanted=lambda subgroup: plan.placements[index[subgroup]] is Placement.CPU,
            send=lambda subgroup, copies: self._engine.send_gradients(index[subgroup], copies),
        )
        if self._departures.past_half:
            self._engine.prefetch_early(plan, self._registry.accelerated)

    def take_gradient(self, record: ParameterRecord) -> None:
        """Offload a gradient: add it to those on the host and free it here."""
        offloaded = self._registry.offloaded
        assert offloaded is not None, "asked only when gradients are offloaded"
        index = self._registry.index[record.places[0][0]] if record.places else 0
        offloaded.take(record, lambda copies: self._engine.send_gradients(index, copies), self._engine.run_on_host)

    def start(self, plan: Plan, updates: Mapping[Subgroup, SubgroupUpdate], writes: int | None) -> None:
        """Issue the step.

        writes: how often every gradient was written since backward without changing a value.
        """
        works = [updates.get(subgroup) for subgroup in self._registry.accelerated]
        departed, missing = {}, []
        for work in works:
            late: list[Copy] = []
            if work is not None and not work.offloaded:
                pieces = [u.piece for u in work.pieces]
                holding, departed[work.subgroup] = self._departures.arriving(work.subgroup, pieces, writes)
                late = work.downloads([u for u in work.pieces if u.piece not in holding])
            missing.append(late)
        self.plan = plan
        self._engine.start(plan, works, departed, missing)
        self._memory.sample_update(self._engine.held_bytes)

    def end_iteration(self, writes: int | None) -> None:
        """The step was issued or skipped: what comes now belongs to the next iteration."""
        self._departures.finish(writes)
        self._ahead = None

    def wait(self) -> None:
        """Block until nothing is in flight. Raises RuntimeError if the step failed."""
        timeline = self._engine.wait()
        if timeline is not None and self.plan is not None:
            self.timeline = timeline
            self._controller.observe(self.plan, timeline)

    def wait_for(self, record: ParameterRecord) -> None:
        """Order what the caller queues on the device from now on behind the update of this parameter."""
        for subgroup, _ in record.places:
            self._engine.wait_for(subgroup)

    def bring_home(self) -> None:
        """Return all resident state to the host."""
        self._engine.bring_home()

    def read(self, record: ParameterRecord) -> Tensor:
        """The parameter as it is on the device: 1-D, on the host. Resident state is brought home."""
        self._engine.bring_home()
        value = self.device.host_zeros(record.numel, record.flat.dtype)
        self._engine.fetch(value, record.flat)
        return value

    def _find_profile(self) -> HardwareProfile:
        """The user's profile, the one measured on this machine, or a rough measurement now."""
        if self._profile is None and isinstance(self.device, EmulatedDevice):
            return self.device.profile
        with torch.no_grad():
            return resolve_profile(self._profile, name_of(self.device)) or measure_minimum(self.device)
