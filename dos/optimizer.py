"""DOSAdam: AdamW whose state is where it is cheapest. A shell; the work is done in the modules it imports."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dos.accelerator import Accelerator
from dos.deciding.controller import Policy, resolve_policy
from dos.devices import Caller, Device, DeviceFinder
from dos.gradients.clipping import Clipping
from dos.gradients.scaling import AmpScale, amp_scale
from dos.gradients.torch_clipping import watch_clipping
from dos.guard import Guard, exclusive
from dos.lifetime import over
from dos.options import Options, check_settings
from dos.parameters.admission import Group
from dos.parameters.hooks import Attachment, Hooks, check_model, hook_again, taker, watch_gradient
from dos.parameters.live_state import Entries, LiveState
from dos.parameters.loading import load_state_dict, loads_full_state, makes_state, to_be_filled
from dos.parameters.registry import Active, Registry
from dos.sharding.ddp import CommHook, watch_buckets
from dos.sharding.fingerprint import look_at_bits
from dos.sharding.local import is_sharded, same_layout
from dos.sharding.meshes import Meshes
from dos.state.entries import adamw_form
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.in_place import InPlace
from dos.step.room import Prepared
from dos.step.work import SubgroupUpdate
from perfmodel import Op, Plan, Timeline
from perfmodel.hardware import HardwareProfile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NOT_ACCELERATED = "no step has updated parameters on an accelerator; those on the host are updated there, in place"

_NOT_ENDED = "no step has ended yet; one that runs on after step() ends in the next backward, or at synchronize()"


class DOSAdam(Optimizer):
    r"""AdamW (Loshchilov and Hutter, ICLR 2019) with optimizer state on the host or the accelerator, whichever pays.

    Called as ``torch.optim.AdamW`` is, with the same results to a few units in the last place, whatever ``policy``,
    ``subgroup_size`` and number of threads: those change no bit.

    Args:
        params: iterable of parameters, of (name, parameter) pairs or of dicts defining groups; float32, bfloat16 or
            float16, on the host or on one accelerator.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in AdamW.
        foreach, fused: accepted and ignored; they choose between AdamW's implementations.
        capturable, differentiable: must be False.
        policy: where subgroups are updated. ``"adaptive"``: as the performance model finds best for the device memory
            that is free in each iteration; what is measured corrects it. ``"cpu"``: all on the host, as ZeRO-Offload
            does. ``"resident"``: all on the accelerator, as AdamW does; state never leaves, takes no host memory, and
            reading it gives tensors there. A number in [0, 1]: that share on the host, the rest resident, as
            Twin-Flow does. ``"stride:k"``: every k-th subgroup is streamed through the accelerator, as the paper *Deep
            Optimizer States* does. Or a callable from ``perfmodel.Workload`` to ``perfmodel.Plan``.
        subgroup_size: parameters updated as one unit. Large tensors are split, small ones share a subgroup. None: by
            the size of the model and of the device's memory (``perfmodel.subgroups.automatic_subgroup_size``).
        profile: the machine's rates for ``"adaptive"``: a ``perfmodel.hardware.HardwareProfile``, a file that
            ``python -m dos.calibrate`` wrote, or the name of a built-in profile. None: what calibration has left for
            this machine, else a rough measurement of two seconds at the first step.
        max_grad_norm: clip the gradients' global 2-norm to this in each step, as ``torch.nn.utils.clip_grad_norm_``
            followed by the step would; the gradients themselves stay as they are. None: no clipping.
        master_weights: update bfloat16 and float16 parameters in float32, and keep what they cannot hold of that.
        state_format: how state is kept. None or ``"split"``: in the least bytes that change no bit; of a bfloat16
            parameter, which is its float32 master's upper half, 16 bits more are kept. ``"float32"``: all masters
            whole, with the same result. ``"int8"``: ``exp_avg`` and ``exp_avg_sq`` in 8 bits each, with other results
            than AdamW's (docs/formats.md has the evidence), of parameters of at least 4,096 elements that are whole
            blocks of 128.
        offload_gradients: free each gradient on the accelerator once it is on the host, during backward, and add up
            those of further micro-batches there in float32. ``p.grad`` is then None, each ``step()`` uses the gradients
            up, and what needs them goes through ``zero_grad``, ``grad_norm`` and ``clip_grad_norm_`` of this class, or
            ``torch.nn.utils.clip_grad_norm_``. Not with GradScaler, which cannot see them.
        memory_budget: device memory for optimizer state. None: what is free, at the peak of the iteration and while
            updating, as NVML and the caching allocator say, less 2% of the device. An int caps it to so many bytes, a
            float to that share of the device's memory. A function is called at each iteration and replaces all that:
            it gives the bytes, and they are the caller's responsibility.
        memory_interval: seconds between samples of free memory by a thread, for memory that others take and free again
            within an iteration. None: samples in backward and around the update alone.
        decoupled_weight_decay: False gives Adam with L2 regularisation.
        device: the accelerator on which the parameters are. None: the CUDA device of the parameters, if any. Pass a
            ``dos.EmulatedDevice`` to try the engine without an accelerator.
        process_groups: process groups over which the job is divided beside the meshes of its DTensors, such as the
            stages of a pipeline: the gradients' norm, and GradScaler's infinite gradients, are those of all. Copies and
            pickles do not have them.

    Raises:
        ValueError: a setting out of range, an unknown policy, duplicate parameters, parameters on several
            accelerators, capturable or differentiable.
        TypeError: a parameter of another dtype or layout.
        RuntimeError: from ``step()``: sparse gradients, or parameters moved or converted after their first step.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() leaves unscaling and skipping to us

    _accelerator: Accelerator | None
    _watched: dict[Tensor, Hooks]
    _coming: dict[int, set[int]]
    _attachment: Attachment | None
    _unfinished: dict[ParameterRecord, None]
    _joined: dict[ParameterRecord, set[Caller]]
    _in_flight: bool
    _process_groups: Sequence[ProcessGroup] = ()
    _state: Entries
    _seen: bool
    _clipping: Clipping

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: str | float | Policy = "adaptive",
        subgroup_size: int | None = None,
        profile: HardwareProfile | str | Path | None = None,
        max_grad_norm: float | None = None,
        master_weights: bool = True,
        state_format: str | None = None,
        offload_gradients: bool = False,
        memory_budget: int | float | Callable[[], int] | None = None,
        memory_interval: float | None = None,
        decoupled_weight_decay: bool = True,
        device: Device | torch.device | str | None = None,
        process_groups: Sequence[ProcessGroup] = (),
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params: expected parameters, found a model, {type(params).__name__}; pass its parameters()"
            )
        check_settings(defaults, "DOSAdam", state_format)
        options = Options(
            policy=policy,
            subgroup_size=subgroup_size,
            profile=profile,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            state_format=state_format,
            offload_gradients=offload_gradients,
            memory_budget=memory_budget,
            memory_interval=memory_interval,
        )
        self._process_groups = tuple(process_groups)
        self._set_up(options, device)
        super().__init__(params, defaults)
        self._seen = False  # only torch's constructor has

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        closure: reevaluates the model and returns the loss, as in AdamW.
        Raises RuntimeError or ValueError, before anything is changed, for a gradient, parameter or state that cannot
        be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @exclusive
    def _step(self) -> None:
        self._guard.check()
        self._end_last_step()
        try:
            self._agree()
            if not self._state and makes_state():
                self._make_state()
                return
            self._issue(amp_scale(self, self._meshes, offloaded=self._registry.offloaded is not None))
        except BaseException:
            with contextlib.suppress(Exception):  # what is raised already is what went wrong first
                self.synchronize()
            raise
        if self._attachment is None:
            self._hand_over()
        if self._accelerator is not None:
            self._accelerator.step_returns()

    def _hand_over(self) -> None:
        """Let the caller have all parameters: what it queues on the device comes after the update there.

        The host waits for its own updates, and where memory must be back. What fails later is raised by the next call.
        """
        if self._accelerator is None or not self._accelerator.device.queues:
            self.synchronize()
            return
        try:
            self._accelerator.order_caller()
        except Exception:
            with contextlib.suppress(Exception):  # what is raised already says that the step failed
                self.synchronize()
            raise
        self._registry.written(self._unfinished)
        self._unfinished, self._joined = {}, {}

    def _end_last_step(self) -> None:
        """Wait for the last step before another begins, unless all of it is queued on the device before that."""
        if self._in_flight and self._accelerator is not None and self._accelerator.set_aside():
            self._in_flight = False
        elif self._in_flight:
            self.synchronize()

    def _make_state(self) -> None:
        """Give every parameter the state that it has before its first step, and nothing else."""
        registry = self._registry
        registry.active(self.param_groups, self._state, self._bring_home, self._let_go, seen=self._seen)
        self._meet_newcomers()
        registry.keep_beginners()
        self._seen = True

    def _issue(self, amp: AmpScale) -> None:
        """Issue the step, or skip it."""
        if amp.skip:
            self._clipping.forget()
        else:
            self._update(amp.factor, amp.writes)
        self._coming.clear()
        if self._accelerator is not None:
            self._accelerator.end_iteration(amp.writes, skipped=amp.skip)

    def _update(self, scale: float, writes: int | None) -> None:
        """Issue the update of all parameters that have a gradient. scale: unscales gradients; writes: see AmpScale."""
        registry = self._registry
        try:
            active, updates, plan, room = self._prepare(scale, writes)
        except BaseException:
            registry.withdraw(self._state)
            raise
        accelerator = self._accelerator  # made when the first parameter on it was met

        def apply() -> None:
            # Before there is anything to wait for: an interruption from here on leaves work in flight.
            late = [s for s in registry.local if s in updates and self._attachment is not None and s.sharded]
            now = [s for s in registry.local if s in updates and s not in late]
            behind = {piece.record for subgroup in late for piece in subgroup.pieces}
            self._unfinished = {r: None for r, _ in active.members if r.arena.accelerated or r in behind}
            self._in_flight = True
            registry.count(active, seen=self._seen)
            if accelerator is not None and plan is not None and room is not None:
                accelerator.start(plan, room)
            if registry.offloaded is not None:
                registry.offloaded.clear()
            self._in_place.start(updates[subgroup] for subgroup in late)
            self._in_place.run(updates[subgroup] for subgroup in now)
            registry.written([record for record, _ in active.members if record not in self._unfinished])
            self._clipping.forget()

        # Everything that a user can have got wrong has been checked; from here on things change.
        self._guard.change(apply)
        if self._attachment is not None:
            covered = self._attachment.covered()
            self.finish_parameters([r.parameter for r in self._unfinished if id(r.parameter) not in covered])

    def _prepare(
        self, scale: float, writes: int | None
    ) -> tuple[Active, dict[Subgroup, SubgroupUpdate], Plan | None, Prepared | None]:
        """Look into everything that the step needs, and get the memory for it; nothing has changed if this raises."""
        registry = self._registry
        hook_again(self._watched)
        if registry.offloaded is not None:
            self._take_over()
        registry.place_gradients(self.param_groups)
        departures = [] if self._accelerator is None else [self._accelerator.departures]
        look_at_bits([registry, self._clipping.pending, *departures])
        active = registry.active(self.param_groups, self._state, self._bring_home, self._let_go, seen=self._seen)
        self._meet_newcomers()
        accelerator = self._accelerator
        if accelerator is not None and over():
            raise RuntimeError(
                "the main thread has ended, after which Python starts no more work in the background, such as this "
                "step's; let the main thread join() the one that trains"
            )
        self._warn_if_idle(active.members)
        self._take_remaining_gradients(active.members)
        if self._attachment is not None and self._attachment.news:
            registry.order_by_use(self._attachment.first_use)
        plan = None
        if accelerator is not None:
            accelerator.memory.enter(Op.UPDATE)
            plan = accelerator.decide(attached=self._attachment is not None)
        updates = registry.updates(active, self._clipping.scales(active.members, self._with_gradients, scale))
        if accelerator is None or plan is None:
            return active, updates, None, None
        return active, updates, plan, accelerator.make_room(plan, updates, writes)

    @exclusive
    def synchronize(self) -> None:
        """Block until the last step is complete: all parameters and all state are what they will be.

        Needed only after ``attach``, before reading or writing parameters by hand.
        Raises RuntimeError if a transfer or an update failed, with its cause. Ctrl-C takes effect when all is
        complete, unless it comes twice.
        """
        try:
            self._finish()
        except KeyboardInterrupt:
            self._finish()
            raise

    def _finish(self) -> None:
        try:
            if self._accelerator is not None:
                self._accelerator.wait()
            self._in_place.wait()
            self._registry.written(self._unfinished)
        except Exception:
            self._unfinished, self._joined, self._in_flight = {}, {}, False
            raise
        # Not before: an interrupted wait must be made up for.
        self._unfinished, self._joined, self._in_flight = {}, {}, False

    def attach(self, model: nn.Module) -> None:
        """Let updates run on into the next forward of ``model``: ``step()`` returns while the host still works.

        Each module waits for its own parameters just before it runs, in training; ``step()`` itself waits for those
        whose module was never seen to run. Compiled modules wait once, at their top. Evaluation, saving, loading,
        copying and pickling of the model wait for everything. Call ``synchronize()`` before touching parameters or
        gradients in any other way after ``step()``, such as ``model.to()``, and before a CUDA graph is captured.
        Subgroups are updated in the order of first use as observed. Attaching another model replaces the first. A model
        that is compiled is attached afterwards.
        Raises TypeError for anything but a model, ValueError for one that has none of the optimizer's parameters.
        """
        check_model(model, (p for group in self.param_groups for p in group["params"]))
        self.synchronize()
        before, self._attachment = self._attachment, None  # until there is another, step() waits for all
        if before is not None:
            before.detach()
        self._attachment = Attachment(model, self)

    def register_ddp(
        self, model: DistributedDataParallel, comm_hook: CommHook | None = None, comm_state: Any = None
    ) -> None:
        """Let gradients of a DistributedDataParallel model leave during backward, when their bucket was reduced.

        Without this they leave at ``step()``, because DDP reduces them after all hooks. It registers a communication
        hook, of which DDP takes one, ever: ``comm_hook`` with ``comm_state`` is yours, as
        ``model.register_comm_hook(comm_state, comm_hook)`` would take it; None: DDP's own all-reduce.
        With ``offload_gradients`` they stay until ``step()``, in DDP's buckets.
        Raises TypeError for another kind of model, RuntimeError if it has a hook already.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"expected a DistributedDataParallel model, found {type(model).__name__}")
        watch_buckets(model, self, comm_hook, comm_state)

    @torch.no_grad()
    @exclusive
    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Called by DDP's hook when a bucket has been reduced: what DDP puts with the parameters at backward's end."""
        accelerator = self._accelerator
        if self._guard.broken or accelerator is None or self._registry.offloaded is not None:
            return
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = self._registry.record(parameter)
            if record is not None and record.arena.accelerated:
                accelerator.gradient_ready(record, gradient, attached=self._attachment is not None)

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether a gradient of any of these is on the host."""
        offloaded = self._registry.offloaded
        return offloaded is not None and bool(offloaded.gradients({id(p) for p in parameters}))

    def offloads(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether that may be so on some rank."""
        divided = self._meshes and self._accelerator is not None and self._registry.offloaded is not None
        return bool(self._own(parameters)) if divided else self.has_offloaded(parameters)

    @exclusive
    def offloaded_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Called by torch's clipping: the norm of their gradients on the host, once all are there."""
        self._offload_the_rest()
        return self._clipping.norm_away(parameters, norm_type)

    @exclusive
    def fold_offloaded(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Called by torch's clipping: multiply their gradients on the host by the factor in the next step."""
        self._clipping.fold_away(parameters, factor)

    @torch.no_grad()
    @exclusive
    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Called by torch's clipping after ``dos.fold_clipping()``; returns those of them that are this optimizer's."""
        own = self._own(parameters)
        self._clipping.fold(own, factor)
        return own

    def _own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        known = {id(p) for group in self.param_groups for p in group["params"]}
        return [p for p in parameters if id(p) in known]

    @exclusive
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in AdamW. Offloaded gradients are forgotten either way."""
        if not set_to_none:
            self.synchronize()  # the step may still read the gradients that are overwritten now
        self._clipping.forget()
        self._coming.clear()  # no backward is running; one that raised may have announced what never came
        if self._registry.offloaded is not None:
            self._registry.offloaded.clear()
        if self._accelerator is not None:
            self._accelerator.forget_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    @exclusive
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of all gradients to ``max_norm`` in the next ``step()``.

        The same norm and result as ``torch.nn.utils.clip_grad_norm_`` to rounding, but the factor is folded into the
        update and ``p.grad`` stays as it is, so gradients that already left for the host need not be sent again.
        To be called last before ``step()``: gradients that are written to or replaced afterwards are not clipped.
        Returns the norm before clipping, a float32 tensor of shape () where the gradients are; reading it synchronises.
        Raises ValueError unless ``max_norm`` is above 0.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, found {max_norm}")
        self._offload_the_rest()
        return self._clipping.clip(self._with_gradients(), max_norm)

    @torch.no_grad()
    @exclusive
    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients as the next ``step()`` will use them: float32, shape ().

        Raises as ``step()`` does, when gradients are offloaded.
        """
        self._offload_the_rest()
        return self._clipping.norm(self._with_gradients())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in AdamW. Raises as the constructor does, and then adds nothing."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group, f"param group {len(self.param_groups) - 1}", self._options.state_format)
            if len({id(p) for p in group["params"]}) != len(group["params"]):
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} names a parameter twice; pass each parameter once "
                    "(tied parameters are one parameter: model.parameters() already names it once)"
                )
            self._admit(group)
            self._agreed = False
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """AdamW's state by parameter, up to date: reading an entry brings resident state home first.

        Raises RuntimeError if a step failed or was interrupted part way, so that no state is read that is torn.
        """
        self._guard.check()
        return self._state.live

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        self._bring_home()
        self._hold(state)

    def _hold(self, state: Mapping[Tensor, Any]) -> None:
        """Have this state, which users have, too."""
        self._state, self._seen = Entries(LiveState(state, self._settle_state)), True

    def _settle_state(self) -> None:
        """Somebody reads or changes an entry of the state."""
        self._guard.check()
        self._bring_home()
        self._registry.host_store.join_homes()
        self._registry.write_steps()
        self._seen = True  # whoever has it may change it from now on, whenever he likes

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As AdamW's, with live views of the state, which comes home for that as when ``state`` is read."""
        self._guard.check()
        with self._lock:
            found = super().state_dict()
            return to_be_filled(self, found) if loads_full_state() else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of DOSAdam or AdamW. Raises ValueError, and changes nothing, if it does not match."""
        load_state_dict(self, state_dict, self._options.state_format)

    @torch.no_grad()
    def adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A copy of one parameter's state as AdamW would have it, whatever the format that keeps it.

        ``step``, ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``, and ``master_param`` where a 16-bit
        parameter has float32 master weights: float32, on the host, in the parameter's shape. For one parameter at a
        time, so that a large model's state need not be there twice; ``load_state_dict`` takes either form.
        Raises KeyError for a parameter that has no state.
        """
        entry = self.state.get(parameter)
        if not entry:
            raise KeyError(
                f"the parameter of shape {tuple(parameter.shape)} has no state: it is not the optimizer's, or has not "
                "been updated yet"
            )
        record = self._registry.record(parameter)
        return adamw_form(parameter, entry, written=record is None or record.changed())

    @exclusive
    def _load(self, state: defaultdict[Tensor, Any], param_groups: list[Group]) -> None:
        self._bring_home()

        def load() -> None:
            self._hold(state)
            self._registry.let_masters_follow()
            super(DOSAdam, self).__setstate__({"param_groups": param_groups})

        self._guard.change(load)

    @exclusive
    def release_memory(self) -> int:
        """Give all device memory that state can leave back at once, the state going home; returns the bytes.

        For user code that has run out of memory: what the retried iteration then leaves free is remembered, so that
        state does not return to where it was in the way. ::

            try:
                loss = model(batch)
                loss.backward()
            except torch.OutOfMemoryError:
                loss = None  # what the failed attempt holds must go, too
                optimizer.zero_grad()
                optimizer.release_memory()
                loss = model(batch)
                loss.backward()
        """
        held = 0 if self._accelerator is None else self._accelerator.releasable_bytes  # before slots are given back
        self.synchronize()
        if self._accelerator is not None:
            self._accelerator.release(held)
        return held

    def plan(self) -> Plan | None:
        """The plan of the last step; None before the first, or with all parameters on the host."""
        return None if self._accelerator is None else self._accelerator.plan

    def timeline(self) -> Timeline:
        """The spans of the last complete step, in seconds since its ``step()`` was called.

        Transfers during backward come before 0. ``beside`` has the forward and backward before it
        and, once backward has begun again, the next forward: from the return of ``step()`` to the
        first gradient, whatever else is done meanwhile, and from there to ``step()``, further
        micro-batches included. In a trace that is saved, the first of all these starts at 0.
        Empty, and false, before the first step and with all parameters on the host; ``missing``
        then says why, and so does the warning with which an empty trace is saved.
        """
        if self._accelerator is None:
            return Timeline((), missing=_NOT_ACCELERATED)
        found = self._accelerator.timeline
        return Timeline((), missing=_NOT_ENDED) if found is None else found

    @property
    def profile(self) -> HardwareProfile | None:
        """The machine's rates as ``"adaptive"`` believes them now, corrected by the steps so far.

        To be looked at, or saved for the next run: ``optimizer.profile.save("profile.json")``, then
        ``DOSAdam(..., profile="profile.json")``. None with another policy, with all parameters on
        the host, and until the first iteration asks for rates. Copies and pickles begin again with
        the ``profile`` that was passed.
        """
        return None if self._accelerator is None else self._accelerator.profile

    def explain(self) -> str:
        """Where the last complete step ran and why: plan, memory, what was predicted, measured and possible.

        After ``attach`` a step is complete once the next backward has begun. Nothing is waited for or
        changed, on whatever thread this is called; before the first such step it says so.
        """
        accelerator = self._accelerator
        report = None if accelerator is None else accelerator.report()
        missing = _NOT_ACCELERATED if accelerator is None else _NOT_ENDED
        return f"{missing[0].upper()}{missing[1:]}." if report is None else str(report)

    def metrics(self) -> dict[str, float]:
        """The step of ``explain()`` as plain numbers by name, for TensorBoard, Weights & Biases or a print.

        ``share_cpu``, ``share_gpu_streamed``, ``share_gpu_resident``: of the parameters on the accelerator. ``slots``.
        ``h2d_bytes``, ``d2h_bytes``: moved by the plan. ``update_s``: from ``step()`` to the last transfer.
        ``exposed_s``: for which the caller was held up, and forward and backward with it; ``predicted_s``: what
        the model says of that, and ``bound_s``: below which no plan could fall (``perfmodel.bounds.lower_bound``).
        ``compute_s``: of backward and, after ``attach``, forward, beside which the update can hide. ``efficiency``:
        ``(compute_s + bound_s) / (compute_s + exposed_s)``; 1 means that no plan could make the iteration shorter.
        ``memory_free_bytes``, ``memory_total_bytes``, ``memory_held_bytes``, ``memory_for_state_bytes``: of the
        device, when the step had ended. ``host_held_bytes``: of the host.
        Values that are not known are missing; before the first step, or with all parameters on the host, the dict is
        empty.
        """
        report = None if self._accelerator is None else self._accelerator.report()
        return {} if report is None else report.metrics()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self._options, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with everything by pickle and copy, and with state and param_groups alone after loading a state dict.
        own = dict(state)
        if "options" not in own:
            self._load(own["state"], own["param_groups"])
            return
        self._set_up(own.pop("options"), own.pop("device"))
        self._hold(own.pop("state"))
        super().__setstate__(own)
        for group in self.param_groups:
            self._admit(group)

    def _set_up(self, options: Options, device: Device | torch.device | str | None) -> None:
        self._options = options
        self._device = device
        self._accelerator = None
        self._guard = Guard()
        self._lock = self._guard.lock
        self._devices = DeviceFinder(device)
        self._meshes = Meshes(self._process_groups)
        self._agreed = False
        self._registry = Registry(options, self._devices, self._guard, self._meshes)
        self._in_place = InPlace(self._guard)
        self._watched = {}
        weakref.finalize(self, _unwatch, self._watched)
        self._coming = {}
        self._attachment = None
        self._unfinished, self._joined = {}, {}
        self._in_flight = False
        self._seen = False
        self._clipping = Clipping(self._registry.offloaded, options.max_grad_norm, self._meshes)
        self._warned_idle = False
        watch_clipping(self, offloads=options.offload_gradients)

    def _take_over(self) -> None:
        """Take gradients away again where another optimizer did so that is gone.

        Raises RuntimeError if another one does that is still there.
        """
        lost = {p: there() for p in self._watched if (there := taker(p)) is not None and there() is not self}
        others = [parameter for parameter, other in lost.items() if other is not None]
        if others:
            raise RuntimeError(
                f"another optimizer, built later with offload_gradients=True, takes away the gradients of "
                f"{len(others)} of this one's parameters, the first of them of shape {tuple(others[0].shape)}; what is "
                "taken away serves one optimizer alone, so build both with offload_gradients=False, or delete the other"
            )
        for parameter in lost:
            self._watched.pop(parameter).remove()
            self._watch(parameter, accelerated=True)

    def _take_remaining_gradients(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Offload gradients that no hook has seen, so that all of a subgroup are in one place."""
        if self._registry.offloaded is None or self._accelerator is None:
            return
        for record, _ in active:
            if record.arena.accelerated and record.parameter.grad is not None:
                self._take(record, self._accelerator, in_backward=False)

    def _offload_the_rest(self) -> None:
        """If gradients are offloaded, all of them are from here on; the others are placed as their parameters are."""
        self._agree()
        self._registry.place_gradients(self.param_groups)
        if self._registry.offloaded is not None:
            self._end_last_step()
            found = self._registry.with_gradients(self.param_groups, self._state)
            self._meet_newcomers()
            self._take_remaining_gradients(found)

    def _take(self, record: ParameterRecord, accelerator: Accelerator, *, in_backward: bool) -> None:
        """Offload a gradient."""
        self._registry.settle_layout(record, self._state, self._bring_home)  # to which the gradient is added
        self._clipping.about_to_add(record)
        accelerator.take_gradient(record, in_backward=in_backward)

    def _with_gradients(self) -> list[Tensor]:
        """The parameters whose gradients are with them."""
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _agree(self) -> None:
        """Look at the parameters as they are when they are first used, which frameworks may have exchanged.

        Ranks that are not alike hear of it, before one of them waits for another that never comes.
        """
        if self._agreed:
            return
        options = self._options
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._forget_all_but(parameters)
        self._registry.refuse_replaced(self.param_groups)
        self._meshes.meet(parameters)
        if self._meshes:
            policy = options.policy
            counts = {
                "the number of parameters": len(parameters),
                "the elements of all parameters": sum(p.numel() for p in parameters),
            }
            self._meshes.agree(counts, stages=False)  # stages of a pipeline differ in size
            self._meshes.agree(
                {
                    "max_grad_norm": str(None if options.max_grad_norm is None else float(options.max_grad_norm)),
                    "offload_gradients": str(options.offload_gradients),
                    "master_weights": str(options.master_weights),
                    "policy": "a callable" if callable(policy) else str(policy),
                }
            )
        self._agreed = True

    def _forget_all_but(self, parameters: Sequence[Tensor]) -> None:
        """Let go of parameters that are in no group any more; Accelerate exchanges them when it shards the model."""
        known = {id(p) for p in parameters}
        for parameter in [p for p in self._watched if id(p) not in known and self._registry.record(p) is None]:
            self._watched.pop(parameter).remove()
        self._registry.forget_all_but(known)

    def _warn_if_idle(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        if not active and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                "DOSAdam.step() found no gradient on any of its parameters. If backward() was called, the model's "
                "parameters were replaced after the optimizer was built; build it anew from model.parameters().",
                stacklevel=4,
            )

    def capturing(self) -> bool:
        """Called by hooks: whether what runs now is being captured in a CUDA graph, whose replays run no hooks."""
        return self._accelerator is not None and self._accelerator.device.capturing()

    @exclusive
    def gradient_coming(self, parameter: int) -> None:
        """Called by a hook when backward adds to the ``grad`` of the parameter with this id, if it is offloaded."""
        if self.capturing():
            raise RuntimeError(
                "a CUDA graph that captures backward writes gradients where it has found them, and "
                "offload_gradients=True takes them away; build the optimizer with offload_gradients=False"
            )
        self._coming.setdefault(parameter, set()).add(threading.get_ident())

    def gradient_ready(self, parameter: Tensor) -> None:
        """Called by a hook when backward has written to ``parameter.grad``, from several threads perhaps."""
        if self._accelerator is not None and self.capturing():
            self._accelerator.replays = True  # what they write is found by step() alone
            return
        record = self._registry.record(parameter)
        if record is None or self._accelerator is None or not self._accelerator.only_counts(record, self._lock):
            self._gradient_ready(parameter)

    @exclusive
    def _gradient_ready(self, parameter: Tensor) -> None:
        if self._registry.offloaded is not None:
            coming = self._coming.get(id(parameter), set())
            coming.discard(threading.get_ident())
            if coming:
                return  # another thread may be adding to the gradient just now; its hook takes the sum
        self._end_last_step()
        if self._guard.broken or over():
            return  # the step says what is wrong
        if self._accelerator is None and not self._accelerates(parameter):
            return
        assert self._accelerator is not None, "made for the first parameter on it"
        try:
            self._accelerator.gradient_came()
            self._send_early(parameter, self._accelerator)
        except BaseException:
            self._accelerator.abandon()
            raise

    def _send_early(self, parameter: Tensor, accelerator: Accelerator) -> None:
        """Start the parameter's gradient on its way to the host, if it is to go there and is what the step will use."""
        if self._registry.offloaded is not None and self._registry.record(parameter) is None:
            self._registry.enrol((p, g) for g in self.param_groups for p in g["params"] if p.requires_grad)
            self._meet_newcomers()
        record = self._registry.record(parameter)
        if record is None or not record.arena.accelerated or accelerator.travels(record):
            return
        if record.sharded and not same_layout(parameter.grad, parameter):
            return  # the step redistributes it first
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return  # the step refuses it
        if self._registry.offloaded is None:
            accelerator.gradient_ready(record, attached=self._attachment is not None)
        elif parameter.grad is not None:
            with torch.no_grad():
                self._take(record, accelerator, in_backward=True)

    def finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Called by a hook before these parameters are used: wait for their updates, and no others."""
        if self._in_flight:
            self._finish_parameters(parameters)

    @exclusive
    def _finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        if self.capturing():
            raise RuntimeError(
                "a CUDA graph is being captured while an update runs on, for which its replays would not wait; call "
                "optimizer.synchronize() before the capture"
            )
        here = None if self._accelerator is None else self._accelerator.device.caller()
        for parameter in parameters:
            record = self._registry.record(parameter)
            # A weight that several modules use may be read on several streams, each of which must wait.
            if record is None or not (record in self._unfinished or here not in self._joined.get(record, (here,))):
                continue
            try:
                self._wait_for(record)
            except Exception:
                with contextlib.suppress(Exception):  # what is raised already says that the step failed
                    self.synchronize()
                raise
            self._joined.setdefault(record, set()).add(here)
            if record in self._unfinished:
                self._registry.written([record])
                del self._unfinished[record]

    def _wait_for(self, record: ParameterRecord) -> None:
        if record.arena.accelerated:
            assert self._accelerator is not None, "made for the first parameter on it"
            self._accelerator.wait_for(record)
            return
        for subgroup, _ in self._registry.places[record]:
            self._in_place.wait_for(subgroup)

    @exclusive
    def _bring_home(self) -> None:
        self.synchronize()
        if self._accelerator is not None:
            self._accelerator.bring_home()

    def _let_go(self, subgroups: Sequence[Subgroup], records: Sequence[ParameterRecord]) -> None:
        """Free what is held for parameters that were replaced, beside their records."""
        for hooks in [self._watched.pop(r.parameter) for r in records if r.parameter in self._watched]:
            hooks.remove()
        if self._accelerator is not None:
            self._accelerator.let_go(subgroups, records)

    def _meet_newcomers(self) -> None:
        """Watch the gradients of parameters that have just got state, and set up the accelerator if they are on it."""
        for record in self._registry.take_newcomers():
            self._accelerates(record.parameter)
            self._watch(record.parameter, record.arena.accelerated)

    def _admit(self, group: Group) -> None:
        self._registry.admit(group)
        for parameter in group["params"]:
            if not is_lazy(parameter):
                self._accelerates(parameter)  # which raises where it cannot be
                # From the first gradient on, for the first peak of memory is one, too; it may be moved until then.
                # Not where FSDP2 keeps its shards on the host: it copies gradients there while nobody hooks them.
                self._watch(parameter, self._devices.holds(parameter) or not is_sharded(parameter))

    def _watch(self, parameter: Tensor, accelerated: bool) -> None:
        """Watch the parameter's gradient if it is on the accelerator, and no longer if it turns out not to be."""
        if not accelerated and parameter in self._watched:
            self._watched.pop(parameter).remove()
        elif accelerated and parameter not in self._watched:
            hooks = watch_gradient(parameter, self, takes=self._options.offload_gradients)
            if hooks is not None:
                self._watched[parameter] = hooks

    def _accelerates(self, parameter: Tensor) -> bool:
        """Whether the parameter is on the accelerator, which is set up when the first such parameter is met."""
        accelerates = self._devices.holds(parameter)
        if self._accelerator is None and self._devices.found is not None:
            policy = resolve_policy(self._options.policy)
            accelerator = Accelerator(self._devices.found, self._registry, policy, self._options, self._guard)
            accelerator.finish_with(self)
            self._accelerator = accelerator
        return accelerates


def _unwatch(watched: dict[Tensor, Hooks]) -> None:
    """Take the hooks of an optimizer that is gone off its parameters."""
    for hooks in watched.values():
        hooks.remove()
