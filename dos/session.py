"""One optimizer's iterations: a step is prepared, committed and settled, and state is replaced."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dos.devices import Device
from dos.gradients.scaling import UNSCALED, amp_scale
from dos.guard import UNBROKEN, Guard, Phase, entry
from dos.in_backward import InBackward
from dos.options import Options
from dos.owners.assembly import Assembly
from dos.owners.attaching import Attaching
from dos.owners.edits import Edits
from dos.owners.gradients import Gradients
from dos.owners.preparing import Preparing
from dos.owners.runs import Runs
from dos.owners.state import State
from dos.owners.taking import Taking
from dos.owners.waiting import Waiting
from dos.parameters.active import Active, Ready
from dos.parameters.admission import Group
from dos.parameters.hooks import Attachment
from dos.parameters.reconciler import copy_live, live_views
from dos.parameters.registry import Registry, tell_autograd
from dos.parameters.watching import Watching
from dos.sharding.meshes import Meshes
from dos.signals import look_at_all
from dos.state.own_storage import overlap_with
from dos.step.work import Placed, prepare_updates
from dos.torch_internals.callers import makes_state
from perfmodel import Op

logger = logging.getLogger(__name__)


class Session:
    """The iterations of one optimizer, which refers to this. Nothing here refers to the optimizer: no cycle.

    The thread that trains, autograd's threads (hooks of backward, saved tensors) and user code that reads state call
    one optimizer: the guard's lock admits one thread at a time. Each entry point, here and in what this consists of,
    names the phases that it accepts; see the table in docs/architecture.md. Hooks find a session by a weak reference.

    assembly: the parts that all of these share; registry, ledger: of these.
    waiting: waits for updates in flight. state: as user code reads and moves it.
    gradients: as backward writes them. taking: moves them to the host. runs: the backwards that update parameters.
    edits: of gradients by user code, between backward and `step()`.
    attaching: attaches a model.
    skipped: the number of steps skipped because gradients were not finite.
    """

    # A step: `end_last_step` waits for the last step or queues this one behind it; `prepare` checks and reserves
    # everything, or raises with nothing changed; `_commit` changes parameters, state and records. Then `hand_over`
    # orders the caller behind the updates, or hooks of an attached model do, module by module (`finish_parameters`).
    # `settle` waits for all updates, and raises the first failure of any thread.
    def __init__(self, options: Options, device: Device | torch.device | str | None, meshes: Meshes) -> None:
        self.guard = Guard()
        self._lock = self.guard.lock
        watching = Watching(self, takes=bool(options.offload_gradients))
        self.registry = Registry(options, device, self.guard, meshes, watching)
        self.assembly = Assembly(options, self.guard, self.registry, meshes)
        self.ledger = self.assembly.ledger
        self.waiting = Waiting(self.assembly)
        self.state = State(self.assembly, self.waiting)
        self.taking = Taking(self.assembly, self.waiting)
        self.runs = Runs(self.assembly, self.waiting, self.taking)
        self.edits = Edits(self.assembly, self.waiting, self.taking)
        self.attaching = Attaching(self, self.assembly, self.waiting, self.state)
        self._preparing = Preparing(self.assembly, self.taking, self.state, self.attaching.successors)
        self.gradients = Gradients(self.assembly, self.waiting, self.taking, self.runs, self._preparing)
        self.skipped = 0
        # Work in flight ends when the optimizer is collected or the interpreter exits.
        weakref.finalize(self, self.ledger.finish)

    def admit(self, group: Group) -> None:
        """Take one of the groups in. Raises TypeError, ValueError or MemoryError if it cannot be optimised."""
        self.registry.admit(group)
        self.waiting.watch_list(group)
        self.assembly.await_device(group["params"])

    @entry(*UNBROKEN)
    def step(self, found_inf: Any, grad_scale: Tensor | None) -> None:
        """Prepare a step and commit it, or skip it; settle everything in flight if that raises.

        found_inf, grad_scale: set by GradScaler; None without one.
        """
        parts = self.assembly
        if self.waiting.capturing():
            raise RuntimeError(
                "step() was called while a CUDA graph is being captured, whose replays would not decide, count or move "
                "anything; capture forward and backward alone, and call step() after each replay"
            )
        look_at_all()
        mode, whole = parts.in_backward, False
        if mode is not None:
            mode.check_step(parts.groups, scaled=found_inf is not None or grad_scale is not None)
            mode.restore()
            left = [p for p in parts.parameters if p.grad is not None]
            whole = bool(mode.issued) and not (left or self.registry.offloaded.records)
        if not whole:
            # First, because the host may still update from the memory to which this step sends its gradients.
            self.waiting.end_last_step()
        # Not beside a step: it blocks until the device is idle, and meanwhile the CPU lane can queue nothing.
        if parts.on_device is not None:
            self.ledger.stores.device.trim()
        if parts.weights is not None:
            parts.weights.stream.release_all()  # a copy that no module used would be older than the updated weights
        try:
            self.registry.agree(parts.groups)
            if not parts.reconciler.state and makes_state():
                parts.reconciler.keep_state(self._preparing.active())
                return
            amp, offloads = UNSCALED, self.registry.offloaded.enabled
            if found_inf is not None:
                amp = amp_scale(found_inf, grad_scale, self.registry.meshes, offloaded=offloads)
            if parts.on_device is not None:
                parts.on_device.departures.begin_step(amp.writes)
            ready = None if amp.skip or whole else self._preparing.prepare(amp.factor)
            if whole:
                self._move_blocks()
                self._commit_updated()
            elif amp.skip:
                parts.clipping.forget()
            elif ready is None:
                self._skip()
            else:
                self.guard.phase = Phase.PREPARED
                self._commit(ready)
            if parts.on_device is not None:
                parts.on_device.end(skipped=ready is None and not whole)
            self.guard.phase = Phase.IDLE
            # Hooks of an attached model order the caller, while updates run on into the forward.
            if parts.attachment is None or not self.ledger.running:
                self.waiting.hand_over()
                if parts.on_device is not None:
                    self.ledger.stores.device.trim()
            elif self.waiting.edited or (parts.on_device is not None and parts.on_device.wants_clean_forward):
                self.waiting.settle()
            self.waiting.wait_before_reads()
        except BaseException:
            parts.reconciler.withdraw()
            with contextlib.suppress(Exception):  # the error that is raised already came first
                self.waiting.settle()
            raise
        if not (whole or self.registry.offloaded.enabled):
            self.registry.renew_hooks()
        if mode is not None:
            mode.finish(parts.parameters)
        if parts.on_device is not None:
            # The caller continues with the next forward: another iteration begins.
            if parts.on_device.activations.in_use:
                parts.on_device.activations.follow_plan(parts.on_device.decisions.plan)
            parts.on_device.begin()

    def _skip(self) -> None:
        """Skip a step whose gradients are not finite, which is prepared in part. Gradients on the host are used up."""
        self.skipped += 1
        logger.warning(
            "step skipped, as skip_nonfinite=True asks: the norm of its gradients is not finite; skipped so far: %d",
            self.skipped,
        )
        self.assembly.reconciler.withdraw()
        self.assembly.clipping.forget()
        self.registry.offloaded.forget_all()

    def _commit(self, ready: Ready) -> None:
        """Issue a prepared step. Everything that a user can have got wrong was checked; from here on values change.

        In-place updates of parameters on the host have ended when this returns, unless an attached model waits for
        them.
        """
        parts, registry, (active, updates, prepared) = self.assembly, self.registry, ready
        with self.guard.change():
            self.guard.steps += 1
            here = [s for s in registry.on_host if s in updates]
            late = [s for s in here if s.sharded] if here and parts.attachment is not None else []
            behind = {piece.record for subgroup in late for piece in subgroup.pieces} if late else ()
            if here or active.given is None:
                updated = [r for r, _ in active.members if r.arena.accelerated or r in behind]
            else:
                updated = active.given.steady.records
            self.ledger.pending = dict.fromkeys(updated, frozenset())
            if parts.on_device is not None and prepared is not None:
                parts.on_device.issue(prepared)
            if parts.attachment is not None:
                self.waiting.watch_edits()
            parts.reconciler.count(active)
            if parts.in_backward is not None:
                self._count_updated(parts.in_backward)
            if registry.offloaded.enabled:
                registry.offloaded.forget_all(used=True)
            if here:
                self.ledger.in_place.update(updates[subgroup] for subgroup in late)
                for subgroup in here:
                    if subgroup not in late:
                        prepare_updates([Placed(updates[subgroup], subgroup.state)])()
                registry.written([record for record, _ in active.members if record not in self.ledger.pending])
            # Else the factors would apply in the next step if user code uses the same gradients again.
            parts.clipping.forget()
        if parts.attachment is not None:
            self._join_uncovered(parts.attachment)

    def _move_blocks(self) -> None:
        """Move blocks as the plan says in a step that backward has issued, which has moved none."""
        weights, mode = self.assembly.weights, self.assembly.in_backward
        planned = None if mode is None else mode.planned
        if weights is not None and planned is not None and self._preparing.may_follow(weights, *planned):
            self.waiting.settle()  # updates read and write homes
            self._preparing.follow_plan(weights, *planned)

    def _commit_updated(self) -> None:
        """Count a step of which backward has issued everything."""
        parts = self.assembly
        with self.guard.change():
            self.guard.steps += 1
            if parts.in_backward is not None:
                self._count_updated(parts.in_backward)
            on_device = parts.on_device
            if on_device is not None and on_device.now.workload is not None and self.ledger.step is not None:
                plan = None if parts.in_backward is None else parts.in_backward.plan
                assert plan is not None, "its step is in flight"
                on_device.decisions.memory.enter(Op.UPDATE)
                on_device.end_updates(plan)
            self.ledger.close()
            self.registry.offloaded.forget_all(used=True)
            parts.clipping.forget()
        if parts.attachment is not None:
            self._join_uncovered(parts.attachment)

    def _count_updated(self, mode: InBackward) -> None:
        """Count this step of the parameters that backward has updated."""
        if mode.complete:
            self.assembly.reconciler.count(Active(mode.complete, len(mode.complete)))

    def _join_uncovered(self, attachment: Attachment) -> None:
        """Order the caller behind the updates of parameters for which no hook of the attached model will wait."""
        tell_autograd(self.ledger.unfinished)  # at once: backward of an older graph may run no hook that waits
        covered = attachment.covered()
        # All readers of weights that stream wait for them: their block, or user code.
        pending = [p for r in self.ledger.pending if id(p := r.parameter) not in covered and not r.arena.streams]
        self.waiting.join(pending)

    def load(self, state: Mapping[Tensor, Any], groups: list[Group]) -> None:
        """Replace state and groups, both or neither."""
        if self._replace_state(state, groups):
            self.attaching.move_in_again()

    @entry(*UNBROKEN)
    def _replace_state(self, state: Mapping[Tensor, Any], groups: list[Group]) -> bool:
        """Do so; return whether the memory of some parameters has to be made anew."""
        parts = self.assembly
        self.state.check_whole()
        gone, views = parts.reconciler.lacking_fields(groups), list[Tensor]()
        if gone:
            self.state.settle_within(parts.parameters)
            lies_in_state = overlap_with(self.registry.state_memory())
            for p in parts.parameters:  # the loaded tensors may lie in the arenas that are released below
                copy_live(state.get(p, {}), {}, lies_in_state)
        else:
            self.state.bring_home_within()
            views = live_views(state, overlap_with(self.registry.state_memory()))
        self.registry.homes.open()
        # User code may write to tensors that it has loaded until the next step.
        self.registry.homes.exposed.update(self.registry.subgroups_of(views))
        with self.guard.change():
            parts.forget(gone)
            self.state.install(state)
            for record in self.registry.records.values():
                record.version = -1  # masters follow their parameters in the next step
            parts.groups = groups
        return bool(gone)
