"""One optimizer's iterations, one after the other: gradients leave, a step is prepared, committed and finished."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dos.activations.offload import ActivationOffload, Amount, Surrounding
from dos.device_side import DeviceSide
from dos.devices import Device
from dos.gradients.clipping import Clipping
from dos.gradients.scaling import AmpScale
from dos.guard import exclusive
from dos.in_flight import InFlight
from dos.lifetime import main_thread_ended
from dos.options import Options
from dos.parameters.active import Active, updates_of
from dos.parameters.admission import Group
from dos.parameters.hooks import Attachment
from dos.parameters.live_state import LiveState
from dos.parameters.loading import makes_state
from dos.parameters.reconciler import Reconciler
from dos.sharding.fingerprint import look_at_bits
from dos.sharding.local import local
from dos.sharding.meshes import Meshes
from dos.stages import Ready, Stage
from dos.state.record import ParameterRecord
from dos.step.work import Placed, apply


class Session(InFlight):
    """What one optimizer does in its iterations. Nothing here refers to the optimizer, which holds this.

    state: the optimizer's entries.
    seen: whether users have had entries of the state, which they may change from then on, whenever they like.
    attachment: the model whose next forward updates run into, if any.
    """

    state: LiveState

    def __init__(self, options: Options, device: Device | torch.device | str | None, meshes: Meshes) -> None:
        super().__init__(options, device, meshes)
        self.seen = False
        self.attachment: Attachment | None = None
        self.clipping = Clipping(self.registry.offloaded, options.max_grad_norm, meshes)
        self._reconciler = Reconciler(self.registry, self.guard, options.state_format)

    @exclusive
    def step(self, groups: list[Group], amp: Callable[[], AmpScale]) -> None:
        """Prepare a step and commit it, or skip it; ends what is in flight if that raises.

        amp: says what unscales the gradients, once ranks have agreed.
        """
        self.guard.check()
        if self.capturing():
            raise RuntimeError(
                "step() was called while a CUDA graph is being captured, whose replays would not decide, count or move "
                "anything; capture forward and backward alone, and call step() after each replay"
            )
        self.groups = groups
        self._end_last_step()
        try:
            self.agree()
            if not self.state and makes_state():
                self._make_state()
                return
            scale = amp()
            if scale.skip:
                self.clipping.forget()
            else:
                self.commit(self.prepare(scale.factor, scale.writes))
            if self.on_device is not None:
                self.on_device.end_iteration(scale.writes, skipped=scale.skip)
        except BaseException:
            with contextlib.suppress(Exception):  # what is raised already is what went wrong first
                self.synchronize()
            raise
        if self.stage is not Stage.COMMITTED:
            self.stage = Stage.IDLE
        if self.attachment is None:
            self._hand_over()
        if self.on_device is not None:
            self.on_device.step_returns()

    def prepare(self, scale: float, writes: int | None) -> Ready:
        """Look into everything that a step needs, and get the memory for it; nothing has changed if this raises.

        scale: unscales gradients. writes: see AmpScale.
        """
        try:
            ready = self._prepare(scale, writes)
        except BaseException:
            self._reconciler.withdraw(self.state)
            raise
        self.stage = Stage.PREPARED
        return ready

    def _prepare(self, scale: float, writes: int | None) -> Ready:
        registry = self.registry
        self._watching.renew(self)
        registry.place_gradients(self.groups)
        departed = [] if self.on_device is None else self.on_device.departures.marked()
        look_at_bits([*registry.marked(), *self.clipping.marked(), *departed])
        active = self._active()
        if self.on_device is not None and main_thread_ended():
            raise RuntimeError(
                "the main thread has ended, after which Python starts no more work in the background, such as this "
                "step's; let the main thread join() the one that trains"
            )
        self._warn_if_idle(active)
        self._take_remaining_gradients(active.members)
        if self.attachment is not None and self.attachment.news:
            registry.order_by_use(self.attachment.first_use)
        plan = None if self.on_device is None else self.on_device.plan_step(attached=self.attachment is not None)
        clipped = [] if self.clipping.max_grad_norm is None else self.with_gradients()
        scales = self.clipping.scales(active.members, clipped, scale)
        updates = updates_of(active, registry, scales)
        room = None
        if self.on_device is not None and plan is not None:
            room = self.on_device.make_room(plan, updates, writes)
        return Ready(active, updates, plan, room)

    def _active(self) -> Active:
        """The records of all parameters with a gradient, fit to be used; what they need is done."""
        settled, others, gone = self._reconciler.look(self.groups, self.state, seen=self.seen)
        if gone:
            # Their arenas go as a whole: what still referred to one could use memory that is no more.
            with self.guard.change():
                self._let_go(gone)
        del gone  # with it goes their memory, which newcomers may need
        self._reconciler.check(others, self.state)
        found = self._enrol(others)
        if self._reconciler.need_home(found, self.state):
            self.bring_home()
        self._reconciler.settle(found, self.groups, self.state)
        return Active(settled + found, len(settled))

    def commit(self, ready: Ready) -> None:
        """Issue a prepared step: everything that a user can have got wrong was checked, and from here on things change.

        What updates parameters on the host in place has ended when this returns, unless an attached model waits for it.
        """
        registry, (active, updates, plan, room) = self.registry, ready
        with self.guard.change():
            # Before there is anything to wait for: an interruption from here on leaves work in flight.
            late = [s for s in registry.local if s in updates and self.attachment is not None and s.sharded]
            now = [s for s in registry.local if s in updates and s not in late]
            behind = {piece.record for subgroup in late for piece in subgroup.pieces}
            updated = (r for r, _ in active.members if r.arena.accelerated or r in behind)
            self.in_flight = dict.fromkeys(updated, frozenset())
            self.stage = Stage.COMMITTED
            self._reconciler.count(active, seen=self.seen)
            if self.on_device is not None and plan is not None and room is not None:
                self.on_device.start(plan, room)
            if registry.offloaded is not None:
                registry.offloaded.clear()
            self._in_place.start(updates[subgroup] for subgroup in late)
            for subgroup in now:
                apply([Placed(updates[subgroup], subgroup.state)])
            registry.written([record for record, _ in active.members if record not in self.in_flight])
            self.clipping.forget()
        if self.attachment is not None:
            covered = self.attachment.covered()
            self.finish_parameters([r.parameter for r in self.in_flight if id(r.parameter) not in covered])

    def _make_state(self) -> None:
        """Give every parameter the state that it has before its first step, and nothing else."""
        self._reconciler.keep_state(self._active())
        self.seen = True

    def gradient_ready(self, parameter: Tensor) -> None:
        """Called by a hook when backward has written to ``parameter.grad``, from several threads perhaps."""
        on_device = self.on_device
        if on_device is not None:
            if on_device.activations.in_use and parameter.grad is not None:
                on_device.device.count(local(parameter.grad))
            if on_device.device.capturing():
                if self.registry.offloaded is not None:
                    parameter.grad = None  # the graph that would compute it will not be
                    raise RuntimeError(
                        "a CUDA graph that captures backward writes gradients where it has found them, and "
                        "offload_gradients=True takes them away; build the optimizer with offload_gradients=False"
                    )
                on_device.replays = True  # what they write is found by step() alone
                return
            record = self.registry.record(parameter)
            if record is not None and on_device.only_counts(record, self._lock):
                return
        self._gradient_ready(parameter)

    @exclusive
    def _gradient_ready(self, parameter: Tensor) -> None:
        if self.registry.offloaded is not None:
            self.registry.offloaded.refuse_second_thread(self.registry.record(parameter))
        self._end_last_step()
        if self.guard.broken or main_thread_ended():
            return  # the step says what is wrong
        if self.on_device is None and not self._accelerates(parameter):
            return
        assert self.on_device is not None, "made for the first parameter on it"
        self.stage = Stage.BACKWARD
        try:
            self.on_device.gradient_came()
            self._send_early(parameter, self.on_device)
        except BaseException:
            self.on_device.abandon()
            raise

    def _send_early(self, parameter: Tensor, on_device: DeviceSide) -> None:
        """Start the parameter's gradient on its way to the host, if it is to go there and is what the step will use."""
        if self.registry.offloaded is not None and self.registry.record(parameter) is None:
            self._enrol([(p, group) for group in self.groups for p in group["params"] if p.requires_grad])
        record = self.registry.record(parameter)
        if record is None or not on_device.leaves_early(record):
            return
        if self.registry.offloaded is None:
            on_device.gradient_ready(record, attached=self.attachment is not None)
        elif parameter.grad is not None:
            with torch.no_grad():
                self._take(record, on_device, in_backward=True)

    @torch.no_grad()
    @exclusive
    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Called by DDP's hook when a bucket has been reduced: what DDP puts with the parameters at backward's end."""
        if self.on_device is None or self.registry.offloaded is not None:
            return
        self._end_last_step()  # a bucket of parameters that took no part comes before any other hook
        if self.guard.broken:
            return  # the step says what is wrong
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = self.registry.record(parameter)
            if record is not None and record.arena.accelerated:
                self.on_device.gradient_ready(record, gradient, attached=self.attachment is not None)

    def forget_gradients(self) -> None:
        """Those that are there are of no use any more."""
        self.clipping.forget()
        if self.registry.offloaded is not None:
            self.registry.offloaded.clear()
        if self.on_device is not None:
            self.on_device.departures.forget()

    def with_gradients(self) -> list[Tensor]:
        """The parameters whose gradients are with them."""
        return [p for group in self.groups for p in group["params"] if p.grad is not None]

    def offload_the_rest(self, groups: list[Group]) -> None:
        """If gradients are offloaded, all of them are from here on; the others are placed as their parameters are."""
        self.groups = groups
        self.agree()
        self.registry.place_gradients(groups)
        if self.registry.offloaded is not None:
            self._end_last_step()
            settled, others, _ = self._reconciler.look(groups, self.state, seen=self.seen)
            self._reconciler.check(others, self.state)
            self._take_remaining_gradients(settled + self._enrol(others))

    def _take_remaining_gradients(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Offload gradients that no hook has seen, so that all of a subgroup are in one place."""
        if self.registry.offloaded is None or self.on_device is None:
            return
        for record, _ in active:
            if record.arena.accelerated and record.parameter.grad is not None:
                self._take(record, self.on_device, in_backward=False)

    def _take(self, record: ParameterRecord, on_device: DeviceSide, *, in_backward: bool) -> None:
        """Offload a gradient: add it to those on the host and free it here."""
        if record.layout_changed():  # to which the gradient is added
            self.bring_home()
            self._reconciler.settle_layout(record, self.state)
        self.clipping.about_to_add(record)
        registry, offloaded = self.registry, self.registry.offloaded
        assert offloaded is not None, "asked only when gradients are offloaded"
        subgroups = [subgroup for subgroup, _ in registry.places[record]]
        index = registry.index[subgroups[0]] if subgroups else 0
        assert record.gradient is not None, "it is taken from there"
        record.arena.stage_gradients_as(record.gradient.dtype)
        if not all(map(registry.host_store.stages, subgroups)):
            on_device.engine.make_room_for_gradients(registry.accelerated)
        offloaded.take(record, subgroups, index, on_device.engine, in_backward=in_backward)

    def attach(self, model: nn.Module, amount: Amount | None) -> None:
        """Let updates run on into the forward of this model. amount: of its saved tensors leave meanwhile."""
        self.synchronize()
        before, self.attachment = self.attachment, None  # until there is another, step() waits for all
        if before is not None:
            before.detach()
        self.attachment = Attachment(model, self)
        offload = self._offload(amount)
        if amount is not None and offload is not None:
            self.attachment.surround(*_around(weakref.ref(offload), amount))

    def offload_activations(self, amount: Amount) -> AbstractContextManager[None]:
        """Surrounds forwards, of each of which so much leaves."""
        offload = self._offload(amount)
        if offload is None:
            return contextlib.nullcontext()
        model = None if self.attachment is None else self.attachment.model
        known = [p for group in self.groups for p in group["params"]]
        return Surrounding(offload, amount, known if model is None else [*known, *_lasting(model)])

    def _offload(self, amount: Amount | None) -> ActivationOffload | None:
        """What moves saved tensors, with memory for the first forward; None with all parameters on the host."""
        if amount is None or self.on_device is None:
            return None
        self.on_device.activations.prepare(amount)
        return self.on_device.activations

    @exclusive
    def load(self, state: Mapping[Tensor, Any], publish: Callable[[], None]) -> None:
        """Have this state, and publish what was loaded with it, both or neither."""
        self.bring_home()
        with self.guard.change():
            self.hold(state)
            self.registry.let_masters_follow()
            publish()

    def hold(self, state: Mapping[Tensor, Any]) -> None:
        """Have this state, which users have, too."""
        self.state, self.seen = LiveState(state, self.settle_state), True

    @exclusive
    def settle_state(self) -> None:
        """User code reads or changes an entry of the state."""
        self.guard.check()
        self.bring_home()
        self.registry.homes.show(self.registry.accelerated)
        self.registry.write_steps()
        self.seen = True

    @exclusive
    def release_memory(self) -> int:
        """Give all device memory that state can leave back at once; its bytes."""
        held = (
            0 if self.on_device is None else self.on_device.engine.stores.device.nbytes
        )  # before slots are given back
        self.synchronize()
        if self.on_device is not None:
            self.on_device.release(held)
        return held


def _around(offload: weakref.ref[ActivationOffload], amount: Amount) -> tuple[Callable[[nn.Module], None], ...]:
    """What begins and ends each forward of an attached model, which may outlive the optimizer."""

    def begin(module: nn.Module) -> None:
        alive = offload()
        if alive is not None:
            alive.begin(module, amount, _lasting(module))

    def end(module: nn.Module) -> None:
        alive = offload()  # it lives as long as hooks of a forward refer to it
        if alive is not None:
            alive.end(module)

    return begin, end


def _lasting(model: nn.Module) -> list[Tensor]:
    """What of a model outlives its forward."""
    return [*model.parameters(), *model.buffers()]
