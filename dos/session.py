"""One optimizer's iterations, one after the other: gradients leave, a step is prepared, committed and finished."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dos.activations.offload import Amount, Surrounding
from dos.device_side import DeviceSide
from dos.devices import Device
from dos.gradients.clipping import Clipping
from dos.gradients.scaling import amp_scale
from dos.guard import Guard, exclusive
from dos.in_flight import SessionBase
from dos.lifetime import main_thread_ended
from dos.options import Options
from dos.parameters.active import Active, Ready, updates_of
from dos.parameters.admission import Group
from dos.parameters.hooks import Attachment, lasting
from dos.parameters.live_state import LiveState
from dos.parameters.loading import makes_state
from dos.parameters.reconciler import Reconciler, copy_views
from dos.parameters.registry import Registry, tell_autograd
from dos.parameters.watching import Watching
from dos.planning.decisions import Decisions
from dos.sharding.fingerprint import look_at_bits
from dos.sharding.local import local
from dos.sharding.meshes import Meshes
from dos.state.record import ParameterRecord
from dos.step.work import Placed, prepare_updates
from dos.warn import warn

logger = logging.getLogger(__name__)


class Session(SessionBase):
    """What one optimizer does in its iterations. Nothing here refers to the optimizer, which holds this.

    groups: the optimizer's.
    attachment: the model whose next forward updates run into, if any.
    """

    def __init__(self, options: Options, device: Device | torch.device | str | None, meshes: Meshes) -> None:
        guard = Guard()
        watching = Watching(self, takes=bool(options.offload_gradients))
        super().__init__(Registry(options, device, guard, meshes, watching), guard)
        self.groups: list[Group] = []
        self.attachment: Attachment | None = None
        self.clipping = Clipping(self.registry.offloaded, options.max_grad_norm, meshes)
        self.reconciler = Reconciler(self.registry, guard, options.state_format)
        self._options = options
        self._warned_idle = False

    def admit(self, group: Group) -> None:
        """Take in one of the groups. Raises TypeError, ValueError or MemoryError for one that cannot be optimised."""
        self.registry.admit(group)
        self._set_up_device()

    def _set_up_device(self) -> None:
        """Set the accelerator up when the first parameter there was met."""
        found = self.registry.devices.found
        if self.on_device is None and found is not None:
            policy = self._options.policy_on(found)
            if found.shares_host_memory and self._options.never_leaves(found):
                logger.info(
                    "%s shares the host's memory: all optimizer state stays there, as with policy='resident'",
                    found,
                )
            self.on_device = DeviceSide(found, self.registry, policy, self._options, self.guard)
            self._attach_device()
            # Work in flight ends when the optimizer is collected or the interpreter exits.
            weakref.finalize(self, self.on_device.engine.finish)

    @property
    def decisions(self) -> Decisions | None:
        """What is decided for the device; None without one."""
        return None if self.on_device is None else self.on_device.decisions

    @property
    def parameters(self) -> Iterator[Tensor]:
        """Those of all groups."""
        return (p for group in self.groups for p in group["params"])

    @exclusive
    def step(self, found_inf: Any, grad_scale: Tensor | None) -> None:
        """Prepare a step and commit it, or skip it; ends what is in flight if that raises.

        found_inf, grad_scale: what GradScaler has set; None without one.
        """
        self.guard.check()
        if self.capturing():
            raise RuntimeError(
                "step() was called while a CUDA graph is being captured, whose replays would not decide, count or move "
                "anything; capture forward and backward alone, and call step() after each replay"
            )
        self._end_last_step()
        try:
            self.registry.agree(self.groups)
            if not self.reconciler.state and makes_state():
                self.reconciler.keep_state(self._active())
                return
            amp = amp_scale(found_inf, grad_scale, self.registry.meshes, offloaded=self.registry.offloaded.enabled)
            if self.on_device is not None:
                self.on_device.departures.writes = amp.writes
            if amp.skip:
                self.clipping.forget()
            else:
                self.commit(self.prepare(amp.factor))
            if self.on_device is not None:
                self.on_device.end_iteration(skipped=amp.skip)
        except BaseException:
            self.reconciler.withdraw()
            with contextlib.suppress(Exception):  # what is raised already is what went wrong first
                self.synchronize()
            raise
        if self.attachment is None:
            self._hand_over()
        if self.on_device is not None:
            self.on_device.step_returns()

    def prepare(self, scale: float) -> Ready:
        """Look into everything that a step needs, and get the memory for it.

        No parameter and no value of the state has changed if this raises. scale: unscales gradients.
        """
        registry = self.registry
        registry.watching.renew()
        registry.place_gradients(self.groups)
        departed = [] if self.on_device is None else self.on_device.departures.marked()
        look_at_bits([*registry.marked(), *self.clipping.marked(), *departed])
        active = self._active()
        if self.on_device is not None and main_thread_ended():
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
        self._take_remaining_gradients(active.members)
        order = None if self.attachment is None else self.attachment.take_new_order()
        if order is not None:
            registry.order_by_use(order)
        plan = None if self.on_device is None else self.on_device.plan_step()
        updates = updates_of(active, registry, self.clipping.scales(active.members, self.parameters, scale))
        if self.on_device is None or plan is None:
            return Ready(active, updates, None)
        return Ready(active, updates, (plan, self.on_device.prepare(plan, updates)))

    def _active(self) -> Active:
        """Enrol, bring home and settle all parameters that have a gradient, as they need it; their records."""
        settled, others, gone = self.reconciler.look(self.groups)
        self._let_go(gone)
        del gone  # with it goes their memory, which newcomers may need
        found = self._enrol(others)
        if self.reconciler.need_home(found):
            self.bring_home()
        self.reconciler.settle(found, self.groups)
        return Active(settled + found, len(settled))

    def _let_go(self, gone: Sequence[ParameterRecord]) -> None:
        """Forget these records, which are all of their arenas: what still referred to one could use freed memory."""
        if gone:
            with self.guard.change():
                if self.on_device is not None:
                    self.on_device.let_go(gone)
                self.registry.forget(gone, self.parameters)

    def _enrol(self, members: Sequence[tuple[Tensor, Group]]) -> list[tuple[ParameterRecord, Group]]:
        """The records of these parameters with their groups, in which new ones get room. Raises MemoryError."""
        self.registry.enrol(members)
        self._set_up_device()
        return [(self.registry.records[id(p)], group) for p, group in members]

    def commit(self, ready: Ready) -> None:
        """Issue a prepared step: everything that a user can have got wrong was checked, and from here on things change.

        What updates parameters on the host in place has ended when this returns, unless an attached model waits for it.
        """
        registry, (active, updates, prepared) = self.registry, ready
        with self.guard.change():
            # Before there is anything to wait for: an interruption from here on leaves work in flight.
            late = [s for s in registry.on_host if s in updates and self.attachment is not None and s.sharded]
            now = [s for s in registry.on_host if s in updates and s not in late]
            behind = {piece.record for subgroup in late for piece in subgroup.pieces}
            updated = (r for r, _ in active.members if r.arena.accelerated or r in behind)
            self.in_flight = dict.fromkeys(updated, frozenset())
            self.committed = True
            self.reconciler.count(active)
            if self.on_device is not None and prepared is not None:
                self.on_device.start(*prepared)
            registry.offloaded.clear()
            self._in_place.start(updates[subgroup] for subgroup in late)
            for subgroup in now:
                prepare_updates([Placed(updates[subgroup], subgroup.state)])()
            registry.written([record for record, _ in active.members if record not in self.in_flight])
            self.clipping.forget()
        if self.attachment is not None:
            tell_autograd(self.in_flight)  # at once, for a graph from before may not come to a hook that waits
            covered = self.attachment.covered()
            self.finish_parameters([r.parameter for r in self.in_flight if id(r.parameter) not in covered])

    def gradient_ready(self, parameter: Tensor) -> None:
        """Called by a hook when backward has written to ``parameter.grad``, from several threads perhaps."""
        on_device = self.on_device
        if on_device is not None:
            if on_device.activations.in_use and parameter.grad is not None:
                on_device.device.count(local(parameter.grad))
            if on_device.device.capturing():
                if self.registry.offloaded.enabled:
                    parameter.grad = None  # the graph that would compute it will not be
                    raise RuntimeError(
                        "a CUDA graph that captures backward writes gradients where it has found them, and "
                        "offload_gradients=True takes them away; build the optimizer with offload_gradients=False"
                    )
                on_device.replays = True  # what they write is found by step() alone
                return
            record = self.registry.record(parameter)
            if record is not None and on_device.only_counts(record):
                return
        self._gradient_ready(parameter)

    @exclusive
    def _gradient_ready(self, parameter: Tensor) -> None:
        if self.registry.offloaded.enabled:
            self.registry.offloaded.refuse_second_thread(self.registry.record(parameter))
        self._end_last_step()
        if self.guard.broken or main_thread_ended():
            return  # the step says what is wrong
        if self.on_device is None and self.registry.devices.holds(parameter):
            self._set_up_device()
        if self.on_device is None:
            return
        try:
            self.on_device.count_gradient()
            self._send_early(parameter, self.on_device)
        except BaseException:
            self.on_device.abandon()
            raise

    def _send_early(self, parameter: Tensor, on_device: DeviceSide) -> None:
        """Start the parameter's gradient on its way to the host, if it is to go there and is what the step will use."""
        if self.registry.offloaded.enabled and self.registry.record(parameter) is None:
            self._enrol([(p, group) for group in self.groups for p in group["params"] if p.requires_grad])
        record = self.registry.record(parameter)
        if record is None or not on_device.leaves_early(record):
            return
        if not self.registry.offloaded.enabled:
            on_device.send_when_complete(record)
        elif parameter.grad is not None:
            with torch.no_grad():
                self._take(record, on_device, in_backward=True)

    @torch.no_grad()
    @exclusive
    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Called by DDP's hook when a bucket has been reduced: what DDP puts with the parameters at backward's end."""
        if self.on_device is None or self.registry.offloaded.enabled:
            return
        self._end_last_step()  # a bucket of parameters that took no part comes before any other hook
        if self.guard.broken:
            return  # the step says what is wrong
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = self.registry.record(parameter)
            if record is not None and record.arena.accelerated:
                self.on_device.send_when_complete(record, gradient)

    def forget_gradients(self) -> None:
        """Those that are there are of no use any more."""
        self.clipping.forget()
        self.registry.offloaded.clear()
        if self.on_device is not None:
            self.on_device.departures.forget()

    def _offload_the_rest(self) -> None:
        """If gradients are offloaded, all of them are from here on; the others are placed as their parameters are."""
        self.registry.agree(self.groups)
        self.registry.place_gradients(self.groups)
        if self.registry.offloaded.enabled:
            self._end_last_step()
            settled, others, _ = self.reconciler.look(self.groups)
            self._take_remaining_gradients(settled + self._enrol(others))

    def _take_remaining_gradients(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Offload gradients that no hook has seen, so that all of a subgroup are in one place."""
        if not self.registry.offloaded.enabled or self.on_device is None:
            return
        for record, _ in active:
            if record.arena.accelerated and record.parameter.grad is not None:
                self._take(record, self.on_device, in_backward=False)

    def _take(self, record: ParameterRecord, on_device: DeviceSide, *, in_backward: bool) -> None:
        """Offload a gradient: add it to those on the host and free it here."""
        self.clipping.about_to_add(record)
        subgroups = [subgroup for subgroup, _ in self.registry.places[record]]
        index = self.registry.index[subgroups[0]] if subgroups else 0
        assert record.gradient is not None, "it is taken from there"
        record.arena.stage_gradients_as(record.gradient.dtype)
        if not (in_backward and record.sharded) and not all(map(self.registry.host_store.stages, subgroups)):
            on_device.engine.spill_to_disk(self.registry.accelerated)
        self.registry.offloaded.take(record, subgroups, index, on_device.engine, in_backward=in_backward)

    @torch.no_grad()
    @exclusive
    def clip(self, max_norm: float) -> Tensor:
        """Let the next step clip the global 2-norm of all gradients; the norm before."""
        self._offload_the_rest()
        return self.clipping.clip([*self.parameters], max_norm)

    @torch.no_grad()
    @exclusive
    def norm(self) -> Tensor:
        """The global 2-norm of all gradients as the next step will use them."""
        self._offload_the_rest()
        return self.clipping.norm(self.parameters)

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether a gradient of any of these is on the host."""
        return bool(self.registry.offloaded.gradients(set(map(id, parameters))))

    def may_have_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether that may be so on some rank."""
        divided = self.registry.meshes and self.on_device is not None and self.registry.offloaded.enabled
        return bool(self._own(parameters)) if divided else self.has_offloaded(parameters)

    @exclusive
    def offloaded_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Called by torch's clipping: the norm of their gradients on the host, once all are there."""
        self._offload_the_rest()
        return self.clipping.norm_away(parameters, norm_type)

    @exclusive
    def fold_offloaded(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Called by torch's clipping: multiply their gradients on the host by the factor in the next step."""
        self.clipping.fold_away(parameters, factor)

    @torch.no_grad()
    @exclusive
    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Called by torch's clipping after ``dos.fold_clipping()``; returns those of them that are this optimizer's."""
        own = self._own(parameters)
        self.clipping.fold(own, factor)
        return own

    def _own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        known = set(map(id, self.parameters))
        return [p for p in parameters if id(p) in known]

    def attach(self, model: nn.Module, amount: Amount | None) -> None:
        """Let updates run on into the forward of this model. amount: of its saved tensors leave meanwhile."""
        self.synchronize()
        self._look_for_device()
        before, self.attachment = self.attachment, Attachment(model, self, amount)
        if before is not None:
            before.detach()
        self._attach_device()

    def _attach_device(self) -> None:
        """Let the device know of the attachment, if there are both."""
        if self.on_device is not None and self.attachment is not None:
            self.on_device.attached = True
            self.attachment.surround(self.on_device.activations)

    def _look_for_device(self) -> None:
        """Parameters may have been moved there since they were admitted."""
        if self.on_device is None and any(self.registry.devices.holds(p) for p in self.parameters if not is_lazy(p)):
            self._set_up_device()

    def offload_activations(self, amount: Amount) -> AbstractContextManager[None]:
        """Surrounds forwards, of each of which so much leaves: nothing with all parameters on the host."""
        self._look_for_device()
        if self.on_device is None:
            return contextlib.nullcontext()
        self.on_device.activations.prepare(amount)
        model = None if self.attachment is None else self.attachment.model
        known = [*self.parameters, *(() if model is None else lasting(model))]
        return Surrounding(self.on_device.activations, amount, known)

    @exclusive
    def load(self, state: Mapping[Tensor, Any], groups: list[Group]) -> None:
        """Have this state and these groups, both or neither."""
        gone = self.reconciler.without_room(groups)
        if gone:
            self.settle_state([*self.parameters])
            for p in self.parameters:  # what is loaded may be views of what goes
                copy_views(state.get(p, {}), {})
        else:
            self.bring_home()
        with self.guard.change():
            self._let_go(gone)
            self.install_state(state)
            for record in self.registry.records.values():
                record.version = -1  # masters follow their parameters in the next step
            self.groups = groups

    def install_state(self, state: Mapping[Tensor, Any]) -> None:
        """Make this the optimizer's state; user code may keep references to it."""
        self.reconciler.state, self.reconciler.seen = LiveState(state, self.settle_state), True

    @exclusive
    def settle_state(self, read: Collection[Tensor]) -> None:
        """User code reads entries of the state, those of these parameters, or changes some."""
        self.guard.check()
        self.bring_home()
        self.registry.homes.show(self.registry.subgroups_of(read))
        for record in self.registry.records.values():
            record.write_step()
        self.reconciler.seen = True

    @exclusive
    def release_memory(self) -> int:
        """Give all device memory that state can leave back at once; its bytes."""
        # Slots, which the step gives back when it ends, count.
        held = 0 if self.on_device is None else self.on_device.engine.stores.device.nbytes
        self.synchronize()
        if self.on_device is not None:
            self.on_device.release(held)
        return held
