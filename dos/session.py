"""One optimizer's iterations: backward reports gradients, a step is prepared, committed and settled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from dos.activations.offload import Amount, Surrounding
from dos.backward import Backward
from dos.devices import Caller, Device, Job
from dos.gradients.clipping import Clipping
from dos.gradients.editing import Edit, Editing
from dos.gradients.late_edits import EDITED, LateEdits
from dos.gradients.scaling import amp_scale
from dos.guard import ANY, UNBROKEN, Guard, Phase, entry, main_thread, warn
from dos.in_backward import (
    CLOSURE,
    STATE_READ,
    TOUCHED,
    UNENDED,
    InBackward,
    Run,
    check_updates,
    stop_watching,
    watch_backwards,
)
from dos.options import Options
from dos.parameters.active import Active, Ready, updates_of
from dos.parameters.admission import Group
from dos.parameters.group_parameters import GroupParameters, members
from dos.parameters.hooks import Attachment, lasting, refuse_forward
from dos.parameters.live_state import LiveState
from dos.parameters.reconciler import Reconciler, copy_live
from dos.parameters.registry import Registry, tell_autograd
from dos.parameters.replaced_modules import find_gone, warn_of_successors
from dos.parameters.watching import Watching, hooks_of_others
from dos.planning.decide import Facts
from dos.planning.decisions import Decisions
from dos.sharding.fingerprint import look_at_bits
from dos.sharding.local import local
from dos.sharding.meshes import Meshes
from dos.signals import look_at_all
from dos.state.own_storage import overlap_with
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.ledger import Ledger
from dos.step.parts import Parts
from dos.step.prepare import Preparation, Prepared
from dos.step.unseen import LOST
from dos.step.work import Placed, SubgroupUpdate, prepare_updates
from dos.torch_internals.callers import makes_state
from dos.torch_internals.modes import backward_number, when_backward_ends, writes_gradient
from dos.torch_internals.module_parameters import parameters_of
from dos.weights.blocks import Amount as BlocksStaying
from dos.weights.homes import WeightHomes
from dos.weights.parts import check_parts
from dos.weights.stream import stream_of
from perfmodel import Op, Plan

logger = logging.getLogger(__name__)

_CAPTURED = (
    "a CUDA graph is being captured while an update runs on, for which its replays would not wait; call "
    "optimizer.synchronize() before the capture"
)

_REPLACED = (
    "a parameter of shape {} got other memory after step(), as by lstm.flatten_parameters() or p.data = ..., while its "
    "update ran on, which is lost; call optimizer.synchronize() after step(), or do not attach the model"
)


class Session:
    """The iterations of one optimizer, which refers to this. Nothing here refers to the optimizer: no cycle.

    Each entry point names the phases that it accepts; see the table in docs/architecture.md. The thread that trains,
    autograd's threads (hooks of backward, saved tensors) and user code that reads state call one optimizer: the guard's
    lock admits one thread at a time.

    groups: the optimizer's param groups.
    attachment: the model into whose next forward updates run, if any.
    weights: the model's blocks whose weights stream, if any do.
    in_backward: the updates during backward, if the model was attached with them.
    ledger: where state is, and the transfers in flight.
    on_device: backward and the plans on the accelerator; None until a parameter there is admitted.
    skipped: the number of steps skipped because gradients were not finite.
    """

    # A step: `_end_last_step` waits for the last step or queues this one behind it; `_prepare` checks and reserves
    # everything, or raises with nothing changed; `_commit` changes parameters, state and records. Then `_hand_over`
    # orders the caller behind the updates, or hooks of an attached model do, module by module (`_finish_parameters`).
    # `_settle` waits for all updates, and raises the first failure of any thread.
    def __init__(self, options: Options, device: Device | torch.device | str | None, meshes: Meshes) -> None:
        self.guard = Guard()
        self._lock = self.guard.lock
        watching = Watching(self, takes=bool(options.offload_gradients))
        self.registry = Registry(options, device, self.guard, meshes, watching)
        self.ledger = Ledger(self.guard)
        self.on_device: Backward | None = None
        self.groups: list[Group] = []
        self.attachment: Attachment | None = None
        self.weights: WeightHomes | None = None
        self.in_backward: InBackward | None = None
        self.clipping = Clipping(self.registry.offloaded, options.max_grad_norm, meshes, skips=options.skip_nonfinite)
        self.skipped = 0
        self.reconciler = Reconciler(self.registry, options.rule)
        self._options = options
        self._waiting: set[int] = set()
        """The ids of parameters on the host that must be on the accelerator when they are used."""
        self._refusal: RemovableHandle | None = None
        self._warned_idle = self._warned_of_edits = False
        self._late_edits = LateEdits()
        self._active_before = -1
        """The number of parameters with a gradient in the last step, by which a module that was replaced is noticed."""
        self._looked_for: set[int] = set()
        """The ids of parameters without a gradient for which the attached model was searched."""
        # Work in flight ends when the optimizer is collected or the interpreter exits.
        weakref.finalize(self, self.ledger.finish)

    @property
    def decisions(self) -> Decisions | None:
        """The plans for the device; None without one."""
        return None if self.on_device is None else self.on_device.decisions

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [p for group in self.groups for p in members(group["params"])]

    @property
    def unfinished(self) -> list[ParameterRecord]:
        """The records whose updates may run on; see `Ledger.unfinished`."""
        return self.ledger.unfinished

    def admit(self, group: Group) -> None:
        """Take one of the groups in. Raises TypeError, ValueError or MemoryError if it cannot be optimised."""
        self.registry.admit(group)
        group["params"] = GroupParameters(group["params"], self.before_reading_lists)
        self._set_up_device()
        self._waiting |= {id(p) for p in group["params"] if self.registry.devices.awaits(p)}
        if self._waiting and self._refusal is None:
            waiting, devices = self._waiting, self.registry.devices
            self._refusal = refuse_forward(lambda p: id(p) in waiting and devices.awaits(p))
            weakref.finalize(self, self._refusal.remove)

    def _set_up_device(self) -> None:
        """Set the accelerator up if a parameter there was found, once."""
        found = self.registry.devices.found
        if self.on_device is not None or found is None:
            return
        policy = self._options.policy_on(found)
        if found.shares_host_memory and self._options.never_leaves(found):
            logger.info(
                "%s shares the host's memory: all optimizer state stays there, as with policy='resident'", found
            )
        self.on_device = Backward(found, self.registry, self.ledger, policy, self._options, self.guard)
        # Weak, because the session refers to the activations: state must be released as soon as the optimizer is.
        self.on_device.activations.give_way = weakref.WeakMethod(self._give_way)
        self._attach_device()

    # A step.

    @entry(*UNBROKEN)
    def step(self, found_inf: Any, grad_scale: Tensor | None) -> None:
        """Prepare a step and commit it, or skip it; settle everything in flight if that raises.

        found_inf, grad_scale: set by GradScaler; None without one.
        """
        if self.capturing():
            raise RuntimeError(
                "step() was called while a CUDA graph is being captured, whose replays would not decide, count or move "
                "anything; capture forward and backward alone, and call step() after each replay"
            )
        look_at_all()
        mode, whole = self.in_backward, False
        if mode is not None:
            mode.check_step(self.groups, scaled=found_inf is not None or grad_scale is not None)
            mode.restore()
            left = [p for p in self.parameters if p.grad is not None]
            whole = bool(mode.issued) and not (left or self.registry.offloaded.records)
        if not whole:
            # First, because the host may still update from the memory to which this step sends its gradients.
            self._end_last_step()
        if self.weights is not None:
            self.weights.stream.release_all()  # a copy that no module used would be older than the updated weights
        try:
            self.registry.agree(self.groups)
            if not self.reconciler.state and makes_state():
                self.reconciler.keep_state(self._active())
                return
            amp = amp_scale(found_inf, grad_scale, self.registry.meshes, offloaded=self.registry.offloaded.enabled)
            if self.on_device is not None:
                self.on_device.departures.begin_step(amp.writes)
            ready = None if amp.skip or whole else self._prepare(amp.factor)
            if whole:
                self._commit_updated()
            elif amp.skip:
                self.clipping.forget()
            elif ready is None:
                self._skip()
            else:
                self.guard.phase = Phase.PREPARED
                self._commit(ready)
            if self.on_device is not None:
                self.on_device.end(skipped=ready is None and not whole)
            self.guard.phase = Phase.IDLE
            # Hooks of an attached model order the caller, while updates run on into the forward.
            if self.attachment is None or not self.ledger.running:
                self._hand_over()
            elif self.on_device is not None and self.on_device.wants_clean_forward:
                self._settle()
            self._wait_before_reads()
        except BaseException:
            self.reconciler.withdraw()
            with contextlib.suppress(Exception):  # the error that is raised already came first
                self._settle()
            raise
        if mode is not None:
            mode.finish(self.parameters)
        if self.on_device is not None:
            # The caller continues with the next forward: another iteration begins.
            self.ledger.trim()
            self.on_device.activations.follow_plan(self.on_device.decisions.plan)
            self.on_device.begin()

    def _skip(self) -> None:
        """Skip a step whose gradients are not finite, which is prepared in part. Gradients on the host are used up."""
        self.skipped += 1
        logger.warning(
            "step skipped, as skip_nonfinite=True asks: the norm of its gradients is not finite; skipped so far: %d",
            self.skipped,
        )
        self.reconciler.withdraw()
        self.clipping.forget()
        self.registry.offloaded.forget_all()

    def _prepare(self, scale: float) -> Ready | None:
        """Check everything that a step needs, and reserve the memory for it; return None if the step is to be skipped.

        No parameter and no value of the state has changed then, or if this raises. scale: unscales gradients.
        """
        registry = self.registry
        self._renew_hooks()
        registry.place_gradients(self.groups)
        departed = [] if self.on_device is None else self.on_device.departures.marked()
        # Before anything asks whether user code wrote to a tensor: the versions of DTensors do not count such writes.
        look_at_bits([*registry.marked(), *self.clipping.marked(), *departed])
        active = self._active()
        if self.attachment is not None and len(active.members) != self._active_before:
            self._look_for_replaced_modules(self.attachment, active)
        if self.on_device is not None and main_thread.ended:
            raise RuntimeError(
                "the main thread has ended, after which Python starts no more work in the background, such as this "
                "step's; let the main thread join() the one that trains"
            )
        if not active.members and not self._warned_idle:
            self._warned_idle = True
            warn(
                "DOSAdam.step() found no gradient on any of its parameters. If backward() was called, the model's "
                "parameters were replaced after the optimizer was built; build it anew from model.parameters()."
            )
        # User code may have set `grad` where gradients are on the host. No hook has seen such a gradient, and the step
        # would lose it.
        self._take_remaining_gradients(active.members)
        order = None if self.attachment is None else self.attachment.take_new_order()
        if order is not None:
            registry.order_by_use(order if self.weights is None else self.weights.together(order))
        facts = None
        if self.on_device is not None:
            self.on_device.decisions.memory.enter(Op.UPDATE)
            facts = self.on_device.facts()
        scales = self.clipping.scales(active.members, self.parameters, scale)
        if scales is None:
            return None
        updates = updates_of(active, registry, scales)
        if self.in_backward is not None:
            updates = self.in_backward.left(updates)
        if self.on_device is None or facts is None:
            return Ready(active, updates, None)
        return Ready(active, updates, self._prepare_device(self.on_device, facts, updates))

    def _prepare_device(
        self, on_device: Backward, facts: Facts, updates: Mapping[Subgroup, SubgroupUpdate]
    ) -> Prepared:
        """Decide, and reserve the memory of the plan; decide again where the device denies it.

        Raises MemoryError, with nothing changed, if the host has too little memory.
        """
        ledger, stores, registry, decisions = self.ledger, self.ledger.stores, self.registry, on_device.decisions
        departures, subgroups = on_device.departures, registry.accelerated
        facts = dataclasses.replace(facts, saved_bytes=on_device.activations.moving_bytes)
        plan = on_device.decide(facts)
        if self.weights is not None and not self._follow_plan(self.weights, plan, facts):
            facts = dataclasses.replace(facts, blocks=self.weights.staying())  # the device has no memory for more
            plan = on_device.decide(facts)
        subjects = [departures.subject(subgroup, updates.get(subgroup)) for subgroup in subgroups]
        if registry.offloaded.enabled:  # gradients that backward has offloaded may be in memory that is not pinned
            ledger.spill_to_disk(subgroups)
            stores.host.stage(updates)
            registry.offloaded.pin()
        on_device.record_call(subjects, updates)
        with on_device.now.held_up():
            # The allocator gives released memory to the stream that it was allocated on. Allocate on the stream that
            # trains, so that forward can use the memory again.
            self.ledger.device.owner = self.ledger.device.caller()
            with Preparation(subjects, ledger, facts.workload, facts.left) as preparation:
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

    def _look_for_replaced_modules(self, attachment: Attachment, active: Active) -> None:
        """Warn if the model no longer has parameters that got no gradient, and has others that no optimizer has."""
        self._active_before, model = len(active.members), attachment.model
        with_gradient = {id(record.parameter) for record, _ in active.members} | self._looked_for
        missing = [p for p in self.parameters if id(p) not in with_gradient]
        # Once each: experts of a mixture often get none.
        self._looked_for.update(map(id, missing))
        if missing and model is not None and not attachment.gathers:
            warn_of_successors(model, self.parameters, find_gone(model, missing, anywhere=False))

    def _follow_plan(self, weights: WeightHomes, plan: Plan, facts: Facts) -> bool:
        """Move blocks to the device or home as the plan says; return False if some have to wait."""
        # State that this step flushes still counts: its memory is free only when its flush has ended.
        room = facts.workload.peak_free(plan.activation_bytes) - self.ledger.stores.device.resident_bytes
        return weights.follow(plan.blocks_on_device, facts.workload, room)

    def _commit(self, ready: Ready) -> None:
        """Issue a prepared step. Everything that a user can have got wrong was checked; from here on values change.

        In-place updates of parameters on the host have ended when this returns, unless an attached model waits for
        them.
        """
        registry, (active, updates, prepared) = self.registry, ready
        with self.guard.change():
            self.guard.steps += 1
            late = [s for s in registry.on_host if s in updates and self.attachment is not None and s.sharded]
            now = [s for s in registry.on_host if s in updates and s not in late]
            behind = {piece.record for subgroup in late for piece in subgroup.pieces}
            updated = [r for r, _ in active.members if r.arena.accelerated or r in behind]
            self.ledger.pending = dict.fromkeys(updated, frozenset())
            if self.on_device is not None and prepared is not None:
                self.on_device.issue(prepared)
            if self.attachment is not None:
                self._late_edits.watch(self.ledger.pending)
            self.reconciler.count(active)
            self._count_updated()
            registry.offloaded.forget_all(used=True)
            self.ledger.update_beside(updates[subgroup] for subgroup in late)
            for subgroup in now:
                prepare_updates([Placed(updates[subgroup], subgroup.state)])()
            registry.written([record for record, _ in active.members if record not in self.ledger.pending])
            # Else the factors would apply in the next step if user code uses the same gradients again.
            self.clipping.forget()
        self._join_uncovered()

    def _commit_updated(self) -> None:
        """Count a step of which backward has issued everything."""
        with self.guard.change():
            self.guard.steps += 1
            self._count_updated()
            if self.on_device is not None and self.on_device.now.workload is not None and self.ledger.step is not None:
                plan = None if self.in_backward is None else self.in_backward.plan
                assert plan is not None, "its step is in flight"
                self.on_device.decisions.memory.enter(Op.UPDATE)
                self.on_device.end_updates(plan)
            self.ledger.close()
            self.registry.offloaded.forget_all(used=True)
            self.clipping.forget()
        self._join_uncovered()

    def _count_updated(self) -> None:
        """Count this step of the parameters that backward has updated."""
        if self.in_backward is not None and self.in_backward.complete:
            complete = self.in_backward.complete
            self.reconciler.count(Active(complete, len(complete)))

    def _join_uncovered(self) -> None:
        """Order the caller behind the updates of parameters for which no hook of an attached model will wait."""
        if self.attachment is not None:
            tell_autograd(self.ledger.unfinished)  # at once: backward of an older graph may run no hook that waits
            covered = self.attachment.covered()
            # All readers of weights that stream wait for them: their block, or user code.
            pending = [p for r in self.ledger.pending if id(p := r.parameter) not in covered and not r.arena.streams]
            self._join(pending)

    def _active(self) -> Active:
        """Enrol, move home and settle the parameters that have a gradient, where needed; return their records."""
        self.registry.homes.check_unwritten()
        settled, others, gone = self.reconciler.look(self.groups)
        if self.weights is not None:
            # Else the update would write to memory that the parameters do not have any more.
            self.weights.take_replaced([p for p, _ in others])
        self._forget(gone)
        del gone  # the last reference to memory that newcomers may need
        found = self._enrol(others)
        # `settle` writes to state at home, which a later flush would overwrite.
        if self.reconciler.need_home(found):
            self._bring_home()
        self.reconciler.settle(found, self.groups)
        return Active(settled + found, len(settled))

    def _forget(self, gone: Sequence[ParameterRecord]) -> None:
        """Forget these records with their arenas, everywhere: a reference that stays would use released memory."""
        if gone:
            with self.guard.change():
                if self.on_device is not None:
                    self.on_device.forget(gone)
                self.registry.forget(gone, self.parameters)

    def _enrol(self, members: Sequence[tuple[Tensor, Group]]) -> list[tuple[ParameterRecord, Group]]:
        """Return the records of these parameters with their groups; allocate those of new ones. Raises MemoryError."""
        self.registry.enrol(members)
        self._set_up_device()
        return [(self.registry.records[id(p)], group) for p, group in members]

    # Work in flight.

    def capturing(self) -> bool:
        """Return whether the present work is being captured in a CUDA graph, whose replays run no hooks. For hooks."""
        return self.on_device is not None and self.on_device.device.capturing()

    def reads_in_backward(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a backward that may update is about to read these. Raises as `InBackward.check_use`."""
        mode = self.in_backward
        return mode is not None and mode.reads() and mode.check_use(parameters)

    def check_whole(self) -> None:
        """Raise RuntimeError if backward has updated some of the parameters, and others wait for `step()`."""
        if self.in_backward is not None:
            self.in_backward.check_whole()

    def waits(self) -> bool:
        """Return whether hooks have anything to do before parameters are used."""
        return bool(self.ledger.pending) or self.capturing()

    def finish_others(self) -> None:
        """Wait for other optimizers' updates of these parameters. Takes no lock: their threads may wait for ours."""
        for other in self.registry.watching.others():
            # Only the other session knows its updates: this step would read parameters that they still write.
            if other.unfinished:
                other.synchronize()

    def _end_last_step(self) -> None:
        """Wait for the last step before another begins, unless the device queues all of it before the next."""
        if self.ledger.running:
            if self.ledger.queue():
                self._warn_of_lost_writes()
            else:
                self._settle()

    def _hand_over(self) -> None:
        """Order the work that the caller queues on the device from now on behind the update of all parameters.

        Blocks for updates on the host, and for memory that must be released. The next call raises later failures.
        """
        if self.on_device is None or not self.on_device.device.queues or self.ledger.step is None:
            self._settle()
            return
        self.ledger.order_caller()
        self._written(self.ledger.unfinished)
        self._all_updated()

    @entry(*ANY)
    def synchronize(self) -> None:
        """Block until the last step is complete."""
        self._settle()

    def _settle(self) -> None:
        if not self.ledger.idle and self.capturing():
            raise RuntimeError(_CAPTURED)  # a wait would end the capture, and look like a step that failed
        try:
            self.ledger.settle()
            if self.on_device is not None:
                self.on_device.decisions.pace.read()
            self._written(self.ledger.unfinished)
        except Exception:
            self._all_updated()
            raise
        self._all_updated()  # after the wait: if Ctrl-C ends that, the next call waits again
        self._warn_of_lost_writes()

    def _warn_of_lost_writes(self) -> None:
        """Warn once of each parameter to which user code wrote too late for its update, if that is known by now."""
        found = () if self.ledger.unseen is None else self.ledger.unseen.lost()
        others = [record for record in found if not record.written_late]
        for record in others:
            record.written_late = True  # its gradients wait for step() from now on, so that such writes count
        if others:
            warn(LOST.format(len(others), tuple(others[0].parameter.shape)))

    def _written(self, records: Collection[ParameterRecord]) -> None:
        """Note that user code comes behind the updates of these records from now on."""
        edited = self._late_edits.ended(records)
        if edited and not self._warned_of_edits:
            self._warned_of_edits = True
            warn(EDITED.format(len(edited), tuple(edited[0].parameter.shape)))
        self.registry.written(records)

    def _all_updated(self) -> None:
        """Let no hook and no reading wait any more."""
        self._end_waiting()
        self.ledger.pending = {}

    def _wait_before_reads(self) -> None:
        """Wait before user code reads parameters of which updates run, if any do."""
        if self.attachment is not None and self.ledger.unfinished:
            self.attachment.wait_before_reads()
            for group in self.groups:
                if type(group["params"]) is list:  # set by user code, as by Accelerate where it divides parameters
                    group["params"] = GroupParameters(group["params"], self.before_reading_lists)
            for parameters in self._lists():
                parameters.wait()

    def _end_waiting(self) -> None:
        if self.ledger.pending and self.attachment is not None:
            self.attachment.end_waiting()
            for parameters in self._lists():
                parameters.rest()

    @contextlib.contextmanager
    def lists_at_rest(self) -> Iterator[None]:
        """Let the lists of the groups not wait meanwhile, for a reader of no values."""
        for parameters in self._lists():
            parameters.rest()
        try:
            yield
        finally:
            if self.attachment is not None and self.ledger.unfinished:
                for parameters in self._lists():
                    parameters.wait()

    def before_reading_lists(self) -> None:
        """Wait before user code reads a group's list; our own code, which reads them within calls, needs no wait."""
        with self._lock:
            within = self._lock.entered
        if not within:
            self.synchronize()

    def sample_memory(self) -> None:
        """Sample the device's memory in forward, unless the last sample is recent or a graph is captured."""
        memory = None if self.on_device is None else self.on_device.decisions.memory
        # Asked last: a capture, in which nothing may be measured, is rare, and each module of a forward calls this.
        if memory is not None and time.perf_counter() >= memory.due and not self.capturing():
            memory.sample()

    def _lists(self) -> list[GroupParameters]:
        """Return the groups' lists of parameters, without those that user code has set."""
        return [group["params"] for group in self.groups if isinstance(group["params"], GroupParameters)]

    def finish_parameters(self, parameters: Iterable[Tensor], *, captured: bool) -> None:
        """Wait for the updates of these parameters, and no others. A hook calls this before they are used.

        captured: whether this is `capturing`.
        """
        if self.ledger.pending and (captured or not self._have_waited(parameters)):
            self._finish_parameters(parameters)

    def _have_waited(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the caller's queue is behind these updates. Without the lock: readers ask it often."""
        here, pending = None if self.on_device is None else self.on_device.device.caller(), self.ledger.pending
        records = self.registry.records
        for parameter in parameters:
            record = records.get(id(parameter))
            if record in pending and here not in pending[record]:
                return False
        return True

    @entry(*ANY, hook=True)
    def _finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        self.finish_within(parameters)

    def finish_within(self, parameters: Iterable[Tensor]) -> None:
        """Do the same within a hook that has the lock."""
        if self.ledger.pending:
            if self.capturing():
                raise RuntimeError(_CAPTURED)
            self._join(parameters)

    def _join(self, parameters: Iterable[Tensor]) -> None:
        here = None if self.on_device is None else self.on_device.device.caller()
        pending, places = self.ledger.pending, self.registry.places
        for parameter in parameters:
            record = self.registry.record(parameter)
            # Several modules may read one weight on several streams, each of which must wait.
            behind = None if record is None else pending.get(record)
            if record is None or behind is None or here in behind:
                continue
            subgroups = [subgroup for subgroup, _ in places[record]]
            try:
                # The caller is about to read the parameter, which these updates write.
                for subgroup in subgroups:
                    self.ledger.join(subgroup)
            except Exception:
                with contextlib.suppress(Exception):  # the error that is raised says that the step failed
                    self._settle()
                raise
            if not behind and record.replaced and not record.follow_sharing():
                self._settle()
                raise RuntimeError(_REPLACED.format(tuple(record.parameter.shape)))
            updated = [record, *self._beside(record, subgroups, here)]
            self._written([each for each in updated if not pending[each]])
            for each in updated:
                # It stays listed, because another queue that reads the parameter has to wait for itself.
                pending[each] = pending[each] | {here}

    def _beside(
        self, record: ParameterRecord, subgroups: Sequence[Subgroup], here: Caller | None
    ) -> list[ParameterRecord]:
        """Return the other records behind whose updates the caller is, too, since it has joined these subgroups.

        Not those whose memory was replaced: the modules that read them raise.
        """
        pending, places = self.ledger.pending, self.registry.places
        if record.arena.streams:
            return []
        found = []
        for other in dict.fromkeys(piece.record for subgroup in subgroups for piece in subgroup.pieces):
            behind = pending.get(other)
            if other is record or behind is None or here in behind or other.replaced:
                continue
            if len(subgroups) >= len(places[other]) and all(subgroup in subgroups for subgroup, _ in places[other]):
                found.append(other)
        return found

    @entry(*ANY)
    def bring_home(self) -> None:
        """Move all resident state home, once the last step is complete."""
        self._bring_home()

    def _bring_home(self) -> None:
        self._settle()
        if self.on_device is not None:
            self.ledger.bring_home(self.registry.accelerated)

    @entry(*ANY)
    def release_memory(self) -> int:
        """Release all device memory of state that can move to the host; return its bytes."""
        # Read before the wait, so that slots count, which the step releases when it ends.
        held = 0 if self.on_device is None else self.ledger.stores.device.nbytes
        self._settle()
        if self.on_device is not None:
            self.ledger.cancel_slots()
            self._bring_home()
            self.on_device.decisions.memory.ran_out(held)
            self.on_device.activations.ran_out()
            self.on_device.now.backward = None  # if the iteration is tried again, its peak is sampled, too
            self.on_device.device.trim()
        return held

    def _give_way(self, nbytes: int) -> None:
        """Release device memory of state for a saved tensor of `nbytes` that backward needs and cannot allocate.

        Called within `ActivationOffload`, which has the lock.
        """
        assert self.on_device is not None, "saved tensors move only where there is a device"
        # First, because the last step may still use the state that is moved below.
        self.ledger.settle()
        held = self.ledger.stores.device.nbytes
        # State that backward has fetched, and its slots, take memory, too.
        self.on_device.cancel_all()
        self.ledger.bring_home(self.registry.accelerated)
        # The plan gave state too much memory: user code alone would have had enough.
        self.on_device.decisions.memory.forecast.allocation_failed(max(0, held - nbytes))
        self.on_device.device.trim()

    # Backward.

    def gradient_ready(self, parameter: Tensor, leaf: Tensor) -> None:
        """Count or send a gradient. A hook calls this, on any thread, when backward has written ``leaf.grad``.

        leaf: the parameter, or its copy where weights stream.
        """
        if self.in_backward is not None:
            self._gradient_in_backward(parameter, leaf)
            return
        on_device = self.on_device
        if on_device is not None:
            if on_device.activations.in_use and leaf.grad is not None:
                on_device.device.count(local(leaf.grad))
            if on_device.device.capturing():
                if self.registry.offloaded.enabled and not hooks_of_others(leaf):
                    leaf.grad = None  # the graph that would compute it will not exist
                    raise RuntimeError(
                        "a CUDA graph that captures backward writes gradients where it has found them, and "
                        "offload_gradients=True takes them away; build the optimizer with offload_gradients=False"
                    )
                on_device.replays = True  # replays run no hooks: only step() finds their gradients
                return
            if on_device.stays(parameter):
                return
        self._gradient_ready(parameter, leaf)

    @entry(*ANY, hook=True)
    def _gradient_ready(self, parameter: Tensor, leaf: Tensor) -> None:
        takes = self._takes(parameter, leaf)
        guard = self.guard
        # Gradients are copied to memory from which the host may still update for the last step.
        if self.ledger.running:
            self._end_last_step()
        if (guard.phase is not Phase.BACKWARD and guard.broken) or guard.lost or main_thread.ended:
            return  # the step raises the error
        guard.phase = Phase.BACKWARD
        if self.on_device is None and self.registry.devices.holds(parameter):
            self._set_up_device()
        on_device = self.on_device
        if on_device is None:
            return
        try:
            on_device.count()
            self._know(parameter)
            record, offloaded = self.registry.records.get(id(parameter)), self.registry.offloaded
            if record is None:
                return
            if not on_device.is_final(record) or (offloaded.enabled and not takes):
                offloaded.left.add(record)
                on_device.now.left += 1
            elif not offloaded.enabled:
                on_device.send(record)
            elif leaf.grad is not None:
                on_device.plan_ahead()
                self._take_written(record, leaf)
        except BaseException:
            # A copy that raised may still run in part. All are cancelled, and the step sends the gradients anew.
            on_device.cancel_all()
            raise

    def _takes(self, parameter: Tensor, leaf: Tensor) -> bool:
        """Return whether a gradient that backward has just written is to be offloaded. Raises if that cannot be."""
        # It stays in `p.grad` until the step where hooks of user code read it there.
        if not self.registry.offloaded.enabled or hooks_of_others(leaf):
            return False
        known = self.registry.leaf(parameter)
        if leaf is known:
            self.registry.offloaded.refuse_second_thread(self.registry.record(parameter))
        elif writes_gradient(known):
            check_parts(parameter, known)
        return True

    def _know(self, parameter: Tensor) -> None:
        """Enrol all parameters if gradients are offloaded and this one is new."""
        if self.registry.offloaded.enabled and self.registry.record(parameter) is None:
            self._enrol([(p, group) for group in self.groups for p in group["params"] if p.requires_grad])

    def _take_written(self, record: ParameterRecord, leaf: Tensor) -> None:
        """Offload a gradient that backward has just written."""
        offloaded, parameter = self.registry.offloaded, record.parameter
        # Not what another thread of autograd may be writing to the parameter itself; its own hook comes next.
        taken = record in offloaded.records and record not in offloaded.left
        joins = parameter is not leaf and parameter.grad is not None and not taken
        with torch.no_grad():
            self._take(record, leaf, in_backward=True)
        if joins:  # set by user code before any backward, which adds to it
            offloaded.left.add(record)

    # Updates during backward.

    @entry(*ANY, hook=True)
    def run_begins(self, run: Run) -> None:
        """Note that user code begins a backward."""
        if self.in_backward is not None:
            self.in_backward.begin(run)

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def run_ends(self, run: Run) -> None:
        """Note that a backward has ended, and issue what is left of its updates."""
        mode = self.in_backward
        if mode is None:
            return
        try:
            if not self.guard.broken:  # else the step raises the error
                mode.issue_rest()
        except BaseException as error:
            mode.fail(run, error)
            raise
        mode.end(run, self.parameters)
        self._watch_reads(run)

    @entry(*ANY, hook=True)
    def run_failed(self, run: Run, error: BaseException) -> None:
        """Note that a backward has raised `error`. If it has updated anything, the optimizer is broken."""
        if self.in_backward is not None:
            self.in_backward.fail(run, error)
            self._watch_reads(run)

    def _watch_reads(self, run: Run) -> None:
        """Wait before user code reads parameters of which this backward's updates run; else look at no more reads."""
        if not run.updates:
            return
        if self.ledger.unfinished:
            self._wait_before_reads()
        elif self.attachment is not None:
            self.attachment.end_waiting()

    @entry(*ANY, hook=True)
    def _gradient_in_backward(self, parameter: Tensor, leaf: Tensor) -> None:
        """Use a gradient that backward has just written, if its parameter is the attached model's."""
        mode, guard = self.in_backward, self.guard
        usual = guard.phase is Phase.BACKWARD and not guard.lost
        if mode is None or main_thread.ended or (not usual and guard.broken):
            return  # the step raises the error
        if self.on_device is None and self.registry.devices.holds(parameter):
            self._set_up_device()
        on_device, run, gradient = self.on_device, mode.run, leaf.grad
        member = id(parameter) in mode.members
        if member and (run is None or not run.checked):
            mode.check(parameter, on_device, self.parameters)
        if member and gradient is not None and gradient.layout is not torch.strided:
            mode.refuse_sparse(parameter)
        guard.phase = Phase.BACKWARD
        takes = on_device is not None and self._takes(parameter, leaf)
        begins = member and run is not None and not run.began
        if (begins or takes) and self.ledger.running and not mode.issued:
            # The host may still update from the memory to which this backward sends its gradients. Before the gradient
            # counts: this wait is no part of backward.
            self._settle()
        if on_device is not None:
            if on_device.activations.in_use and gradient is not None:
                on_device.device.count(local(gradient))
            on_device.count()
        if takes:
            self._know(parameter)
        if begins and run is not None:
            run.began = True
            self._begin_in_backward(mode, run)
        if takes and on_device is not None and gradient is not None:
            self._take_beside_updates(on_device, self.registry.record(parameter), leaf)
        if member and run is not None:
            mode.ready(run, parameter)

    def _take_beside_updates(self, on_device: Backward, record: ParameterRecord | None, leaf: Tensor) -> None:
        """Offload a gradient that backward has just written, while updates of others may run."""
        if record is None:
            return
        if not on_device.is_final(record):
            self.registry.offloaded.left.add(record)
            return
        try:
            self._take_written(record, leaf)
        except BaseException:
            on_device.cancel_all()  # as in `_gradient_ready`
            raise

    @torch.no_grad()
    def _begin_in_backward(self, mode: InBackward, run: Run) -> None:
        """Let a backward update, at its first gradient. Raises with nothing changed if a setting cannot be used."""
        if not run.updates:
            return
        if self.attachment is not None:  # what recomputes in this backward may read past a module's forward
            self.attachment.wait_before_reads()
        mode.remember_settings(self.groups)
        on_device = self.on_device
        if on_device is not None and on_device.decisions.pace.holds:
            return
        if not mode.knows or any(other.unfinished for other in self.registry.watching.others()):
            return
        look_at_bits(self.registry.marked())
        order = None if self.attachment is None else self.attachment.take_new_order()
        if order is not None:
            self.registry.order_by_use(order)
        facts = None if on_device is None else on_device.facts()
        parts = None
        if on_device is not None and facts is not None:
            # The allocator gives released memory to the stream that it was allocated on; see `_prepare_device`.
            self.ledger.device.owner = self.ledger.device.caller()
            plan, stores = on_device.decide(facts), self.ledger.stores
            left = facts.left(plan, stores.device.resident_bytes)
            parts = Parts(self.ledger, plan, self.registry.accelerated, facts.workload, on_device.now, left)
        mode.open(self.groups, parts)

    def check_state_whole(self) -> None:
        """Raise RuntimeError if state is in part of the next step."""
        if self.in_backward is not None and self.in_backward.issued:
            raise RuntimeError(STATE_READ)

    def refuse_closure(self) -> None:
        """Raise RuntimeError where `step()` must not call backward."""
        if self.in_backward is not None:
            raise RuntimeError(CLOSURE)

    def updates_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether backward updates any of these. For torch's clipping."""
        mode = self.in_backward
        return mode is not None and any(id(p) in mode.members for p in parameters)

    @contextlib.contextmanager
    def no_update(self) -> Iterator[None]:
        """Let backwards within only add up gradients."""
        mode = self.in_backward
        if mode is None:
            yield
            return
        mode.held += 1
        try:
            yield
        finally:
            mode.held -= 1

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a bucket, which DDP sets as `grad` when backward ends. DDP's hook calls this."""
        if self.on_device is None or self.registry.offloaded.enabled:
            return
        self._end_last_step()  # DDP reduces a bucket of parameters without gradients before any other hook runs
        if self.guard.broken:
            return  # the step raises the error
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = self.registry.record(parameter)
            if record is not None and record.arena.accelerated:
                self.on_device.send(record, gradient)

    def discard_gradients(self, parameters: Sequence[Tensor], *, overwrites: bool) -> bool:
        """Forget what is offloaded of these parameters' gradients, because user code zeroes them.

        overwrites: whether it then writes to gradients in `p.grad`, which the step may still read.
        Returns whether any of them has state here.
        """
        records = [record for p in parameters if (record := self.registry.record(p)) is not None]
        if overwrites and records and self.unfinished:
            self.synchronize()
        if records and self.registry.offloaded.enabled:
            self._discard([record for record in records if not self._keeps(record)])
        return bool(records)

    def _keeps(self, record: ParameterRecord) -> bool:
        """Return whether a backward that updates has ended, so that zeroing gradients does not drop this one."""
        return self.in_backward is not None and self.in_backward.keeps(record)

    @entry(*ANY)
    def _discard(self, records: Sequence[ParameterRecord]) -> None:
        self.registry.offloaded.forget(records)
        self._empty_copies(records)
        if self.on_device is not None:
            self.on_device.begin_gradients()

    @entry(*ANY)
    def forget_interrupted(self) -> None:
        """Forget gradients that a backward which raised left on copies before our hook, or that wait for others."""
        self.registry.offloaded.forget_interrupted()
        self._empty_copies(self.registry.records.values())

    def _empty_copies(self, records: Iterable[ParameterRecord]) -> None:
        """Forget gradients on copies of weights that stream, left by a backward that was interrupted."""
        for record in records:
            if record.leaf is not record.parameter:
                record.leaf.grad = None

    def forget_gradients(self) -> None:
        """Forget all gradients, because user code has discarded them."""
        self.clipping.forget()
        offloaded = self.registry.offloaded
        if self.in_backward is not None and self.in_backward.unended:
            offloaded.forget([record for record in offloaded.records if not self._keeps(record)])
        else:
            offloaded.forget_all()
        if self.weights is not None:
            self._empty_copies(self.registry.records.values())
        if self.on_device is not None:
            self.on_device.departures.forget()
            self.on_device.begin_gradients()
        if self.guard.phase is Phase.BACKWARD:
            self.guard.phase = Phase.IDLE

    def _offload_the_rest(self) -> None:
        """Redistribute gradients to the placements of their parameters; if gradients are offloaded, offload all."""
        if self.guard.lost:
            self.guard.check()
        if self.in_backward is not None:
            raise RuntimeError(TOUCHED)
        self.registry.agree(self.groups)
        if self.registry.offloaded.enabled:
            self._renew_hooks()
        self.registry.place_gradients(self.groups)
        if self.registry.offloaded.enabled:
            self._end_last_step()
            settled, others, _ = self.reconciler.look(self.groups)
            self._take_remaining_gradients(settled + self._enrol(others))

    def _take_remaining_gradients(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Offload gradients that no hook has taken, so that all gradients of a subgroup are in one place.

        Raises RuntimeError, with none taken, if user code has set one beside a gradient on the host.
        """
        offloaded = self.registry.offloaded
        if not offloaded.enabled or self.on_device is None:
            return
        found = [(r, leaf) for r, _ in active if r.arena.accelerated for leaf in _leaves(r)]
        for record, leaf in found:
            # On a copy, which user code does not know, is what a backward that raised has left.
            if leaf is record.parameter and record in offloaded.records and record not in offloaded.left:
                raise RuntimeError(
                    f"user code has set p.grad of a parameter of shape {tuple(record.parameter.shape)} whose gradient "
                    "DOSAdam(offload_gradients=True) has moved to the host, where p.grad does not replace it; edit "
                    "gradients with optimizer.edit_gradients(), or call optimizer.zero_grad() before you set p.grad"
                )
        for record, leaf in found:
            self._take(record, leaf, in_backward=False)

    def _renew_hooks(self) -> None:
        """Hook parameters again where hooks were lost; a gradient that backward wrote without a hook is backward's."""
        for parameter in self.registry.watching.renew():
            record = self.registry.record(parameter)
            if record is not None:
                self.registry.offloaded.left.add(record)

    def _take(self, record: ParameterRecord, leaf: Tensor, *, in_backward: bool) -> None:
        """Offload a gradient, in `leaf.grad`: add it to the one on the host and release it here."""
        self.clipping.about_to_add(record)
        subgroups = [subgroup for subgroup, _ in self.registry.places[record]]
        index = self.registry.index[subgroups[0]] if subgroups else 0
        assert leaf.grad is not None, "it is taken from there"
        # Before `stages` is called, which counts the memory of the staging: a wider gradient replaces it.
        record.arena.stage_gradients_as(leaf.grad.dtype)
        # Not in backward where ranks divide parameters: spilling waits for the device, whose collectives wait for other
        # ranks, which may wait for this one.
        if not (in_backward and record.sharded) and not all(map(self.registry.host_store.stages, subgroups)):
            self.ledger.spill_to_disk(self.registry.accelerated)
        if self.registry.offloaded.take(record, leaf, subgroups, index, self.ledger, in_backward=in_backward):
            when_backward_ends(functools.partial(self._backward_ends, backward_number()))

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def _backward_ends(self, number: int) -> None:
        """Add the gradients that `OffloadedGradients.take` has held in vain in this backward."""
        self.registry.offloaded.end_backward(number, self.ledger.lane)

    @torch.no_grad()
    @entry(*ANY, enters=False)
    def edit_gradients(self, edit: Edit) -> None:
        """Call `edit` with each parameter that has a gradient, and with this. It may read state and the model."""
        self._before_editing()
        departures = None if self.on_device is None else self.on_device.departures
        members = [(p, self.registry.record(p)) for p in self.parameters]
        Editing(edit, self.registry.offloaded, self.clipping, departures).run(members)

    @entry(*ANY)
    def _before_editing(self) -> None:
        self._offload_the_rest()

    # Clipping.

    @torch.no_grad()
    @entry(*ANY)
    def clip(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of all gradients in the next step; return the norm before."""
        self._offload_the_rest()
        return self.clipping.clip(self.parameters, max_norm)

    @torch.no_grad()
    @entry(*ANY)
    def norm(self) -> Tensor:
        """Return the global 2-norm of all gradients as the next step will use them."""
        self._offload_the_rest()
        return self.clipping.norm(self.parameters)

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a gradient of any of these is on the host. For torch's clipping."""
        return bool(self.registry.offloaded.gradients(set(map(id, parameters))))

    def may_have_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether `has_offloaded` may be true on some rank. For torch's clipping."""
        divided = self.registry.meshes and self.on_device is not None and self.registry.offloaded.enabled
        return bool(self._own(parameters)) if divided else self.has_offloaded(parameters)

    @entry(*ANY)
    def offloaded_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Offload all gradients and return the norm of these on the host. For torch's clipping."""
        self._offload_the_rest()
        return self.clipping.norm_away(parameters, norm_type)

    @entry(*ANY)
    def fold_offloaded(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply these gradients on the host by the factor in the next step. For torch's clipping."""
        self.clipping.fold_away(parameters, factor)

    @torch.no_grad()
    @entry(*ANY)
    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Fold the factor into the next step for this optimizer's parameters, and return them.

        For torch's clipping after ``dos.fold_clipping()``.
        """
        own = self._own(parameters)
        self.clipping.fold(own, factor)
        return own

    def _own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        known = set(map(id, self.parameters))
        return [p for p in parameters if id(p) in known]

    # The model, and user code.

    def attach(
        self,
        model: nn.Module,
        amount: Amount | None,
        weights: BlocksStaying | None = None,
        blocks: Iterable[nn.Module] | None = None,
        *,
        updates: bool = False,
    ) -> None:
        """Let updates run on into the forward of this model. amount: how much of its saved tensors moves meanwhile.

        weights: how many of its blocks stay on the device; None: all, and nothing is moved.
        updates: whether backward updates. Raises ValueError, with nothing changed, where it cannot.
        """
        if self.in_backward is not None and self.in_backward.under_way:
            raise RuntimeError(UNENDED)
        if updates:
            check_updates(model, self._options, weights=weights is not None)
        # Only hooks of the former model wait for updates in flight, and these hooks are removed below.
        self.synchronize()
        self._look_for_device()
        if weights is not None:
            self.weights = self._move_in(model, weights, blocks)
        elif stream_of(model) is not None:
            raise ValueError(
                "the weights of this model stream between host and device; pass weights= again, such as weights='auto'"
            )
        before, self.attachment = self.attachment, Attachment(model, self, amount, reads=self.weights is None)
        if before is not None:
            before.detach()
        self._update_in_backward(model if updates else None)
        self._attach_device()
        self._active_before, self._looked_for = -1, set()
        if not self.attachment.gathers:
            own = self.parameters
            gone = find_gone(model, own, anywhere=True)
            if warn_of_successors(model, own, gone):
                self._looked_for.update(map(id, gone))  # once

    def _update_in_backward(self, model: nn.Module | None) -> None:
        """Update the parameters of this model in backward from now on; None: none."""
        if model is None:
            if self.in_backward is not None:
                stop_watching(self)
                self.registry.watch_host(self.parameters, wanted=False)
            self.in_backward = None
            return
        members = set(map(id, parameters_of(model)))
        self.registry.watch_host([p for p in self.parameters if id(p) in members], wanted=True)
        self.in_backward = InBackward(
            self.registry, self.ledger, self.reconciler, self.guard, self._options.rule, members
        )
        watch_backwards(self)

    @entry(*UNBROKEN, enters=False)
    def _move_in(self, model: nn.Module, weights: BlocksStaying, blocks: Iterable[nn.Module] | None) -> WeightHomes:
        """Move the model's blocks into their homes, and let them stream. Raises as `WeightHomes.move_in`."""
        device = self.registry.devices.open()
        if device is None:
            raise ValueError(
                "weights= moves weights between host and accelerator, and this optimizer has none; build it with "
                "device='cuda'"
            )
        if device.shares_host_memory:
            raise ValueError(
                f"{device} shares the host's memory, so that weights have nowhere to go; leave weights= out"
            )
        if not self.registry.offloaded.enabled:
            raise ValueError(
                "weights= needs offload_gradients=True: gradients of weights that are on the host cannot stay on the "
                "device; build the optimizer with offload_gradients=True"
            )
        self._set_up_device()
        self._bring_home()
        homes = WeightHomes(device, self.registry, weights, self.weights)
        homes.move_in(model, blocks, self.groups, self, self._lock)
        if self._refusal is not None:
            self._refusal.remove()
        return homes

    def weights_ready(self, parameters: Iterable[Tensor], *, wait: bool) -> Sequence[Job] | None:
        """Return the jobs for which the device must wait before it fetches these. wait: as in `Ledger.updates`."""
        # Before the first step, and once the last one was settled, homes have their newest values.
        if not self.ledger.pending:
            return ()
        return self.ledger.updates(self.registry.subgroups_of(parameters), wait=wait)

    def finish_homes(self, parameters: Sequence[Tensor]) -> None:
        """Finish the updates of these parameters, which user code is about to read, where weights stream.

        Blocks for the updates of parameters at home.
        """
        if self.ledger.pending:
            self._finish_homes(parameters)

    @entry(*ANY, hook=True)
    def _finish_homes(self, parameters: Sequence[Tensor]) -> None:
        self.finish_homes_within(parameters)

    def finish_homes_within(self, parameters: Sequence[Tensor]) -> None:
        """Do the same within another call of the optimizer."""
        at_home = [s for s in self.registry.subgroups_of(parameters) if s.arena.streams]
        # User code reads the homes on the host, which the flushes of these jobs write.
        for job in self.ledger.updates(at_home, wait=True) or ():
            job.wait()
        self._join(parameters)

    def relocated(self, places: Mapping[int, Tensor]) -> None:
        """Follow parameters that have got their memory of `places` back, with values of user code. places: by id."""
        for key, place in places.items():
            record = self.registry.records.get(key)
            if record is not None:
                record.relocate(place, written=True)
                self.registry.forget_batches(record)

    def release_homes(self) -> None:
        """Wait until the device reads no weight at home, so that user code may write to them."""
        if self.weights is not None:
            self.weights.stream.release_homes(self.weights.stream.blocks)

    def give_way(self, nbytes: int) -> None:
        """Move state off the device for a block that needs `nbytes` there and cannot allocate them."""
        self._give_way(nbytes)

    def _attach_device(self) -> None:
        """Connect the device and the attachment, if there are both."""
        if self.on_device is not None and self.attachment is not None:
            self.on_device.attached, self.on_device.updates = True, self.in_backward is not None
            if self.weights is not None:
                self.attachment.homes = self.weights.stream.homes
                self.on_device.stream_weights(self.weights)
            self.attachment.surround(self.on_device.activations)

    def _look_for_device(self) -> None:
        """Set the accelerator up if user code has moved parameters there since they were admitted."""
        if self.on_device is None and any(self.registry.devices.holds(p) for p in self.parameters if not is_lazy(p)):
            self._set_up_device()

    def offload_activations(self, amount: Amount) -> AbstractContextManager[None]:
        """Return a context for forwards, which moves `amount` of the saved tensors of each to the host."""
        self._look_for_device()
        if self.on_device is None:
            return contextlib.nullcontext()
        self.on_device.activations.size_pool(amount)
        model = None if self.attachment is None else self.attachment.model
        known = [*self.parameters, *(() if model is None else lasting(model))]
        return Surrounding(self.on_device.activations, amount, known)

    def load(self, state: Mapping[Tensor, Any], groups: list[Group]) -> None:
        """Replace state and groups, both or neither."""
        weights = self.weights if self._replace_state(state, groups) else None
        model = None if weights is None else weights.stream.model
        if weights is not None and model is not None:
            # Homes were in arenas that have gone; and parameters are enrolled block by block there alone.
            self.weights = self._move_in(model, weights.amount, weights.stream.modules)
            self._attach_device()

    @entry(*UNBROKEN)
    def _replace_state(self, state: Mapping[Tensor, Any], groups: list[Group]) -> bool:
        """Do so; return whether the memory of some parameters has to be made anew."""
        self.check_state_whole()
        gone = self.reconciler.lacking_fields(groups)
        if gone:
            self._settle_state(self.parameters)
            lies_in_state = overlap_with(self.registry.state_memory())
            for p in self.parameters:  # the loaded tensors may lie in the arenas that are released below
                copy_live(state.get(p, {}), {}, lies_in_state)
        else:
            self._bring_home()
        self.registry.homes.open()
        with self.guard.change():
            self._forget(gone)
            self.install_state(state)
            for record in self.registry.records.values():
                record.version = -1  # masters follow their parameters in the next step
            self.groups = groups
        return bool(gone)

    def install_state(self, state: Mapping[Tensor, Any]) -> None:
        """Install this state as the optimizer's; user code may keep references to it."""
        self.reconciler.state, self.reconciler.seen = LiveState(state, self.settle_state, self._options.rule.keys), True

    @entry(*UNBROKEN)
    def settle_state(self, read: Collection[Tensor]) -> None:
        """Expose the state before user code changes entries, or reads those of the parameters `read`."""
        self.check_state_whole()
        self._settle_state(read)

    def _settle_state(self, read: Collection[Tensor]) -> None:
        self._bring_home()
        homes, records = self.registry.homes, self.registry.records
        homes.expose(self.registry.subgroups_of(read))
        for record in filter(None, map(self.registry.record, read)) if homes.disk is not None else ():
            homes.show(record.views.values(), [subgroup for subgroup, _ in self.registry.places[record]])
        for record in records.values():
            record.write_step()
        # From now on user code may change entries whenever it likes, so that each step compares them.
        self.reconciler.seen = True


def _leaves(record: ParameterRecord) -> list[Tensor]:
    """Return the tensors that have a gradient of the parameter: itself, and its copy where weights stream."""
    found = [record.leaf] if record.leaf is record.parameter else [record.parameter, record.leaf]
    return [each for each in found if each.grad is not None]
