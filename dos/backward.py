"""Backward on the accelerator: counts gradients, and sends to the host the gradients that the step uses there."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dos.activations.offload import ActivationOffload
from dos.devices import Device, Mark
from dos.devices.base import Moment
from dos.gradients.departures import Departures
from dos.guard import Guard
from dos.options import Options
from dos.parameters.ahead import Ahead
from dos.parameters.registry import Registry
from dos.planning.decisions import Decisions, Facts, host_limits
from dos.planning.policies import Policy
from dos.sharding import ddp
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
    """The plan by which backward sends gradients.

    subgroups: the subgroups that the host updates. room: bytes of device memory for state until backward ends.
    """

    plan: Plan | None
    subgroups: frozenset[Subgroup]
    room: float = 0.0


_NOT_ASKED = Wanted(None, frozenset())


class Backward:
    """Backward of one session on its accelerator: the iteration that runs, its plan, and the gradients that it sends.

    decisions: makes plans. departures: gradients that were sent. activations: saved tensors that move to the host.
    weights: of the model's blocks, if they stream. now: the iteration that runs.
    attached: whether updates run on into a model's forward. updates: whether they begin in backward.
    gradients_before: the number of gradients in the last iteration. ahead: the step as the last gradient has found it.
    replays: whether a CUDA graph has captured a backward, whose replays write gradients and run no hooks.
    """

    # One iteration: the first gradient asks for a plan (`_look_ahead`). Each is counted, and sent if the plan wants it
    # on the host (`send`); in the second half of backward state is prefetched to slots, because the peak of memory is
    # over. `step()` makes the plan that counts, uses the gradients and state that are still valid, cancels all other
    # transfers, and `begin` ends the iteration.
    def __init__(
        self, device: Device, registry: Registry, ledger: Ledger, policy: Policy, options: Options, guard: Guard
    ) -> None:
        self.device = device
        self.attached = self.updates = self.replays = False
        self.weights: WeightHomes | None = None
        self._streams: list[WeightStream] = []
        streams = self._streams  # a local, because `held` must not refer to `self`: a cycle
        if options.disk:
            registry.homes.open_disk(device, options.disk)  # before the ledger, which takes the stores that there are
        ledger.open(device, registry.homes)
        self.departures = Departures()
        self.activations = activations = ActivationOffload(device, guard.lock, lambda: registry.bytes_to_come)
        device_store = ledger.stores.device

        def held() -> int:
            return device_store.nbytes + registry.lasting_bytes + sum([each.nbytes for each in streams])

        self.decisions = Decisions(
            device,
            policy,
            options.profile,
            options.memory_budget,
            held=held,
            counted=lambda: held() - (activations.away() if activations.in_use else 0),
            host=registry.host_store,
            pool=activations.pool,
        )
        ledger.ended = self.decisions.learn
        # Weak: the monitor refers to the activations, and a cycle would leave device memory to the garbage collector.
        activations.sample = weakref.WeakMethod(self.decisions.memory.sample)
        activations.give_way = weakref.WeakMethod(self.give_way)
        if self.decisions.follows_memory:
            activations.runs_short = weakref.WeakMethod(self.decisions.memory.runs_short)
        self.now = Iteration(device)
        self._registry, self._ledger, self._guard = registry, ledger, guard
        self.ahead: Ahead | None = None
        self._wanted = _NOT_ASKED
        self.gradients_before = 0
        self._micro_batches = 1
        self._planning: tuple[tuple[Mark, Mark], ...] = ()
        """The stretch in which a hook of backward has made a plan: one that is new may take as long as backward."""
        self._departed = False
        """Whether gradients have left in backward, and the step uses them as they left."""

    def facts(self) -> Facts | None:
        """Return the facts as they are now; None if no subgroup is on the device."""
        subgroups = self._registry.accelerated
        if not subgroups:
            return None
        loads, memory, pace = self._registry.loads(), self.decisions.memory, self.decisions.pace
        # Also of weights that stay on the device now, because another plan may let them stream.
        passing, weights = self._registry.gradient_bytes(weights=self.weights is not None), {}
        count, weight_bytes = max(1, self._micro_batches), 0
        # Weights and offloaded gradients move in all of backward. Others may, if no gradient has come too late so far.
        backward_s = max(0.0, pace.rest.seconds - (count - 1) * pace.forward.seconds) / count
        if self.weights is None and not self.updates:
            late = self.now.several_ranks or 2 * self.now.left > self.now.gradients
            if late or ddp.reduced:
                backward_s = pace.backward.seconds
            # Not how long it lasted from the first one that left: a plan that sends few of them chooses when that is,
            # and the next plan would believe it.
            elif pace.backward.known and not pace.backward.seconds and not self._registry.offloaded.enabled:
                backward_s = 0.0
        if self.weights is not None:
            weights, weight_bytes = self.weights.workload(), self.weights.nbytes
        if self._registry.offloaded.enabled:
            # All gradients return for updates on the device.
            loads = tuple(dataclasses.replace(load, returned_bytes=load.gradient_bytes) for load in loads)
        saved = {}
        if self.activations.in_use:
            saved = self.activations.recorded(memory.room, memory.forecast.ran_out_again)
        workload = Workload(
            loads,
            forward_s=pace.forward.seconds if self.attached else 0.0,
            backward_s=backward_s,
            ahead_s=0.0 if self.updates else min(pace.ahead.seconds, backward_s),
            host_share=self.decisions.late_host.share,
            host=self.decisions.step_times.times,
            passing_bytes=passing,
            in_backward=self.updates,
            micro_batches=count,
            **weights,
            **memory.limits(loads, update_overlaps_forward=self.attached, passing=passing, weights=weight_bytes),
            **saved,
            **host_limits(self._registry.homes, subgroups, loads),
        )
        # A plan that does not follow memory takes the memory that it says.
        beside_forward = self.attached and self.decisions.follows_memory
        return Facts(workload, beside_forward=beside_forward)

    def stream_weights(self, weights: WeightHomes) -> None:
        """Plan the weights of these blocks with the state; backward fetches the weights that it reads."""
        self.weights, self._streams[:] = weights, [weights.stream]
        self.activations.weights = weights.stream

    def _stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Return the caller's waits for saved tensors and weights since the last call of this."""
        saved = self.activations.stalls() if self.activations.in_use else ()
        if self.weights is None:
            return saved
        weights = self.weights.stream.fetching.stalls()
        self.now.waits += [Wait(before, after) for before, after in weights]
        return (*saved, *weights)

    def decide(self, facts: Facts) -> Plan:
        """Return the plan for these facts. Raises ValueError or TypeError if it is no plan, or can never run."""
        plan = self.decisions.decide(facts, self.now)
        check_slots(plan, self._registry.accelerated, self.decisions.memory.reading.memory.total)
        return plan

    def only_counts(self, parameter: Tensor) -> bool:
        """Count a gradient that backward has just written if no more has to be done yet; return False for any other.

        So it is if no step uses it on the host, or if others of its subgroup are to come: most gradients are of these
        kinds. Called without the optimizer's lock.
        """
        record = self._registry.records.get(id(parameter))
        if record is None or self._wanted.plan is None:
            return False
        # Ctrl-C is not held back, which would take microseconds for each gradient: a wrong count does no harm.
        with self._guard.lock:
            plan, wanted, _ = self._wanted
            if plan is None or self.now.gradients + 1 == self.gradients_before:
                return False
            # From half of backward on there may be memory for slots at any gradient, which `send` fills.
            if plan.slots and not self._ledger.stores.device.slots and self.departures.past_half:
                return False
            places = self._registry.places[record]
            # Asked one by one where any may: most often none can.
            if (self.replays or self.now.several_ranks or ddp.reduced) and self.may_change(record):
                return False
            leaves = wanted and places and (places[0][0] in wanted or any(s in wanted for s, _ in places[1:]))
            if not leaves:
                self.departures.count(record)
            else:
                waits = record.leaf is parameter and len(places[0][0].pieces) > 1
                if not (waits and self.departures.wait(record, places, self.device)):
                    return False
            # As `count`, which is called where it does more.
            now, last = self.now, self.gradients_before
            if now.backward is None or now.gradients + 1 >= last or time.perf_counter() >= self.decisions.memory.due:
                self.count()
            else:
                now.gradients += 1
            return True

    def count(self) -> None:
        """Count another gradient of backward, and sample the memory, always at the first gradient and at the last.

        Backward peaks at one of them, and a peak that is not sampled would count as room for state. The last one is
        known from the iteration before; in the first iteration it is the one at which all parameters have a gradient.
        """
        now, memory = self.now, self.decisions.memory
        now.gradients += 1
        if now.backward is not None:
            is_last = now.gradients == (self.gradients_before or len(self._registry.watching))
            if is_last or time.perf_counter() >= memory.due:  # asked here, because each gradient calls this
                memory.sample(always=is_last)
        else:
            now.backward, now.several_ranks = self.device.mark(), ddp.several_ranks()
            self.decisions.refine()
            self.decisions.pace.backward_begins(now, self.decisions.stepped, self._stalls())
            memory.enter(Op.BACKWARD)

    @property
    def is_last(self) -> bool:
        """Whether the last gradient was most likely the last one of backward, and no other rank changes any."""
        last = self.now.gradients == self.gradients_before
        return last and not (self.replays or self.now.several_ranks or ddp.reduced)

    def may_change(self, record: ParameterRecord) -> bool:
        """Return whether this record's gradients may change after their hooks.

        DDP reduces gradients after the hooks, FSDP2 before them. User code does not know copies of weights that stream.
        """
        if self.replays:
            return True
        if record.leaf is not record.parameter:
            return False
        return not record.sharded and (self.now.several_ranks or id(record.parameter) in ddp.reduced)

    def is_final(self, record: ParameterRecord) -> bool:
        """Return whether the step will use the gradient that backward has just written, so that it may be sent."""
        parameter, gradient = record.parameter, record.leaf.grad
        if not record.arena.accelerated or self.may_change(record):
            return False
        if record.sharded and not same_layout(gradient, parameter):
            return False  # the step redistributes it first
        return gradient is None or gradient.layout is torch.strided  # the step refuses other layouts

    def send(self, record: ParameterRecord, gradient: Tensor | None = None) -> None:
        """Send a gradient to where this iteration's plan wants it, and fetch state to slots in the second half.

        gradient: the tensor of which the parameter's gradient will be made, where `p.grad` does not have it yet.
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
            unseen = self._ledger.unseen
            compare = None if unseen is None else unseen.compare(departure.subgroup, departure.gathered)
            send, subgroup, callers = self._ledger.transits.send, departure.subgroup, departure.callers
            departure.mark_sent(send(index, subgroup, departure.copies, callers, then=compare))
        if plan.slots and self.departures.past_half:
            self._ledger.transits.fill_slots(plan, self._registry.accelerated, self._spare)

    def plan_ahead(self) -> None:
        """Make the plan for the facts of the first gradient, if none was, and compare parameters with their copies.

        `step()` will find both ready.

        Only where gradients are offloaded: else they leave by the plan, which is so made.
        """
        if self.now.workload is None and self.decisions.follows_memory:
            with contextlib.suppress(TypeError, ValueError, MemoryError):  # the step raises the error
                facts = self.facts()
                if facts is not None:
                    self.decide(facts)
        if self._ledger.unseen is not None:
            self._ledger.unseen.compare_early(self._registry.accelerated)

    def _look_ahead(self) -> None:
        """Decide as if the step came now; gradients and state move by this plan until then."""
        began = Moment(time.perf_counter())
        try:
            facts = self.facts()
            plan = None if facts is None else self.decide(facts)
        except (TypeError, ValueError):
            return  # the step raises the error
        self._planning = ((began, self.device.mark()),)
        if facts is None or plan is None:
            return
        subgroups, stores = self._registry.accelerated, self._ledger.stores
        at_home = (i for i in plan.served(Placement.CPU) if i not in plan.on_disk)
        on_host = (subgroups[i] for i in at_home if not stores.device.has(subgroups[i]))
        # Only step() makes the staging of gradients: pinning memory here would stop the backward.
        staged = frozenset(subgroup for subgroup in on_host if stores.host.stages(subgroup))
        self._wanted = Wanted(plan, staged, facts.left(plan, 0))

    def _spare(self) -> float:
        """Return the bytes that slots may take before backward has ended."""
        left = self._wanted.room - self._ledger.stores.device.resident_bytes
        return min(left, self.decisions.memory.spare_in_backward())

    def record_call(self, subjects: Sequence[Subject], updates: Mapping[Subgroup, SubgroupUpdate]) -> None:
        """Mark the call of `step()` in the caller's work, for the iteration and the pace."""
        self._record_call()
        self._departed = bool([subject for subject in subjects if subject.departed])
        # Only such an iteration can correct rates: transfers of saved tensors and weights go before state on the links,
        # and the share of the host that updates of parameters there take is not measured.
        on_host = self._registry.on_host and [each for each in updates if not each.arena.accelerated]
        self.now.alone = not (self.now.moves or on_host)

    def end_updates(self, plan: Plan) -> None:
        """Mark the call of a `step()` whose updates backward has issued, by this plan."""
        self._record_call()
        self._learn_pace(plan, self.now.first_departure is not None)
        self.now.alone = False  # rates are refined by steps that begin when backward has ended
        self.decisions.begin_step(plan, self.now)

    def _record_call(self) -> None:
        now = self.now
        if self.weights is not None:
            self._micro_batches = self.weights.stream.forward.take_graphs()
        else:
            self._micro_batches = round(now.gradients / max(1, len(self._registry.watching)))
        now.step, now.started = self.device.mark(), time.perf_counter()
        if self.activations.in_use:
            now.moves, now.saved = self.activations.moves(), self.activations.last_offloaded
        if self.weights is not None:
            now.moves += self.weights.stream.fetching.moves()

    def _learn_pace(self, plan: Plan, departed: bool, issued: float | None = None) -> None:
        """departed: whether gradients have left in backward, and are used as they left. issued: as for `Pace.step`."""
        early = departed if Placement.CPU in plan.placements else None
        stalls = (*self._stalls(), *self._planning)
        self.decisions.pace.step(self.now, early=early, stalls=stalls, issued=issued)
        self._planning = ()

    def issue(self, prepared: Prepared) -> None:
        """Issue the step."""
        plan, subjects, before = prepared
        assert self.now.workload is not None, "the plan was made for it"
        self.decisions.begin_step(plan, self.now)
        issued = time.perf_counter()
        with self.now.held_up(self.now.waits[-1].after):  # since the step's memory was reserved
            self._ledger.issue(plan, subjects, before, self.now.workload, self.now)
        self._learn_pace(plan, self._departed, issued)  # behind the step's first work, which it would delay

    @property
    def wants_clean_forward(self) -> bool:
        """Whether the next forward should run with no update beside it, so that its length is known."""
        moves = self.decisions.plan is not None and {*self.decisions.plan.placements} != {Placement.GPU_RESIDENT}
        return self.attached and moves and self.decisions.follows_memory and self.decisions.pace.wants_clean()

    def begin(self) -> None:
        """Begin another iteration, with the next forward."""
        self.now = Iteration(self.device, self.now)

    def cancel_all(self) -> None:
        """Cancel the transfers that backward has begun; the step sends everything anew."""
        self.ahead = None
        self._ledger.cancel_all()
        self.departures.forget()
        self.begin_gradients()

    def give_way(self, nbytes: int) -> None:
        """Move state off the device for `nbytes` of a saved tensor or a block that cannot be allocated there.

        Called within a call that has the optimizer's lock.
        """
        # First, because the last step may still use the state that is moved below.
        self._ledger.settle()
        held = self._ledger.stores.device.nbytes
        # State that backward has fetched, and its slots, take memory, too.
        self.cancel_all()
        self._ledger.stores.bring_home(self._registry.accelerated)
        # The plan gave state too much memory: user code alone would have had enough.
        self.decisions.memory.forecast.allocation_failed(max(0, held - nbytes))
        self.device.trim()

    def sample_in_forward(self) -> None:
        """Sample the device's memory, unless the last sample is recent or a graph is captured."""
        memory = self.decisions.memory
        # Asked last: a capture, in which nothing may be measured, is rare, and each module of a forward calls this.
        if time.perf_counter() >= memory.due and not self.device.capturing():
            memory.sample()

    def begin_gradients(self) -> None:
        """Let offloaded gradients begin anew: parameters are compared at the next one."""
        if self._ledger.unseen is not None:
            self._ledger.unseen.begin()

    def forget(self, records: Sequence[ParameterRecord]) -> None:
        """Forget parameters that user code has replaced, with all of their arenas."""
        arenas = {record.arena for record in records}
        # First, because copies may still read and write memory of these parameters.
        self.cancel_all()
        self._ledger.forget(s for s in self._registry.accelerated if s.arena in arenas)
        self.departures.forget_records(records)
        self._wanted = _NOT_ASKED

    def end(self, *, skipped: bool) -> None:
        """End the iteration: its step was issued or skipped, and gradients from now on belong to the next one."""
        if skipped:
            # No step releases the slots, and the next forward needs the memory more.
            self._ledger.stores.device.release_slots()
        self.departures.finish()
        self.ahead = None
        self.begin_gradients()
        self._wanted = _NOT_ASKED
        self.gradients_before = self.now.gradients
        self.decisions.memory.end_iteration()
