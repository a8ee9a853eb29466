"""What a session does on its device: gradients leave early, the step is issued there and waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dos.activations.offload import ActivationOffload
from dos.devices import Device
from dos.gradients.departures import Departures
from dos.guard import Guard
from dos.options import Options
from dos.parameters.registry import Registry
from dos.planning.decisions import Decisions
from dos.planning.policies import Policy
from dos.planning.rests import Rests
from dos.sharding.local import same_layout
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.engine import Engine
from dos.step.iteration import Iteration
from dos.step.room import Prepared
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.schedule import Schedule


class DeviceSide:
    """The part of a session that is on one device.

    engine: runs steps. decisions: makes their plans. departures: the gradients that leave during backward.
    activations: the saved tensors that leave during forward.
    attached: whether updates run on into a model's forward.
    replays: whether a CUDA graph has captured a backward, whose replays write gradients and run no hooks.
    """

    def __init__(self, device: Device, registry: Registry, policy: Policy, options: Options, guard: Guard) -> None:
        self.device = device
        self.attached = False
        self.replays = False
        if options.disk:
            registry.homes.open_disk(device, options.disk)  # before the engine, which takes the stores that there are
        self._rests = Rests(registry.homes)
        self.engine = Engine(device, registry.homes, guard)
        self.departures = Departures()
        self.activations = activations = ActivationOffload(device, guard.lock, lambda: registry.bytes_to_come)
        device_store, host_store = self.engine.stores.device, registry.host_store
        self.decisions = Decisions(
            device,
            policy,
            options.profile,
            options.memory_budget,
            options.memory_interval,
            held=lambda: device_store.nbytes + registry.lasting_bytes,
            on_host=lambda: host_store.nbytes,
            away=activations.away,
            pooled=lambda: activations.pool.nbytes,
        )
        self.activations.sample = weakref.WeakMethod(self.decisions.memory.sample)
        self.activations.give_way = weakref.WeakMethod(self._give_way)
        self._registry = registry
        self._now = Iteration(device)
        self._gradients_before = 0
        self._waited_for: set[Subgroup] = set()

    def plan_step(self) -> Plan | None:
        """The plan of the step that begins; None if there is nothing on the device. Raises as `Decisions.decide`."""
        self.decisions.memory.enter(Op.UPDATE)
        plan = self._decide()
        return None if plan is None else self._for_what_has_left(plan)

    def _for_what_has_left(self, plan: Plan) -> Plan:
        """The plan with no more state than there is room for by what has left in this forward.

        The rest comes in the next backward, once it was seen that leaving made the room: callers may hold what leaves.
        """
        work = self._now.workload
        leaving = self.activations.leaving
        if work is None or plan.activation_bytes <= leaving:
            return plan
        most = max(leaving, work.activation_least_bytes)
        fitting = self.decisions.meanwhile(dataclasses.replace(work, activation_host_bytes=most))
        return dataclasses.replace(fitting, activation_bytes=plan.activation_bytes)

    def _decide(self) -> Plan | None:
        subgroups = self._registry.accelerated
        if not subgroups:
            return None
        loads, memory, pace = self._registry.loads(), self.decisions.memory, self.decisions.pace
        beside = self._registry.gradient_bytes()
        workload = Workload(
            loads,
            forward_s=pace.forward.seconds if self.attached else 0.0,
            backward_s=pace.backward.seconds,
            **memory.limits(loads, update_overlaps_forward=self.attached, beside=beside),
            **self.activations.recorded(memory.room, memory.forecast.ran_out_again),
            **self._rests.limits(subgroups, loads, attached=self.attached),
        )
        plan = self.decisions.decide(workload, self._now)
        self.engine.check(plan, subgroups, memory.reading.memory.total)
        return plan

    def only_counts(self, record: ParameterRecord) -> bool:
        """Whether backward's gradient of this record stays where it is; then it was counted, and that is all.

        Called without the optimizer's lock. Counting may be interrupted.
        """
        with self.engine.guard.lock:
            now, departures = self._now, self.departures
            if (
                now.plan is None
                or self.decisions.stepped is now
                or self.travels(record)
                or (now.plan.slots and departures.past_half)
            ):
                return False
            if now.wanted and any(subgroup in now.wanted for subgroup, _ in self._registry.places[record]):
                return False
            self.count_gradient()
            departures.count(record)
            return True

    def count_gradient(self) -> None:
        """Backward has made another gradient: look at the memory, always at the first and at the last.

        Backward peaks at one or the other, and a peak that is not seen is room for state that is not there. The last is
        that of last time; at first, when all parameters have one.
        """
        if self.decisions.stepped is self._now:  # its step was interrupted before it returned
            self._now = Iteration(self.device, self._now)
        now = self._now
        now.gradients += 1
        if now.backward is not None:
            last = self._gradients_before or len(self._registry.watching)
            self.decisions.memory.sample(always=now.gradients == last)
        else:
            now.backward, now.travels = self.device.mark(), _gradients_travel()
            self.decisions.pace.backward_begins(now, self.decisions.stepped, self.activations.stalls())
            self.decisions.memory.enter(Op.BACKWARD)

    def travels(self, record: ParameterRecord) -> bool:
        """Whether this record's gradients may change after backward's hooks. FSDP2 calls them when all is reduced."""
        return self.replays or (self._now.travels and not record.sharded)

    def leaves_early(self, record: ParameterRecord) -> bool:
        """Whether the gradient that backward has just written is what the step will use, and may leave."""
        parameter = record.parameter
        if not record.arena.accelerated or self.travels(record):
            return False
        if record.sharded and not same_layout(parameter.grad, parameter):
            return False  # the step redistributes it first
        return parameter.grad is None or parameter.grad.layout is torch.strided  # the step refuses others

    def send_when_complete(self, record: ParameterRecord, gradient: Tensor | None = None) -> None:
        """Start a gradient on its way to where this iteration's plan wants it, and perhaps state on its way here.

        gradient: what the parameter's will be made of, where it is not that yet.
        """
        plan = self._now.plan
        if plan is None:
            plan = self._look_ahead()
            if plan is None:
                return
        places = self._registry.places[record]
        for departure in self.departures.gather(record, places, self._now.wanted, self.device, gradient):
            if self._now.first_departure is None:
                self._now.first_departure = self.device.mark()
            index = self._registry.index[departure.subgroup]
            departure.mark_sent(self.engine.early.send_gradients(index, departure.copies, departure.callers))
        if self.departures.past_half:
            self.engine.early.prefetch(plan, self._registry.accelerated, self.decisions.memory.spare_in_backward)

    def _look_ahead(self) -> Plan | None:
        """The plan as it would be now, for gradients and state to leave by."""
        try:
            plan = self._decide()
        except (TypeError, ValueError):
            return None  # the step will say what is wrong
        if plan is None:
            return None
        subgroups, engine = self._registry.accelerated, self.engine
        ran_out = self.decisions.memory.forecast.ran_out_lately
        # State may only come into room that saved tensors have already left in this forward.
        assert self._now.workload is not None, "the plan was made for it"
        plan = self._rests.ordered(plan, self._now.workload)
        if self.decisions.follows_memory and not ran_out and plan.activation_bytes <= self.activations.leaving:
            engine.early.fetch_residents(plan, subgroups)
        at_home = (i for i in plan.served(Placement.CPU) if i not in plan.on_disk)
        on_host = (subgroups[i] for i in at_home if not engine.stores.device.has(subgroups[i]))
        # The memory through which gradients travel is made in step(), never here.
        self._now.wanted = {subgroup for subgroup in on_host if engine.stores.host.stages(subgroup)}
        self._now.plan = plan
        return plan

    def abandon(self) -> None:
        """A hook was interrupted: what it has begun ends here, and the step sends everything anew."""
        self.engine.abandon()
        self.departures.forget()

    def let_go(self, records: Sequence[ParameterRecord]) -> None:
        """Free what is held for parameters that were replaced, with all of their arenas.

        What backward has begun is sent anew.
        """
        arenas = {record.arena for record in records}
        self.abandon()
        self.engine.let_go(s for s in self._registry.accelerated if s.arena in arenas)
        self.departures.forget_records(records)
        self._now.plan, self._now.wanted = None, set()

    def prepare(self, plan: Plan, updates: Mapping[Subgroup, SubgroupUpdate]) -> Prepared:
        """Get the memory that the step takes. Raises MemoryError, with nothing changed, if the host has too little."""
        subjects = [self._subject(subgroup, updates.get(subgroup)) for subgroup in self._registry.accelerated]
        if self._registry.offloaded.enabled:  # what came in backward may have come to memory that is not pinned
            self.engine.spill_to_disk(self._registry.accelerated)
            self.engine.stores.host.stage(updates)
            self._registry.offloaded.pin()
        now = self._now
        self._record_call(plan, subjects, updates)
        with now.held_up():
            assert now.workload is not None, "the plan was made for it"
            prepared = self.engine.prepare(self._rests.ordered(plan, now.workload), subjects, now.workload.windows)
            if self.decisions.follows_memory and self.decisions.memory.grows_short and not self.engine.stores.disk:
                # Pinning takes 0.2 to 0.4 s per GB, which the step in which state leaves should not have to spend.
                resident = self.engine.stores.device.resident
                self.engine.stores.host.prepare(s for s in reversed(self._registry.accelerated) if s in resident)
        denied = self.engine.stores.device.denied
        if denied is not None:
            self.decisions.memory.forecast.allocation_failed(denied)
        return prepared

    def _record_call(self, plan: Plan, subjects: Sequence[Subject], updates: Mapping[Subgroup, SubgroupUpdate]) -> None:
        """The caller's work has come to the call of step(): what the iteration and the pace are to know of that."""
        now, offloaded = self._now, self.activations.last_offloaded
        now.step = self.device.mark()
        early = any(subject.departed for subject in subjects) if Placement.CPU in plan.placements else None
        self.decisions.pace.step(now, early=early, stalls=self.activations.stalls())
        now.moves, now.saved = self.activations.moves(), offloaded
        # What updates of parameters on the host take of it meanwhile is not measured.
        now.alone = all(subgroup.arena.accelerated for subgroup in updates) and not (offloaded and offloaded[0])

    def start(self, plan: Plan, prepared: Prepared) -> None:
        """Issue the step, for which there is memory. plan: before that was asked for."""
        assert self._now.workload is not None, "the plan was made for it"
        self.decisions.begin_step(plan, self._now)
        self._rests.steps += 1
        self._waited_for = set()
        with self._now.held_up():
            self.engine.start(prepared, self._now.workload)

    def _subject(self, subgroup: Subgroup, update: SubgroupUpdate | None) -> Subject:
        if update is None or update.offloaded:
            return Subject(subgroup, update, (), ())
        holding, departed = self.departures.arriving(subgroup, update.pieces)
        late = [item for item in update.items if item[0] not in holding] if holding else update.items
        return Subject(subgroup, update, departed, late)

    def end_iteration(self, *, skipped: bool) -> None:
        """The step was issued or skipped: what comes now belongs to the next iteration."""
        if skipped:
            self.engine.early.drop_prefetched()  # the next forward needs the memory more
        self.departures.finish()
        self._now.wanted = set()  # the iteration is kept for its times alone
        self._gradients_before = self._now.gradients
        self.decisions.memory.end_iteration()

    def step_returns(self) -> None:
        """The caller goes on, with the next forward: another iteration begins."""
        self.engine.trim()
        self.activations.follow_plan(self.decisions.plan)
        self.decisions.search()  # the device is busy with the update, and nothing waits for the host
        self._now = Iteration(self.device, self._now)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight for which anything would have to wait."""
        return self.engine.idle and not self.engine.aside

    def wait(self) -> None:
        """Block until nothing is in flight. Raises RuntimeError if the step failed."""
        if self.idle:
            return
        stepped = self.decisions.stepped or self._now
        self._read_aside(wait=True)
        with stepped.held_up():
            timeline = self.engine.wait()
        self.decisions.pace.read()
        # One that failed did not come to its end, though all that was issued of it did.
        if timeline is not None and not self.engine.guard.failed and self.engine.schedule is not None:
            self._learn(self.engine.schedule, stepped, timeline)

    def order_caller(self) -> None:
        """Order what the caller queues on the device from now on behind the step, as far as that is on the device."""
        if self.engine.idle or self.decisions.stepped is None:
            return
        with self.decisions.stepped.held_up():
            self.engine.order_caller()

    def set_aside(self) -> bool:
        """Whether another step may begin although the last has not ended: all of that is queued on the device."""
        self._read_aside(wait=False)
        stepped = self.decisions.stepped
        if stepped is None or not self.engine.queued:
            return False
        self.engine.set_aside(stepped)
        return True

    def _read_aside(self, *, wait: bool) -> None:
        """Learn from steps that were set aside and have ended. wait: until all have."""
        aside = self.engine.aside
        while aside:
            step, stepped = aside[0]
            if not (wait or step.through):
                return
            timeline = self.engine.read(step)
            aside.popleft()
            self._learn(step.schedule, stepped, timeline)

    def _learn(self, schedule: Schedule, stepped: Iteration, timeline: Timeline) -> None:
        issued = (schedule, self.engine.ran) if stepped.alone else None
        stepped.read_moves()
        self.decisions.learn(stepped, timeline, self.engine.origin, issued)

    def wait_for(self, subgroup: Subgroup) -> None:
        """Order what the caller queues on the device from now on behind the update of this subgroup."""
        # A caller that waits for the same subgroup again is not held up.
        again, stepped = subgroup in self._waited_for, self.decisions.stepped
        with contextlib.nullcontext() if again or stepped is None else stepped.held_up():
            self.engine.wait_for(subgroup)
        self._waited_for.add(subgroup)

    def bring_home(self) -> None:
        """Return all state that can leave to the host, once the running step is done."""
        self.engine.bring_home(self._registry.accelerated)

    def release(self, held: int) -> None:
        """Give all device memory back, and remember that `held` bytes of it were needed for something else."""
        self.engine.early.drop_prefetched()
        self.bring_home()
        self.decisions.memory.ran_out(held)
        self.activations.ran_out()
        self._now.backward = None  # if the iteration is tried again, its peak is sampled, too
        self.device.trim()

    def _give_way(self, nbytes: int) -> None:
        """Give device memory of state to a saved tensor of so many bytes, for which there is none though it is due."""
        self.wait()
        held = self.engine.stores.device.nbytes
        self.abandon()
        self.bring_home()
        # The plan promised state too much, for the user's code as such there is memory.
        self.decisions.memory.forecast.allocation_failed(max(0, held - nbytes))
        self.device.trim()


def _gradients_travel() -> bool:
    """Whether gradients may change after backward's hooks: DistributedDataParallel reduces them later, in place."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
