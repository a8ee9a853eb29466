"""Backward on the accelerator: counts gradients, and sends those to the host that the step will use there."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dos.activations.offload import ActivationOffload
from dos.devices import Device, Mark
from dos.gradients.departures import Departures
from dos.guard import Guard
from dos.options import Options
from dos.parameters.registry import Registry
from dos.planning.decide import Facts, host_limits
from dos.planning.decisions import Decisions
from dos.planning.policies import Policy
from dos.sharding.ddp import gradients_travel
from dos.sharding.local import same_layout
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.iteration import Iteration, Wait
from dos.step.ledger import Ledger
from dos.step.prepare import Prepared, check_slots
from dos.step.work import SubgroupUpdate, Subject
from dos.weights.homes import WeightHomes
from dos.weights.stream import WeightStream
from perfmodel import Op, Placement, Plan, Workload


class Wanted(NamedTuple):
    """The plan by which backward sends gradients. subgroups: those whose gradients the host updates from.

    facts: for which it was made.
    """

    plan: Plan | None
    subgroups: frozenset[Subgroup]
    facts: Facts | None = None


_NOT_ASKED = Wanted(None, frozenset())


class Backward:
    """Backward of one session on its accelerator: the iteration that runs, its plan, and the gradients that it sends.

    decisions: makes plans. departures: gradients that were sent. activations: saved tensors that move to the host.
    weights: of the model's blocks, if they stream. now: the iteration that runs.
    attached: whether updates run on into a model's forward.
    replays: whether a CUDA graph has captured a backward, whose replays write gradients and run no hooks.
    steps: that were issued.
    """

    # One iteration: the first gradient asks for a plan (`_look_ahead`). Each is counted, and sent if the plan wants it
    # on the host (`send`); in the second half of backward state comes to slots, for the peak of memory is over.
    # `step()` makes the plan that counts, uses what was sent and still holds, cancels the rest, and `begin` ends the
    # iteration.
    def __init__(
        self, device: Device, registry: Registry, ledger: Ledger, policy: Policy, options: Options, guard: Guard
    ) -> None:
        self.device = device
        self.attached = self.replays = False
        self.weights: WeightHomes | None = None
        self._streams: list[WeightStream] = []
        streams = self._streams  # the monitor asks what they hold, and this would be a cycle
        self.steps = 0
        if options.disk:
            registry.homes.open_disk(device, options.disk)  # before the ledger, which takes the stores that there are
        ledger.open(device, registry.homes)
        self.departures = Departures()
        self.activations = activations = ActivationOffload(device, guard.lock, lambda: registry.bytes_to_come)
        device_store, host_store = ledger.stores.device, registry.host_store
        self.decisions = Decisions(
            device,
            policy,
            options.profile,
            options.memory_budget,
            options.memory_interval,
            held=lambda: device_store.nbytes + registry.lasting_bytes + sum(each.nbytes for each in streams),
            on_host=lambda: host_store.nbytes,
            away=activations.away,
            pooled=lambda: activations.pool.nbytes,
        )
        ledger.ended = self.decisions.learn
        # Weak: the monitor asks the activations what is away, and a cycle would leave device memory to the garbage
        # collector.
        activations.sample = weakref.WeakMethod(self.decisions.memory.sample)
        if self.decisions.follows_memory:
            activations.runs_short = weakref.WeakMethod(self.decisions.memory.runs_short)
        self.now = Iteration(device)
        self._registry, self._ledger, self._guard = registry, ledger, guard
        self._wanted = _NOT_ASKED
        self._gradients_before = 0
        self._micro_batches = 1

    def facts(self) -> Facts | None:
        """The facts as they are now; None if no subgroup is on the device."""
        subgroups = self._registry.accelerated
        if not subgroups:
            return None
        loads, memory, pace = self._registry.loads(), self.decisions.memory, self.decisions.pace
        # Of weights that stay now, too: another plan may let them stream.
        beside, weights = self._registry.gradient_bytes(weights=self.weights is not None), {}
        backward_s, weight_bytes = pace.backward.seconds, 0
        if self.weights is not None:
            weights, weight_bytes = self.weights.workload(), self.weights.nbytes
            weights["micro_batches"] = count = max(1, self._micro_batches)
            # For fetches compute is beside whatever becomes of gradients.
            backward_s = max(0.0, pace.both.seconds / count - pace.forward.seconds)
            # They have all left for the host, and come up again for updates on the device.
            loads = tuple(dataclasses.replace(load, returned_bytes=load.gradient_bytes) for load in loads)
        workload = Workload(
            loads,
            forward_s=pace.forward.seconds if self.attached else 0.0,
            backward_s=backward_s,
            passing_bytes=beside,
            **weights,
            **memory.limits(loads, update_overlaps_forward=self.attached, beside=beside, weights=weight_bytes),
            **self.activations.recorded(memory.room, memory.forecast.ran_out_again),
            **host_limits(self._registry.homes, subgroups, loads, attached=self.attached),
        )
        # A plan that does not follow memory says what it takes.
        beside_forward = self.attached and self.decisions.follows_memory
        return Facts(workload, reverse=self.steps % 2 == 1, beside_forward=beside_forward)

    def stream_weights(self, weights: WeightHomes) -> None:
        """Plan the weights of these blocks with the state; backward asks for those that it reads."""
        self.weights, self._streams[:] = weights, [weights.stream]
        self.activations.weights = weights.stream

    def _stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """The caller's waits for saved tensors and weights since this was asked last."""
        weights = () if self.weights is None else self.weights.stream.stalls()
        self.now.waits += [Wait(before, after) for before, after in weights]
        return (*self.activations.stalls(), *weights)

    def decide(self, facts: Facts) -> Plan:
        """The plan for these facts. Raises ValueError or TypeError if the policy's is none, or can never run."""
        plan = self.decisions.decide(facts, self.now)
        check_slots(plan, self._registry.accelerated, self.decisions.memory.reading.memory.total)
        return plan

    def stays(self, parameter: Tensor) -> bool:
        """Count a gradient that backward has just written and that no step wants on the host; False for any other.

        Most are such where much is resident. Called without the optimizer's lock.
        """
        record = self._registry.record(parameter)
        if record is None:
            return False
        # Without holding Ctrl-C back, which takes microseconds at each of many gradients: a wrong count does no harm.
        with self._guard.lock:
            plan, wanted, _ = self._wanted
            if plan is None or self.may_change(record):
                return False
            # From here on each gradient may be the one at which there is room for slots, which `send` fills.
            if plan.slots and self.departures.past_half:
                return False
            if wanted and any(subgroup in wanted for subgroup, _ in self._registry.places[record]):
                return False
            self.count()
            self.departures.count(record)
            return True

    def count(self) -> None:
        """Backward has made another gradient: look at the memory, always at the first and at the last.

        Backward peaks at one or the other, and a peak that is not seen is room for state that is not there. The last is
        that of last time; at first, when all parameters have one.
        """
        now = self.now
        now.gradients += 1
        if now.backward is not None:
            last = self._gradients_before or len(self._registry.watching)
            self.decisions.memory.sample(always=now.gradients == last)
        else:
            now.backward, now.travels = self.device.mark(), gradients_travel()
            self.decisions.pace.backward_begins(now, self.decisions.stepped, self._stalls())
            self.decisions.memory.enter(Op.BACKWARD)

    def may_change(self, record: ParameterRecord) -> bool:
        """Whether this record's gradients may change after backward's hooks. FSDP2 calls them when all is reduced."""
        return self.replays or (self.now.travels and not record.sharded)

    def is_final(self, record: ParameterRecord) -> bool:
        """Whether the gradient that backward has just written is the one that the step will use, and may be sent."""
        parameter, gradient = record.parameter, record.leaf.grad
        if not record.arena.accelerated or self.may_change(record):
            return False
        if record.sharded and not same_layout(gradient, parameter):
            return False  # the step redistributes it first
        return gradient is None or gradient.layout is torch.strided  # the step refuses others

    def send(self, record: ParameterRecord, gradient: Tensor | None = None) -> None:
        """Send a gradient to where this iteration's plan wants it, and perhaps fetch state.

        gradient: the tensor that the parameter's will be made of, where `p.grad` is not that yet.
        """
        if self._wanted.plan is None:
            self._look_ahead()
        plan, wanted, _ = self._wanted
        if plan is None:
            return
        places = self._registry.places[record]
        for departure in self.departures.gather(record, places, wanted, self.device, gradient):
            if self.now.first_departure is None:
                self.now.first_departure = self.device.mark()
            index = self._registry.index[departure.subgroup]
            transit = self._ledger.send(index, departure.subgroup, departure.copies, departure.callers)
            departure.mark_sent(transit)
        if self.departures.past_half:
            self._ledger.fill_slots(plan, self._registry.accelerated, self._spare)

    def _look_ahead(self) -> None:
        """Decide as if the step came now, for gradients and state to move by."""
        try:
            facts = self.facts()
            plan = None if facts is None else self.decide(facts)
        except (TypeError, ValueError):
            return  # the step raises it
        if facts is None or plan is None:
            return
        subgroups, stores = self._registry.accelerated, self._ledger.stores
        ran_out = self.decisions.memory.forecast.ran_out_lately
        # State may only come into room that saved tensors have already made in this forward.
        # Nor may it come where weights are yet that the plan moves home.
        makes_room = plan.activation_bytes <= self.activations.leaving and (
            self.weights is None or self.weights.staying() <= plan.blocks_on_device
        )
        if self.decisions.follows_memory and not ran_out and makes_room:
            self._ledger.fetch_residents(plan, subgroups, facts.left(plan, stores.device.resident_bytes))
        at_home = (i for i in plan.served(Placement.CPU) if i not in plan.on_disk)
        on_host = (subgroups[i] for i in at_home if not stores.device.has(subgroups[i]))
        # The memory through which gradients travel is made in step(), never here.
        staged = frozenset(subgroup for subgroup in on_host if stores.host.stages(subgroup))
        self._wanted = Wanted(plan, staged, facts)

    def _spare(self) -> float:
        """Bytes that slots may take before backward has ended."""
        plan, _, facts = self._wanted
        assert plan is not None, "slots are the plan's"
        assert facts is not None, "the plan follows from them"
        left = facts.left(plan, self._ledger.stores.device.resident_bytes)
        return min(left, self.decisions.memory.spare_in_backward())

    def record_call(self, plan: Plan, subjects: Sequence[Subject], updates: Mapping[Subgroup, SubgroupUpdate]) -> None:
        """Note where the caller's work has come to the call of `step()`, for the iteration and the pace."""
        if self.weights is not None:
            self._micro_batches = self.weights.stream.take_forwards()
        now = self.now
        now.step, now.started = self.device.mark(), time.perf_counter()
        early = any(subject.departed for subject in subjects) if Placement.CPU in plan.placements else None
        self.decisions.pace.step(now, early=early, stalls=self._stalls())
        now.moves, now.saved = self.activations.moves(), self.activations.last_offloaded
        if self.weights is not None:
            now.moves += self.weights.stream.moves()
        # Saved tensors and weights go before state on the links, and the part of the host that updates of parameters
        # there take is not measured.
        now.alone = not now.moves and all(subgroup.arena.accelerated for subgroup in updates)

    def issue(self, prepared: Prepared) -> None:
        """Issue the step."""
        plan, subjects, found = prepared
        assert self.now.workload is not None, "the plan was made for it"
        self.decisions.begin_step(plan, self.now)
        self.steps += 1
        with self.now.held_up():
            self._ledger.issue(plan, subjects, found, self.now.workload, self.now)

    def begin(self) -> None:
        """Begin another iteration, with the next forward."""
        self.now = Iteration(self.device, self.now)

    def abandon(self) -> None:
        """Cancel what backward has begun; the step sends everything anew."""
        self._ledger.abandon()
        self.departures.forget()

    def forget(self, records: Sequence[ParameterRecord]) -> None:
        """Release what is held for parameters that were replaced, with all of their arenas."""
        arenas = {record.arena for record in records}
        # Copies may still read and write memory of these parameters.
        self.abandon()
        self._ledger.forget(s for s in self._registry.accelerated if s.arena in arenas)
        self.departures.forget_records(records)
        self._wanted = _NOT_ASKED

    def end(self, *, skipped: bool) -> None:
        """End the iteration: its step was issued or skipped, and gradients from now on belong to the next one."""
        if skipped:
            self._ledger.cancel_slots()  # the next forward needs the memory more
        self.departures.finish()
        self._wanted = _NOT_ASKED
        self._gradients_before = self.now.gradients
        self.decisions.memory.end_iteration()
