"""Prepares a step: checks everything that it needs, and reserves the memory for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from dos.backward import Backward
from dos.guard import main_thread, warn
from dos.owners.assembly import Assembly
from dos.owners.state import State
from dos.owners.taking import Taking
from dos.parameters.active import Active, Ready, updates_of
from dos.parameters.admission import malformed
from dos.parameters.ahead import Ahead
from dos.parameters.group_parameters import members
from dos.parameters.replaced_modules import Successors
from dos.planning.decisions import Facts
from dos.sharding.fingerprint import look_at_bits
from dos.state.subgroup import Subgroup
from dos.step.prepare import Preparation, Prepared
from dos.step.work import SubgroupUpdate
from dos.weights.homes import WeightHomes
from perfmodel import Op, Plan


class Preparing:
    """Prepares the steps of one optimizer. No parameter and no value of the state changes."""

    def __init__(self, assembly: Assembly, taking: Taking, state: State, successors: Successors) -> None:
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._taking, self._state, self._successors = taking, state, successors
        self._warned_idle = False

    def look_ahead(self) -> None:
        """Look at the step as backward's last gradient finds it. A hook calls this, while the device still computes."""
        parts, on_device, stores = self._assembly, self._assembly.on_device, self._ledger.stores
        if on_device is None or parts.in_backward is not None or stores.disk is not None:
            return
        with contextlib.suppress(TypeError, ValueError):  # the step raises the error
            given = parts.reconciler.look_ahead(parts.groups)
            if given is not None:
                on_device.ahead = Ahead.of(given, self._registry, on_device.departures, stores)

    def _updates(
        self, active: Active, scales: float | Sequence[float]
    ) -> tuple[Mapping[Subgroup, SubgroupUpdate], Ahead | None]:
        """Return the updates, and the step that backward's last gradient has found if nothing has changed since."""
        on_device, given = self._assembly.on_device, active.given
        if on_device is not None and given is not None and isinstance(scales, float):
            ahead, seen = on_device.ahead, self._assembly.reconciler.state.read
            if ahead is not None and not seen and ahead.holds(given, on_device.departures):
                return ahead.take(given, scales), ahead
        return updates_of(active, self._registry, scales), None

    def prepare(self, scale: float) -> Ready | None:
        """Check everything that a step needs, and reserve the memory for it; return None if the step is to be skipped.

        No parameter and no value of the state has changed then, or if this raises. scale: unscales gradients.
        """
        parts, registry, on_device = self._assembly, self._registry, self._assembly.on_device
        if registry.offloaded.enabled:  # else behind the step's first work
            self._taking.give_back_within()
            registry.renew_hooks()
        registry.place_gradients(parts.groups)
        departed = [] if on_device is None else on_device.departures.marked()
        # Before anything asks whether user code wrote to a tensor: the versions of DTensors do not count such writes.
        look_at_bits([*registry.marked(), *parts.clipping.marked(), *departed])
        active, on_device = self.active(), parts.on_device
        if parts.attachment is not None and len(active.members) != self._successors.gradients:
            self._successors.look(parts.attachment, parts.parameters, active.members)
        if on_device is not None and main_thread.ended:
            raise RuntimeError(
                "the main thread has ended, after which Python starts no more work in the background, such as this "
                "step's; let the main thread join() the one that trains"
            )
        if not active.members and not self._warned_idle:
            found = malformed(parts.groups, {}, ())
            if found:
                raise TypeError(found)
            self._warned_idle = True
            warn(
                "DOSAdam.step() found no gradient on any of its parameters. If backward() was called, the model's "
                "parameters were replaced after the optimizer was built; build it anew from model.parameters()."
            )
        # User code may have set `grad` where gradients are on the host. No hook has seen such a gradient, and the step
        # would lose it.
        if registry.offloaded.enabled:
            self._taking.take_remaining(active.members)
        order = None if parts.attachment is None else parts.attachment.take_new_order()
        if order is not None:
            if on_device is not None:
                on_device.ahead = None
            registry.order_by_use(order if parts.weights is None else parts.weights.together(order))
        facts = None
        if on_device is not None:
            on_device.decisions.memory.enter(Op.UPDATE)
            facts = on_device.facts()
        # A generator, because most steps do not need the norm.
        own = (p for group in parts.groups for p in members(group["params"]))
        scales = parts.clipping.scales(active.members, own, scale)
        if scales is None:
            return None
        updates, ahead = self._updates(active, scales)
        if parts.in_backward is not None:
            updates = parts.in_backward.left(updates)
        if on_device is None or facts is None:
            return Ready(active, updates, None)
        return Ready(active, updates, self._reserve(on_device, facts, updates, ahead))

    def _reserve(
        self, on_device: Backward, facts: Facts, updates: Mapping[Subgroup, SubgroupUpdate], ahead: Ahead | None
    ) -> Prepared:
        """Decide, and reserve the memory of the plan; decide again where the device denies it.

        Raises MemoryError, with nothing changed, if the host has too little memory.
        """
        ledger, stores, registry, decisions = self._ledger, self._ledger.stores, self._registry, on_device.decisions
        weights = self._assembly.weights
        departures, subgroups = on_device.departures, registry.accelerated
        saved = on_device.activations.moving_bytes if on_device.activations.in_use else 0
        facts = dataclasses.replace(facts, saved_bytes=saved)
        plan = on_device.decide(facts)
        if weights is not None and not self.follow_plan(weights, plan, facts):
            facts = dataclasses.replace(facts, blocks=weights.staying())  # the device has no memory for more
            plan = on_device.decide(facts)
        if ahead is None:
            subjects = [departures.subject(subgroup, updates.get(subgroup)) for subgroup in subgroups]
        else:
            subjects = ahead.subjects
        if registry.offloaded.enabled:  # gradients that backward has offloaded may be in memory that is not pinned
            ledger.spill_to_disk(subgroups)
            stores.host.stage(updates)
            registry.offloaded.pin()
        on_device.record_call(subjects, updates)
        with on_device.now.held_up(on_device.now.step):
            # The allocator gives released memory to the stream that it was allocated on. Allocate on the stream that
            # trains, so that forward can use the memory again.
            ledger.device.owner = ledger.device.caller()
            before = () if ahead is None else ahead.before
            with Preparation(subjects, ledger, facts.workload, facts.left, before) as preparation:
                if stores.disk is not None:
                    facts = dataclasses.replace(facts, rooms=preparation.rooms)
                    plan = on_device.decide(facts)
                reserved = preparation.reserve(plan)
                while not isinstance(reserved, Prepared):
                    facts = dataclasses.replace(facts, denied=facts.denied | reserved)
                    reserved = preparation.reserve(on_device.decide(facts))
            if decisions.follows_memory and decisions.memory.grows_short and not stores.disk:
                # Pinning takes 0.2 to 0.4 s per GB, which the step in which state moves home should not have to spend.
                resident = stores.device.resident
                stores.host.pin_ahead(s for s in reversed(subgroups) if s in resident)
        if stores.device.denied is not None:
            decisions.memory.forecast.allocation_failed(stores.device.denied)
        return reserved

    def follow_plan(self, weights: WeightHomes, plan: Plan, facts: Facts) -> bool:
        """Move blocks to the device or home as the plan says; return False if some have to wait."""
        return weights.follow(plan.blocks_on_device, facts.workload, self._weight_room(plan, facts))

    def may_follow(self, weights: WeightHomes, plan: Plan, facts: Facts) -> bool:
        """Return whether `follow_plan` moves any block, unless the device denies the memory."""
        return weights.may_follow(plan.blocks_on_device, facts.workload, self._weight_room(plan, facts))

    def _weight_room(self, plan: Plan, facts: Facts) -> float:
        """Return the bytes of device memory for weights. State that a step flushes has its own until the flush ends."""
        return facts.workload.peak_free(plan.activation_bytes) - self._ledger.stores.device.resident_bytes

    def active(self) -> Active:
        """Enrol, move home and settle the parameters that have a gradient, where needed; return their records."""
        parts, reconciler = self._assembly, self._assembly.reconciler
        if self._registry.homes.disk is not None:
            self._registry.homes.check_unwritten()
        settled, others, gone, given = reconciler.look(parts.groups)
        if parts.weights is not None:
            # Else the update would write to memory that the parameters do not have any more.
            parts.weights.take_replaced([p for p, _ in others])
        if gone:
            parts.forget(gone)
        del gone  # the last reference to memory that newcomers may need
        if not others:
            return Active(settled, len(settled), given)
        found = parts.enrol(others)
        # `settle` writes to state at home, which a later flush would overwrite.
        if reconciler.need_home(found):
            self._state.bring_home_within()
        reconciler.settle(found, parts.groups)
        return Active(settled + found, len(settled), given)
