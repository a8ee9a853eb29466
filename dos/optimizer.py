"""DOSAdam: AdamW whose state is where it is cheapest. A shell over the modules that it imports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dos.activations.offload import checked_amount
from dos.arguments import flag
from dos.devices import Device, checked_device
from dos.gradients.torch_clipping import refuse_clipping, watch_clipping
from dos.gradients.zeroing import tell_others, watch_zeroing, zero_grad_of_optimizers
from dos.guard import shell
from dos.machine.threads import switching_often
from dos.options import Options, folders_of
from dos.parameters.admission import malformed
from dos.parameters.hooks import check_model
from dos.parameters.loading import checked, to_be_filled
from dos.planning.policies import Policy
from dos.rules.adamw import AdamW
from dos.rules.base import Rule, check_number
from dos.rules.entries import adamw_form
from dos.session import Session
from dos.sharding.ddp import CommHook, watch_buckets
from dos.sharding.meshes import Meshes, checked_groups
from dos.state.record import step_of
from dos.torch_internals.callers import TrueForScaler, loads_full_state
from dos.torch_internals.loading_hooks import after_loading, before_loading
from dos.torch_internals.modes import disable_dynamo
from dos.weights.blocks import checked_weights
from perfmodel import Plan, Timeline
from perfmodel.hardware import HardwareProfile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NOT_ACCELERATED = "no step has updated parameters on an accelerator; those on the host are updated there, in place"

_NOT_ENDED = "no step has ended yet; one that runs on after step() ends in the next backward, or at synchronize()"


class DOSAdam(Optimizer):
    r"""AdamW (Loshchilov and Hutter, ICLR 2019) with optimizer state on the host or the accelerator.

    Used like ``torch.optim.AdamW``, with the same results to a few units in the last place. ``policy``,
    ``subgroup_size`` and the number of threads change no bit.

    Args:
        params: iterable of parameters, of (name, parameter) pairs or of dicts defining groups; float32, bfloat16 or
            float16, on the host or on one accelerator.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in AdamW.
        foreach, fused: accepted and ignored; they choose between AdamW's implementations.
        capturable, differentiable: must be False.
        policy: where subgroups are updated. ``"adaptive"``: as the performance model finds best for the device memory
            that is free in each iteration; measured times correct it; as ``"resident"`` on a GPU that shares the host's
            memory. ``"cpu"``: all on the host, as ZeRO-Offload does. ``"resident"``: all on the accelerator, as AdamW
            does; state never leaves, takes no host memory, and reading it gives tensors there. A number in [0, 1]: that
            share on the host, the rest resident, as Twin-Flow does. ``"stride:k"``: every k-th subgroup is streamed
            through the accelerator, as the paper *Deep Optimizer States* does. Or a callable from
            ``perfmodel.Workload`` to ``perfmodel.Plan``.
        subgroup_size: parameters updated as one unit. Large tensors are split, small ones share a subgroup. None: by
            the size of the model and of the device's memory (``perfmodel.subgroups.automatic_subgroup_size``).
        profile: the machine's rates for ``"adaptive"``: a ``perfmodel.hardware.HardwareProfile``, a file that
            ``python -m dos.calibrate`` wrote, or the name of a built-in profile. None: the profile that calibration
            has saved for this machine, else a rough measurement of two seconds at the first step.
        max_grad_norm: clip the gradients' global 2-norm to this in each step, as ``torch.nn.utils.clip_grad_norm_``
            followed by the step would, to rounding; the gradients themselves stay as they are. None: no clipping.
        skip_nonfinite: skip a step if the global norm of its gradients, of all ranks, is infinite or NaN: no parameter
            and no state changes, no step is counted, offloaded gradients are used up, and ``p.grad`` stays. The norm
            overflows, too, where elements exceed some 1e19. ``metrics()["skipped_steps"]`` counts them. With
            ``max_grad_norm`` this costs nothing; alone it costs the norm, a pass over the gradients, for which
            ``step()`` waits. False: all gradients are used, as in AdamW.
        master_weights: keep float32 master weights of bfloat16 and float16 parameters, and update those.
        state_format: how state is kept. None or ``"split"``: in the fewest bytes with which no bit changes; a bfloat16
            parameter is the upper half of its float32 master, and only the lower 16 bits are kept beside it.
            ``"float32"``: all masters whole, with the same result. ``"int8"``: ``exp_avg`` and ``exp_avg_sq`` in 8 bits
            each, for parameters of at least 4,096 elements that are whole blocks of 128; results then differ from
            AdamW's (docs/formats.md has the evidence).
        offload_gradients: move each gradient to the host during backward, and add gradients of further micro-batches to
            it there, to the bit as autograd adds them to ``p.grad``. ``p.grad`` is then None, and each ``step()``
            consumes the gradients; use ``zero_grad``, ``grad_norm`` and ``clip_grad_norm_`` of this class, or
            ``torch.nn.utils.clip_grad_norm_``. Not with GradScaler, which cannot see them.
        memory_budget: device memory for optimizer state. None: the memory that is free at the peak of the iteration and
            during the update, by NVML and the caching allocator, less 2% of the device. An int limits it to that many
            bytes, a float to that share of the device's memory. A function is called in each iteration and replaces
            these measurements: state may use the bytes that it returns, for which the caller is responsible.
        disk: a folder, or several that are used at once, for state that exceeds ``host_memory`` (docs/disk.md). It is
            read and written in each step. The files are removed when the process ends, after a crash by the next
            process that uses the folder. Only for parameters on an accelerator.
        host_memory: bytes of host memory for optimizer state, including buffers for gradients, parameters and state.
            None: all memory that is available, or nine tenths of it with ``disk``.
        decoupled_weight_decay: False gives Adam with L2 regularisation.
        device: the accelerator on which the parameters are, as a torch device, its name or its index. None: the CUDA
            device of the parameters, if any. Pass a ``dos.EmulatedDevice`` to try the engine without an accelerator.
        process_groups: process groups over which the job is divided beside the meshes of its DTensors, such as the
            stages of a pipeline: the gradients' norm, and GradScaler's check for infinite gradients, cover all of them.
            Copies and pickles do not have them.

    Raises:
        ValueError: a setting out of range, an unknown policy, duplicate parameters, parameters on several
            accelerators, a device that torch does not find, capturable or differentiable.
        TypeError: a setting of another type, a parameter of another dtype or layout.
        RuntimeError: from ``step()``: sparse gradients, or parameters moved or converted after their first step.
    """

    _step_supports_amp_scaling = TrueForScaler()  # GradScaler.step() leaves unscaling and skipping to us

    _process_groups: Sequence[ProcessGroup] = ()

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
        skip_nonfinite: bool = False,
        master_weights: bool = True,
        state_format: str | None = None,
        offload_gradients: bool = False,
        memory_budget: int | float | Callable[[], int] | None = None,
        disk: str | Path | Sequence[str | Path] | None = None,
        host_memory: int | None = None,
        decoupled_weight_decay: bool = True,
        device: Device | torch.device | str | int | None = None,
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
        if not isinstance(params, Iterable):
            raise TypeError(f"params: expected parameters, found {params!r}; pass model.parameters()")
        device = checked_device(device)
        rule = self._rule(flag(master_weights, "master_weights"), state_format)
        rule.check(defaults, "DOSAdam")
        options = Options(
            policy=policy,
            subgroup_size=subgroup_size,
            profile=profile,
            max_grad_norm=max_grad_norm,
            rule=rule,
            offload_gradients=offload_gradients,
            memory_budget=memory_budget,
            disk=folders_of(disk),
            host_memory=host_memory,
            skip_nonfinite=skip_nonfinite,
        )
        self._process_groups = checked_groups(process_groups)
        self._set_up(options, device)
        super().__init__(params, defaults)
        self._session.assembly.reconciler.state.read = False  # only torch's constructor has made it, no user code

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        closure: reevaluates the model and returns the loss, as in AdamW.
        Raises RuntimeError, TypeError or ValueError, before anything is changed, for a gradient, parameter, group or
        state that cannot be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            # Other optimizers' threads may be updating the same parameters. Not under our lock, for which those threads
            # may wait: a deadlock.
            self._session.waiting.finish_others()
            with switching_often():
                self._session.step(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            settings = [name for name in error.args if isinstance(error, KeyError) and name in self.defaults]
            found = malformed(self.param_groups, self._session.assembly.reconciler.state, settings)
            if found:
                raise TypeError(found) from error
            raise
        return loss

    def synchronize(self) -> None:
        """Block until the last step is complete, with all parameters and state updated.

        Needed only after ``attach``, before reading or writing parameters by hand.
        Raises RuntimeError if a transfer or an update failed, with its cause. Ctrl-C takes effect when all is
        complete; the second one ends the wait at once, and a later call waits for the rest.
        """
        self._session.waiting.synchronize()
        # A forward that was called before may still read weights at home, to which user code may write after this.
        self._session.waiting.release_homes()

    @shell
    def attach(
        self,
        model: nn.Module,
        *,
        activations: float | Literal["auto"] | None = None,
        weights: float | Literal["auto"] | None = None,
        blocks: Iterable[nn.Module] | None = None,
        updates: Literal["step", "backward"] = "step",
    ) -> None:
        """Let updates continue during the next forward of ``model``: ``step()`` returns while the host still updates.

        Each module waits for its own parameters just before it runs, in training; ``step()`` itself waits for
        parameters whose module has not run yet. Compiled modules wait once, at their top. Evaluating, saving, loading,
        copying and pickling the model wait for all updates. Reading a module's parameters, as by ``model.parameters()``
        or ``layer.weight``, waits for those of this module, and reading ``param_groups[i]["params"]`` for all. Of
        parameters that your code has kept, as in a list, nothing is seen: call ``synchronize()`` before touching these
        or their gradients after ``step()``, and before a CUDA graph is captured.
        Subgroups are updated in the order in which forward first used them. Attaching another model replaces the first.
        Compile a model before you attach it.

        activations: how many of the tensors that autograd saves in the model's forward move to the host until backward
        needs them, as in ``offload_activations``; None: none.
        weights: how many blocks of the model stay on the device: a number as an int, a share from 0 to 1 as a float, or
            ``"auto"``, as many as the plan says. The weights of all other blocks have their home in pinned host memory,
            and are on the device only while their block computes. Build the model on the host and the optimizer with
            ``device="cuda"`` and ``offload_gradients=True``; ``attach`` moves everything where it belongs. None: no
            weights are moved.
        blocks: the model's blocks, modules that each run once in a forward; None: its longest ``ModuleList`` of modules
            of one type. Parameters of no block, or of several, stay on the device.
        updates: ``"backward"``: each parameter of the model is updated while backward runs, once its gradient is final,
            and ``p.grad`` is None afterwards; ``step()`` ends the iteration. Each backward is a step, except within
            ``no_update()``. Not with clipping, GradScaler or DDP (docs/updates-during-backward.md).
            ``"step"``: updates begin in ``step()``.
        Raises TypeError for anything but a model, ValueError for one that has none of the optimizer's parameters, or
        with ``updates="backward"`` where updates cannot begin in backward.
        """
        check_model(model, self._session.assembly.parameters)
        if updates not in ("step", "backward"):
            raise ValueError(f"updates must be 'step' or 'backward', found {updates!r}")
        amounts = checked_amount(activations), checked_weights(weights)
        self._session.attaching.attach(model, *amounts, blocks, updates=updates == "backward")
        if updates == "backward":
            refuse_clipping()
        watch_zeroing(self._session)

    def no_update(self) -> AbstractContextManager[None]:
        """Let backward only add up gradients, after ``attach(updates="backward")``, as ``no_sync`` of DDP does. ::

            with optimizer.no_update():
                for batch in micro_batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(micro_batches[-1])).backward()  # updates with the sum of all
            optimizer.step()

        Also for a backward of another loss that reaches parameters of ``model``, before ``zero_grad()``. Without
        ``updates="backward"`` it changes nothing.
        """
        return self._session.runs.no_update()

    def offload_activations(self, activations: float | Literal["auto"] = "auto") -> AbstractContextManager[None]:
        """Move tensors that autograd saves to the host until backward needs them; surrounds a forward. ::

            with optimizer.offload_activations(0.5):
                loss = model(batch).loss
            loss.backward()

        The result is the same to the bit. Tensors of 1 MiB or more move, except parameters, buffers and views of them
        (a model's buffers are known once it is attached). The tensors saved first move first, because backward needs
        them last. With all parameters on the host, nothing moves.

        activations: the share that moves, from 0 to 1, or the most bytes of each forward that move, an int above 1.
        ``"auto"``: as much as the plan says, at first nothing; only ``policy="adaptive"`` moves any.
        Backward raises RuntimeError, as without this, if a tensor was written to after it was saved.
        Raises TypeError or ValueError for another ``activations``.
        """
        amount = checked_amount(activations)
        if amount is None:
            raise TypeError("activations must be a share from 0 to 1, bytes as an int, or 'auto', found None")
        return self._session.attaching.offload_activations(amount)

    def register_ddp(
        self, model: DistributedDataParallel, comm_hook: CommHook | None = None, comm_state: Any = None
    ) -> None:
        """Copy gradients of a DistributedDataParallel model to the host during backward, when their bucket was reduced.

        Without this they are copied in ``step()``, because DDP reduces them after all hooks. It registers a
        communication hook, of which DDP takes only one: pass your own as ``comm_hook`` with ``comm_state``, as to
        ``model.register_comm_hook(comm_state, comm_hook)``; None: DDP's own all-reduce. With ``offload_gradients``
        they stay in DDP's buckets until ``step()``.
        Raises TypeError for another kind of model, RuntimeError if it has a hook already.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"expected a DistributedDataParallel model, found {type(model).__name__}")
        watch_buckets(model, self._session, comm_hook, comm_state)

    @shell
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in AdamW. Offloaded gradients are discarded either way.

        Also those that another DOSAdam has offloaded of the same parameters.
        """
        if not set_to_none and self._session.ledger.unfinished:
            self.synchronize()  # the step may still read the gradients that are overwritten below
        tell_others(self._session, set_to_none)
        self._session.edits.forget_gradients()
        with self._session.waiting.lists_at_rest():
            zero_grad_of_optimizers(self, set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of all gradients to ``max_norm`` in the next ``step()``.

        The norm and the result are those of ``torch.nn.utils.clip_grad_norm_`` to rounding, but the factor is folded
        into the update and ``p.grad`` stays as it is, so that gradients already on the host need not be sent again.
        Call it last before ``step()``: gradients that are written to or replaced afterwards are not clipped.
        Returns the norm before clipping, a float32 tensor of shape () where the gradients are; reading it synchronises.
        Raises ValueError unless ``max_norm`` is above 0.
        """
        check_number(max_norm, "max_norm", or_bool=False)
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, found {max_norm}")
        self._session.waiting.finish_others()
        return self._session.edits.clip(float(max_norm))

    def edit_gradients(self, edit: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        """Call ``edit(parameter, gradient)`` once for each parameter that has a gradient; between backward and step. ::

            loss.backward()
            optimizer.edit_gradients(lambda p, gradient: gradient.mul_(masks[p]))
            optimizer.step()

        The result is to the bit as if ``edit`` were given ``p.grad`` of a loop without DOSAdam, whose place this takes
        where gradients are not in ``p.grad`` (``offload_gradients=True``): masks, noise, clipping of one's own, checks.
        ``gradient`` has the parameter's shape and the dtype of ``p.grad``, with all micro-batches so far added up, and
        is where it lies: on the host if it was offloaded, else on the parameter's device. ``edit`` changes it in place,
        or returns a gradient of the same shape, dtype and device. If it returns None without a change, the gradient is
        dropped, and the step leaves the parameter and its state alone. Of a DTensor it is a DTensor. Under ``no_grad``.

        ``grad_norm()`` and clipping that come later, ``max_grad_norm`` included, use the edited gradients; clipping
        that came before is applied first. With GradScaler call ``scaler.unscale_(optimizer)`` before.
        Warns if there is no gradient, or all are dropped.
        Raises TypeError or ValueError for anything else that ``edit`` returns, ValueError if it returns None both for
        gradients that it has edited and for others, and as ``step()`` does.
        """
        self._session.waiting.finish_others()
        self._session.edits.edit_gradients(edit)

    def grad_norm(self) -> Tensor:
        """Return the global 2-norm of all gradients as the next ``step()`` will use them: float32, shape ().

        Raises as ``step()`` does, when gradients are offloaded.
        """
        self._session.waiting.finish_others()
        return self._session.edits.norm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in AdamW. Raises as the constructor does, and then adds nothing."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._options.rule.check(group, f"param group {len(self.param_groups) - 1}")
            if len({id(p) for p in group["params"]}) != len(group["params"]):
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} names a parameter twice; pass each parameter once "
                    "(tied parameters are one parameter: model.parameters() already names it once)"
                )
            self._session.admit(group)
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, as in AdamW."""
        return self._session.assembly.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._session.assembly.groups = groups

    @property
    @shell
    def state(self) -> defaultdict[Tensor, Any]:
        """AdamW's state by parameter, up to date: reading an entry first copies resident state to the host.

        Raises RuntimeError if a change failed part way, so that user code reads no torn state, within another call of
        the same thread, and in a forked child that lacks pinned memory. Reading an entry raises
        dos.disk.DiskError if another program has changed its state on disk.
        """
        self._session.guard.check()
        return self._session.assembly.reconciler.state

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        self._session.state.bring_home()
        self._session.state.install(state)

    @disable_dynamo
    @shell
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as AdamW's, with live views of the state, which is copied to the host as by ``state``.

        Raises as reading all entries of ``state`` does.
        """
        found = super().state_dict()
        return to_be_filled(self, found, self._options.rule) if loads_full_state() else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of DOSAdam or AdamW. Raises ValueError, and changes nothing, if it does not match.

        Raises TypeError for anything but a dict.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"expected a state dict, found {type(state_dict).__name__}; pass what optimizer.state_dict() gave, or "
                "torch.load(path)"
            )
        state_dict = before_loading(self, state_dict.copy())
        self._session.load(*checked(self, state_dict, self._options.rule))
        after_loading(self)

    @torch.no_grad()
    def adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a copy of one parameter's state as AdamW would have it, for every ``state_format``.

        ``step``, ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``, and ``master_param`` where a 16-bit
        parameter has float32 master weights: float32, on the host, in the parameter's shape. It takes one parameter at
        a time, so that you need not hold a large model's state twice; ``load_state_dict`` takes either form.
        Raises KeyError for a parameter that has no state.
        """
        if not isinstance(parameter, Tensor):
            raise TypeError(f"expected a parameter, found {parameter!r}; pass model.get_parameter(name)")
        entry = self.state.get(parameter)
        if not entry:
            raise KeyError(
                f"the parameter of shape {tuple(parameter.shape)} has no state: it is not the optimizer's, or has not "
                "been updated yet"
            )
        record = self._session.registry.record(parameter)
        state = adamw_form(parameter, entry, written=record is None or record.changed())
        return {"step": step_of(entry).clone()} | state

    def release_memory(self) -> int:
        """Move all state that can move to the host, and release its device memory at once; return the bytes released.

        For user code that has run out of memory: the memory that the retried iteration leaves free is remembered, so
        that state does not return to memory that your code needs. ::

            try:
                loss = model(batch)
                loss.backward()
            except torch.OutOfMemoryError:
                loss = None
            if loss is None:  # outside of except, where the exception would keep the failed attempt's tensors
                optimizer.zero_grad()
                optimizer.release_memory()
                loss = model(batch)
                loss.backward()
        """
        return self._session.state.release_memory()

    def plan(self) -> Plan | None:
        """Return the plan of the last step; None before the first, or with all parameters on the host."""
        decisions = self._session.assembly.decisions
        return None if decisions is None else decisions.plan

    def timeline(self) -> Timeline:
        """Return the spans of the last complete step, in seconds since its ``step()`` was called.

        Transfers during backward have negative times, and so have copies of saved tensors in the forward
        and backward before the step. ``beside`` has that forward and backward and, once backward has begun
        again, the next forward. Forward lasts from the return of ``step()`` to the first gradient, with
        all that your code does meanwhile, and backward from there to ``step()``, further micro-batches
        included. In a trace that is saved, the first of all these starts at 0.
        Empty, and false, before the first step and with all parameters on the host; ``missing``
        then says why, and so does the warning with which an empty trace is saved.
        """
        decisions = self._session.assembly.decisions
        if decisions is None:
            return Timeline((), missing=_NOT_ACCELERATED)
        found = None if decisions.ended is None else decisions.ended.timeline
        return Timeline((), missing=_NOT_ENDED) if found is None else found

    @property
    def profile(self) -> HardwareProfile | None:
        """The machine's rates that ``"adaptive"`` uses now, corrected by the steps so far.

        None with another policy, with all parameters on the host, and until the first iteration asks
        for rates. Copies and pickles begin again with the ``profile`` that was passed.
        """
        decisions = self._session.assembly.decisions
        return None if decisions is None else decisions.profile

    def explain(self) -> str:
        """Explain the last complete step: plan, memory, and predicted, measured and least possible times.

        After ``attach`` a step is complete once the next backward has begun. This waits for nothing and changes
        nothing, and can be called on any thread; before the first complete step it says so.
        """
        decisions = self._session.assembly.decisions
        report = None if decisions is None else decisions.ended
        missing = _NOT_ACCELERATED if decisions is None else _NOT_ENDED
        return f"{missing[0].upper()}{missing[1:]}." if report is None else str(report)

    def metrics(self) -> dict[str, float]:
        """Return the step of ``explain()`` as plain numbers by name, for TensorBoard, Weights & Biases or a print.

        ``share_cpu``, ``share_gpu_streamed``, ``share_gpu_resident``: of the parameters on the accelerator. ``slots``.
        ``h2d_bytes``, ``d2h_bytes``: moved by the plan. ``update_s``: from ``step()`` to the last transfer.
        ``waited_s``: the part of it for which the caller waited. ``exposed_s``: how long the caller waited in the whole
        iteration, and forward and backward with it, for weights that stream, too; ``predicted_s``: the model's
        prediction of that; ``bound_s``: the least of it under any plan (``perfmodel.bounds.lower_bound``).
        ``compute_s``: of backward and, after ``attach``, forward, behind which the update can hide. ``efficiency``:
        ``(compute_s + bound_s) / (compute_s + exposed_s)``; 1 means that no plan could make the iteration shorter. It
        is missing if the iteration was shorter than the model believes possible: its rates are not the machine's.
        ``memory_free_bytes``, ``memory_total_bytes``, ``memory_held_bytes``, ``memory_for_state_bytes``: of the
        device, when the step had ended. ``host_held_bytes``: of the host. ``disk_held_bytes``: of state on disk.
        ``blocks_on_device``, ``weight_bytes_fetched``: where weights stream, the blocks that stay, and the bytes that a
        forward fetches. ``activation_bytes``, ``activation_share``: of saved tensors that move to the host in a
        forward: by the plan with ``"auto"``, else as in the last forward. ``activation_host_bytes``: host memory pinned
        for them. ``skipped_steps``: with ``skip_nonfinite``, of all steps so far; it is never missing then.
        Values that are not known are missing; before the first step, or with all parameters on the host, the dict is
        empty.
        """
        decisions = self._session.assembly.decisions
        report = None if decisions is None else decisions.ended
        skipped = {"skipped_steps": float(self._session.skipped)} if self._options.skip_nonfinite else {}
        return skipped if report is None else report.metrics() | skipped

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self._options, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        if "options" in own:  # of a copy or a pickle; user code sets a part, as {"state": defaultdict(dict)}
            self._set_up(own.pop("options"), own.pop("device"))
        for name in ("state", "param_groups"):
            if name in own:
                setattr(self, name, own.pop(name))
        super().__setstate__(own)
        for group in self.param_groups:
            self._session.admit(group)

    @staticmethod
    def _rule(master_weights: bool, state_format: str | None) -> Rule:
        """Return the rule of updates."""
        return AdamW(master_weights, state_format)

    def _set_up(self, options: Options, device: Device | torch.device | str | None) -> None:
        self._options = options
        self._device = device
        self._session = Session(options, device, Meshes(self._process_groups))
        self._lock = self._session.guard.lock
        watch_clipping(self._session, offloads=options.offload_gradients)
        if options.offload_gradients:
            watch_zeroing(self._session)
