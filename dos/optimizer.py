"""DOSAdam: AdamW whose state is where it is cheapest. A shell; the work is done in the modules it imports."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from dos.checkpoint import load_state_dict
from dos.controller import Controller, Policy, resolve_policy
from dos.devices import Device, device_for, host_zeros
from dos.engine import Engine
from dos.options import DEFAULT_SUBGROUP_SIZE, Options, check_settings
from dos.registry import Group, Registry
from dos.subgroup import ParameterRecord, Subgroup
from dos.work import SubgroupUpdate
from perfmodel import Plan, Timeline, Workload


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
        policy: where subgroups are updated. ``"cpu"``: all on the host, as ZeRO-Offload does. A number in [0, 1]: that
            share of the parameters on the host, the rest resident on the accelerator, as Twin-Flow does.
            ``"stride:k"``: every k-th subgroup is streamed through the accelerator, as the paper *Deep Optimizer
            States* does. Or a callable from ``perfmodel.Workload`` to ``perfmodel.Plan``.
        subgroup_size: parameters updated as one unit. Large tensors are split, small ones share a subgroup.
        max_grad_norm: clip the gradients' global 2-norm to this in each step, as ``torch.nn.utils.clip_grad_norm_``
            followed by the step would; the gradients themselves stay as they are. None: no clipping.
        master_weights: keep float32 copies of bfloat16 and float16 parameters, and update those.
        decoupled_weight_decay: False gives Adam with L2 regularisation.
        device: the accelerator on which the parameters are. None: the CUDA device of the parameters, if any. Pass a
            ``dos.EmulatedDevice`` to try the engine without an accelerator.

    Raises:
        ValueError: a setting out of range, an unknown policy, duplicate parameters, capturable or differentiable.
        TypeError: a parameter of another dtype or layout.
        RuntimeError: from ``step()``: sparse gradients, or parameters moved or converted after construction.
    """

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
        policy: str | float | Policy = "cpu",
        subgroup_size: int = DEFAULT_SUBGROUP_SIZE,
        max_grad_norm: float | None = None,
        master_weights: bool = True,
        decoupled_weight_decay: bool = True,
        device: Device | torch.device | str | None = None,
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
        check_settings(defaults, "DOSAdam")
        self._set_up(Options(policy, subgroup_size, max_grad_norm, master_weights), device)
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

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

        self.synchronize()
        active = self._registry.active(self.param_groups, self._state)
        self._warn_if_idle(active)
        plan = self._make_plan()
        # Everything that a user can have got wrong has been checked; from here on things change.
        self._follow_parameters(active)
        updates = self._registry.updates(active, self._count_steps(active), self._clip_factor(active))
        self._run(plan, updates)
        self._registry.written(active)
        return loss

    def synchronize(self) -> None:
        """Block until the last step is complete, which it normally is when ``step()`` returns."""
        if self._engine is not None:
            self._engine.wait()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in AdamW. Raises as the constructor does, and then adds nothing."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group, f"param group {len(self.param_groups) - 1}")
            if len({id(p) for p in group["params"]}) != len(group["params"]):
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} names a parameter twice; pass each parameter once "
                    "(tied parameters are one parameter: model.parameters() already names it once)"
                )
            self._registry.admit(group)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """AdamW's state by parameter, up to date: reading it brings resident state home first."""
        self._bring_home()
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._bring_home()
        self._state = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of DOSAdam or AdamW. Raises ValueError, and changes nothing, if it does not match."""
        load_state_dict(self, state_dict)

    def plan(self) -> Plan | None:
        """The plan of the last step; None before the first, or with all parameters on the host."""
        return self._plan

    def timeline(self) -> Timeline | None:
        """The spans of the last step in seconds since its start; None before the first, or with no accelerator."""
        return self._timeline

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self._options, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with everything by pickle and copy, and with state and param_groups alone after loading a state dict.
        own = dict(state)
        made = "options" in own
        if made:
            self._set_up(own.pop("options"), own.pop("device"))
        self.state = own.pop("state")
        super().__setstate__(own)
        if made:
            for group in self.param_groups:
                self._registry.admit(group)

    def _set_up(self, options: Options, device: Device | torch.device | str | None) -> None:
        self._options = options
        self._device = device
        self._engine: Engine | None = None
        self._controller = Controller(resolve_policy(options.policy))
        self._registry = Registry(options, self._accelerates, self._host_zeros, self._bring_home)
        self._plan: Plan | None = None
        self._timeline: Timeline | None = None
        self._warned_idle = False

    def _make_plan(self) -> Plan | None:
        """Where to update what is on the accelerator; None if nothing is."""
        if self._engine is None or not self._registry.accelerated:
            return None
        plan = self._controller.plan(Workload(self._registry.loads()))
        self._engine.check(plan, self._registry.accelerated)
        return plan

    def _run(self, plan: Plan | None, updates: Mapping[Subgroup, SubgroupUpdate]) -> None:
        """Update the accelerator's parameters as the plan says, and host parameters in place beside that."""
        if plan is not None and self._engine is not None:
            self._engine.start(plan, [updates.get(subgroup) for subgroup in self._registry.accelerated])
        for subgroup in self._registry.local:
            if subgroup in updates:
                updates[subgroup].apply_in_place()
        if plan is not None and self._engine is not None:
            self._plan, self._timeline = plan, self._engine.wait()

    def _follow_parameters(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Let masters follow parameters to which somebody else wrote since our last step."""
        for record, _ in active:
            changed = record.changed()
            record.locate()
            master = record.state.master
            if not changed or master is None:
                continue
            current = record.flat
            if self._engine is not None and record.arena.accelerated:
                self._engine.bring_home()
                current = self._host_zeros(record.numel, record.flat.dtype)
                self._engine.fetch(current, record.flat)
            if master.dtype == current.dtype:
                master.copy_(current)
            else:
                # Where the parameter still is the master rounded, the master knows it better.
                bits = torch.int16
                kept = master.to(current.dtype).view(bits) == current.view(bits)
                master.copy_(torch.where(kept, master, current.to(master.dtype)))

    def _count_steps(self, active: Sequence[tuple[ParameterRecord, Group]]) -> list[float]:
        """Advance the step counter of each active parameter."""
        steps = [self._state[record.parameter]["step"] for record, _ in active]
        if steps:
            torch._foreach_add_(steps, 1)
        return [float(step) for step in steps]

    def _clip_factor(self, active: Sequence[tuple[ParameterRecord, Group]]) -> float:
        if self._options.max_grad_norm is None or not active:
            return 1.0
        gradients = [record.parameter.grad for record, _ in active]
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None])
        # The same formula as torch.nn.utils.clip_grads_with_norm_.
        return float(torch.clamp(self._options.max_grad_norm / (norm + 1e-6), max=1.0))

    def _warn_if_idle(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        if not active and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                "DOSAdam.step() found no gradient on any of its parameters. If backward() was called, the model's "
                "parameters were replaced after the optimizer was built; build it anew from model.parameters().",
                stacklevel=4,
            )

    def _bring_home(self) -> None:
        if self._engine is not None:
            self._engine.bring_home()

    def _accelerates(self, parameter: Tensor) -> bool:
        """Whether the parameter is on the accelerator, which is set up when the first such parameter is met."""
        if self._engine is None:
            device = device_for(parameter, self._device)
            if device is not None:
                self._engine = Engine(device)
        return self._engine is not None and self._engine.device.owns(parameter)

    def _host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return host_zeros(numel, dtype) if self._engine is None else self._engine.device.host_zeros(numel, dtype)
