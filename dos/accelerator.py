"""The accelerator's side of an optimizer: decides where to update, moves gradients early, runs the step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos.calibration.measure import measure_minimum, name_of
from dos.deciding.controller import Controller, Policy
from dos.deciding.report import Report, why_changed
from dos.devices import Caller, Copy, Device, Job
from dos.gradients.departures import Departures
from dos.guard import Guard
from dos.kernels.gpu_update import gpu_kernel_name
from dos.machine.profiles import resolve_profile
from dos.machine.threads import set_kernel_threads
from dos.memory.monitor import MemoryMonitor
from dos.options import Options
from dos.parameters.registry import Registry
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.engine import Engine
from dos.step.issue import Step
from dos.step.iteration import Iteration
from dos.step.pace import Pace
from dos.step.room import Prepared
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.schedule import Schedule

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """A step that has ended. One value, so that whoever reads it on another thread reads of one step.

    origin: the 0 of its timeline, on the clock of time.perf_counter.
    """

    report: Report
    iteration: Iteration
    origin: float


class Aside(NamedTuple):
    """A step that the device has not ended, behind which another one may be queued. alone: see `Accelerator._alone`."""

    step: Step
    plan: Plan
    iteration: Iteration
    alone: bool


class Accelerator:
    """One device, the engine on it, and what is known of both.

    plan: of the last step; None before it.
    replays: whether a CUDA graph has captured a backward, whose replays write gradients and run no hooks.
    """

    def __init__(self, device: Device, registry: Registry, policy: Policy, options: Options, guard: Guard) -> None:
        self.device = device
        self.plan: Plan | None = None
        self.replays = False
        self._engine = Engine(device, registry.host_store, guard)
        self._registry = registry
        self._controller = Controller(policy)
        self._profile = options.profile
        store = self._engine.device_store
        self._held: Callable[[], int] = lambda: store.nbytes + registry.lasting_bytes  # is asked on any thread
        self.memory = MemoryMonitor(device, self._held, options.memory_budget, options.memory_interval)
        self.departures = Departures()
        self._pace = Pace()
        self._now = Iteration(device)
        self._stepped: Iteration | None = None
        """Whose step was issued last."""
        self._ended: Ended | None = None
        """The last."""
        self._aside: deque[Aside] = deque()
        self._gradients_before = 0
        self._why = ""
        self._planned: tuple[Workload | None, HardwareProfile | None] = None, None
        """For what the plan was made."""
        self._waited_for: set[Subgroup] = set()
        self._alone = False

    def finish_with(self, owner: object) -> None:
        """Let work in flight end when its owner is collected or the interpreter exits, before anybody reads results."""
        weakref.finalize(owner, self._engine.finish)

    def decide(self, *, attached: bool) -> Plan | None:
        """Where to update this iteration; None if there is nothing on the device.

        attached: whether the update runs on into the next forward.

        Raises ValueError or TypeError for a plan that cannot be run.
        """
        if not self._registry.accelerated:
            return None
        if self._controller.needs_profile:
            self._controller.profile = self._find_profile()
        workload = self.memory.workload(
            self._registry.loads(), update_overlaps_forward=attached, beside=self._registry.gradient_bytes()
        )
        workload = dataclasses.replace(
            workload, forward_s=self._pace.forward_s if attached else 0.0, backward_s=self._pace.backward_s
        )
        plan = self._controller.plan(workload)
        self._engine.check(plan, self._registry.accelerated, self.memory.reading.memory.total)
        self._now.workload, self._now.withheld = workload, self.memory.withheld
        return plan

    def only_counts(self, record: ParameterRecord, lock: AbstractContextManager[Any]) -> bool:
        """Whether backward's gradient of this record stays where it is; then it was counted, and that is all.

        Counting may be interrupted. lock: the optimizer's, which is not held.
        """
        with lock:
            now, departures = self._now, self.departures
            if now.plan is None or self.travels(record) or (now.plan.slots and departures.past_half):
                return False
            for subgroup, _ in self._registry.places[record]:
                if subgroup in now.wanted:
                    return False
            self.gradient_came()
            departures.count(record)
            return True

    def gradient_came(self) -> None:
        """Backward has made another gradient: look at the memory, always at the first, and at the last of last time.

        Backward peaks at one or the other, and a peak that is not seen is room for state that is not there.
        """
        now = self._now
        now.gradients += 1
        if now.backward is not None:
            self.memory.sample(always=now.gradients == self._gradients_before)
        else:
            now.backward, now.travels = self.device.mark(), _gradients_travel()
            self._pace.backward_begins(now, self._stepped)
            self.memory.enter(Op.BACKWARD)

    def travels(self, record: ParameterRecord | None) -> bool:
        """Whether this record's gradients may change after backward's hooks. FSDP2 calls them when all is reduced."""
        return self.replays or (self._now.travels and not (record is not None and record.sharded))

    def gradient_ready(self, record: ParameterRecord, gradient: Tensor | None = None, *, attached: bool) -> None:
        """Start a gradient on its way to where this iteration's plan wants it, and perhaps state on its way here.

        gradient: what the parameter's will be made of, where it is not that yet.
        """
        plan = self._now.plan
        if plan is None:
            plan = self._look_ahead(attached=attached)
            if plan is None:
                return
        places = self._registry.places[record]
        self.departures.gradient_ready(record, places, self._now.wanted, self._send, self.device, gradient)
        if self.departures.past_half:
            self._engine.early.prefetch(plan, self._registry.accelerated, self.memory.spare_in_backward)

    def _look_ahead(self, *, attached: bool) -> Plan | None:
        """The plan as it would be now, for gradients and state to leave by."""
        try:
            plan = self.decide(attached=attached)
        except (TypeError, ValueError):
            return None  # the step will say what is wrong
        if plan is None:
            return None
        subgroups, engine = self._registry.accelerated, self._engine
        if self._controller.follows_memory and self.memory.foreseen:
            engine.early.settle(plan, subgroups)
        on_host = (subgroups[i] for i in plan.served(Placement.CPU) if not engine.device_store.has(subgroups[i]))
        # The memory through which gradients travel is made in step(), never here.
        self._now.wanted = {subgroup for subgroup in on_host if engine.host_store.stages(subgroup)}
        self._now.plan = plan
        return plan

    def _send(self, subgroup: Subgroup, copies: Sequence[Copy], callers: Collection[Caller]) -> Job:
        if self._now.left is None:
            self._now.left = self.device.mark()
        return self._engine.send_gradients(self._registry.index[subgroup], copies, callers)

    def take_gradient(self, record: ParameterRecord, *, in_backward: bool) -> None:
        """Offload a gradient: add it to those on the host and free it here.

        Where ranks divide the parameters, nothing is pinned in backward: it may wait for the device, whose collectives
        wait for other ranks.
        """
        offloaded = self._registry.offloaded
        assert offloaded is not None, "asked only when gradients are offloaded"
        subgroups = [subgroup for subgroup, _ in self._registry.places[record]]
        index = self._registry.index[subgroups[0]] if subgroups else 0
        engine = self._engine
        offloaded.take(
            record,
            subgroups,
            lambda copies: engine.send_gradients(index, copies),
            engine.run_on_host,
            pin=not (in_backward and record.sharded),
        )

    def forget_gradients(self) -> None:
        """Those that are there are of no use any more: none of them is held."""
        self.departures.forget()

    def abandon(self) -> None:
        """A hook was interrupted: what it has begun ends here, and the step sends everything anew."""
        self._engine.abandon()
        self.departures.forget()

    def let_go(self, subgroups: Sequence[Subgroup], records: Sequence[ParameterRecord]) -> None:
        """Free what is held for parameters that were replaced; what backward has begun is sent anew."""
        self.abandon()
        self._engine.let_go(subgroups)
        self.departures.forget_records(records)
        self._now.plan, self._now.wanted = None, set()

    def make_room(self, plan: Plan, updates: Mapping[Subgroup, SubgroupUpdate], writes: int | None) -> Prepared:
        """Get the memory that the step takes. Raises MemoryError, and has changed nothing, if the host has too little.

        writes: how often every gradient was written since backward without changing a value.
        """
        subjects = [self._subject(subgroup, updates.get(subgroup), writes) for subgroup in self._registry.accelerated]
        departed = any(subject.departed for subject in subjects)
        if self._registry.offloaded is not None:  # what came in backward may have come to memory that is not pinned
            self._engine.host_store.take(incoming=updates)
        now = self._now
        now.step = self.device.mark()
        self._pace.step(now, early=departed if Placement.CPU in plan.placements else None)
        # Nobody knows what updates of parameters on the host take of it meanwhile.
        self._alone = all(subgroup.arena.accelerated for subgroup in updates)
        with now.held_up():
            prepared = self._engine.make_room(plan, subjects)
            if self._controller.follows_memory and self.memory.grows_short:
                # Pinning takes 0.2 to 0.4 s per GB, which the step in which state leaves should not have to spend.
                resident = self._engine.device_store.resident
                self._engine.host_store.prepare(s for s in reversed(self._registry.accelerated) if s in resident)
        denied = self._engine.device_store.denied
        if denied is not None:
            self.memory.allocation_failed(denied)
        return prepared

    def start(self, plan: Plan, prepared: Prepared) -> None:
        """Issue the step, for which there is memory. plan: before that was asked for."""
        workload = self._now.workload
        assert workload is not None, "the plan was made for it"
        new, self.plan, self._stepped = plan != self.plan, plan, self._now
        if new:
            before, self._planned = self._planned, (workload, self.profile)
            self._why = why_changed(before[0], workload, before[1], self.profile)
            if logger.isEnabledFor(logging.INFO):
                report = self._report(plan, self._now, None)
                logger.info("%s", report.change(), extra={"metrics": report.metrics()})
        self._waited_for = set()
        with self._now.held_up():
            self._engine.start(prepared, workload)

    def _subject(self, subgroup: Subgroup, update: SubgroupUpdate | None, writes: int | None) -> Subject:
        if update is None or update.offloaded:
            return Subject(subgroup, update, (), frozenset())
        holding, departed = self.departures.arriving(subgroup, update.pieces, writes)
        return Subject(subgroup, update, departed, frozenset(update.pieces) - holding)

    def end_iteration(self, writes: int | None, *, skipped: bool) -> None:
        """The step was issued or skipped: what comes now belongs to the next iteration."""
        if skipped:
            self._engine.early.drop_prefetched()  # the next forward needs the memory more
        self.departures.finish(writes)
        self._now.wanted = set()  # the iteration is kept for its times alone
        self._gradients_before = self._now.gradients
        self.memory.end_iteration()

    def step_returns(self) -> None:
        """The caller goes on, with the next forward: another iteration begins."""
        self._engine.trim()
        self._now = Iteration(self.device, self._now)

    def wait(self) -> None:
        """Block until nothing is in flight. Raises RuntimeError if the step failed."""
        if self._engine.idle and not self._aside:
            return
        stepped = self._stepped or self._now
        self._read_aside(wait=True)
        with stepped.held_up():
            timeline = self._engine.wait()
        self._pace.read()
        if self._engine.guard.failed:
            return  # it did not come to its end, though all that was issued of it did
        if timeline is not None and self.plan is not None and self._engine.schedule is not None:
            self._learn(self._engine.schedule, self.plan, stepped, timeline, alone=self._alone)

    def order_caller(self) -> None:
        """Order what the caller queues on the device from now on behind the step, as far as that is on the device."""
        if self._engine.idle or self._stepped is None:
            return
        with self._stepped.held_up():
            self._engine.order_caller()

    def set_aside(self) -> bool:
        """Whether another step may begin although the last has not ended: all of that is queued on the device."""
        self._read_aside(wait=False)
        if self._stepped is None or self.plan is None or not self._engine.queued:
            return False
        self._aside.append(Aside(self._engine.set_aside(), self.plan, self._stepped, self._alone))
        return True

    def _read_aside(self, *, wait: bool) -> None:
        """Learn from steps that were set aside and have ended. wait: until all have."""
        while self._aside:
            step, plan, stepped, alone = self._aside[0]
            if not (wait or step.through):
                return
            timeline = self._engine.read(step)
            self._aside.popleft()
            self._learn(step.schedule, plan, stepped, timeline, alone=alone)

    def _learn(self, schedule: Schedule, plan: Plan, stepped: Iteration, timeline: Timeline, *, alone: bool) -> None:
        """A step has ended."""
        if stepped.workload is None:
            return
        # Before the profile is corrected: with what was believed when the plan was made.
        self._ended = Ended(self._report(plan, stepped, timeline), stepped, self._engine.origin)
        if alone:
            self._controller.observe(schedule, stepped.workload, self._engine.ran)

    def wait_for(self, record: ParameterRecord) -> None:
        """Order what the caller queues on the device from now on behind the update of this parameter."""
        for subgroup, _ in self._registry.places[record]:
            # Whoever waits for a subgroup that has been waited for is not held up.
            again = subgroup in self._waited_for
            with contextlib.nullcontext() if again or self._stepped is None else self._stepped.held_up():
                self._engine.wait_for(subgroup)
            self._waited_for.add(subgroup)

    def bring_home(self) -> None:
        """Return all resident state to the host."""
        self._engine.bring_home()

    @property
    def held_bytes(self) -> int:
        """Device memory that optimizer state has now, slots included."""
        return self._held()

    @property
    def releasable_bytes(self) -> int:
        """What of that can be given back."""
        return self._engine.device_store.nbytes

    def release(self, held: int) -> None:
        """Give all device memory back, and remember that `held` bytes of it were needed for something else."""
        self._engine.early.drop_prefetched()
        self._engine.bring_home()
        self.memory.ran_out(held)
        self._now.backward = None  # if the iteration is tried again, its peak is sampled, too
        self.device.trim()

    @property
    def timeline(self) -> Timeline | None:
        """Of the last complete step, with forward and backward beside it; None before it."""
        ended = self._ended
        if ended is None or ended.report.measured is None:
            return None
        return dataclasses.replace(ended.report.measured, beside=ended.iteration.spans(ended.origin))

    @property
    def profile(self) -> HardwareProfile | None:
        """The rates that are believed now; None if no policy has asked for any."""
        return self._controller.profile

    def report(self) -> Report | None:
        """What the last complete step did; None before it. Waits for nothing, and may be asked on any thread."""
        ended = self._ended
        if ended is None:
            return None
        kernel = gpu_kernel_name() if self.device.known_profile is None else None
        return dataclasses.replace(ended.report, exposed_s=ended.iteration.exposed_s, kernel=kernel)

    def _report(self, plan: Plan, iteration: Iteration, measured: Timeline | None) -> Report:
        """A step as it is known now."""
        assert iteration.workload is not None, "the plan was made for it"
        return Report(
            plan=plan,
            workload=iteration.workload,
            withheld=iteration.withheld,
            profile=self.profile,
            measured=measured,
            reading=self.memory.reading,
            held_bytes=self.held_bytes,
            host_bytes=self._engine.host_store.nbytes,
            why=self._why,
        )

    def _find_profile(self) -> HardwareProfile:
        """The user's profile, the one measured on this machine, or a rough measurement now."""
        known = self.device.known_profile
        if self._profile is None and known is not None:
            return known
        with torch.no_grad():
            found = resolve_profile(self._profile, name_of(self.device)) or measure_minimum(self.device)
        if known is None:
            set_kernel_threads(found.cpu_threads)  # its rate of updates is for so many
        return found


def _gradients_travel() -> bool:
    """Whether gradients may change after backward's hooks: DistributedDataParallel reduces them later, in place."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
