"""AdamW as a rule; its arithmetic is in dos/kernels, its entries in a state dict are in entries.py."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dos.arguments import flag
from dos.kernels import update
from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.update import AdamBatch
from dos.rules import entries
from dos.rules.base import Run, check_number
from dos.rules.entries import CODE_TYPES, MAX_KEY, empty_for, has_codes, in_blocks, keeps_blocks
from dos.sharding.local import is_sharded, local
from perfmodel.format import BLOCK, INT8, NEEDED_KEYS, STATE_FORMATS, STATE_KEYS, Format, format_of, scale_shape

LEAST_CODED = 4096
"""The least number of elements of a parameter whose moments are stored in codes, as in torchao and bitsandbytes."""

_WITH_MAX, _PLAIN = {MAX_KEY: "amsgrad=True"}, dict[str, str]()
_known_format = functools.cache(format_of)  # called for each parameter, and few formats exist


def can_be_coded(parameter: Tensor) -> bool:
    """Return whether the parameter has enough elements, and consists of whole contiguous blocks on each rank."""
    return parameter.numel() >= LEAST_CODED and local(parameter).is_contiguous() and keeps_blocks(parameter)


@dataclass(frozen=True)
class AdamW:
    """AdamW, and Adam where a group's `decoupled_weight_decay` is False. See `Rule`.

    master_weights, state_format: as given to DOSAdam, where "split" is None. Raises ValueError for another format.
    """

    master_weights: bool = True
    state_format: str | None = None

    keys: ClassVar[tuple[str, ...]] = STATE_KEYS
    write_entry = staticmethod(entries.write_entry)
    prepare = staticmethod(update.prepare)

    def __post_init__(self) -> None:
        if self.state_format == "split":
            object.__setattr__(self, "state_format", None)  # the default wherever it is possible
        if self.state_format not in STATE_FORMATS:
            raise ValueError(f"state_format must be None, 'split', 'float32' or 'int8', found {self.state_format!r}")

    def agreed(self) -> dict[str, str]:
        return {"master_weights": str(self.master_weights), "state_format": str(self.state_format)}

    def check(self, group: Mapping[str, Any], where: str) -> None:
        if self.state_format == INT8 and group["amsgrad"]:
            raise ValueError(
                f"{where}: amsgrad=True needs its maximum of exp_avg_sq in float32, which state_format='int8' does not "
                "keep; use amsgrad=False, or leave state_format out"
            )
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"{where}: a tensor lr must have 1 element, found shape {tuple(lr.shape)}")
        for name in ("lr", "eps", "weight_decay"):
            value = group[name]
            if type(value) is not float:  # a shortcut, because each step checks each group
                check_number(value, f"{where}: {name}")
            if not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{where}: {name} must be 0 or more and finite, found {float(value)}")
        betas = group["betas"]
        if not isinstance(betas, Sequence | Tensor | np.ndarray) or getattr(betas, "ndim", 1) != 1 or len(betas) != 2:
            raise ValueError(f"{where}: betas must be two numbers, found {betas}")
        for i, beta in enumerate(betas):
            if type(beta) is not float:
                check_number(beta, f"{where}: betas[{i}]")
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"{where}: betas[{i}] must lie in [0, 1), found {float(beta)}")
        for name in ("amsgrad", "maximize", "decoupled_weight_decay"):
            value = group[name]
            if value is not True and value is not False and value is not None:
                flag(value, f"{where}: {name}")
        if group["capturable"]:
            raise ValueError(
                f"{where}: capturable=True is not supported, because part of the update runs on the host, which a CUDA "
                "graph cannot capture; leave step() outside the graph and use capturable=False"
            )
        if group["differentiable"]:
            raise ValueError(
                f"{where}: differentiable=True is not supported, because state leaves autograd's sight when it moves "
                "to the host; use torch.optim.AdamW(differentiable=True) for differentiating through the update"
            )

    def adopt(self, saved: MutableMapping[str, Any], own: Mapping[str, Any], where: str) -> None:
        absent = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in saved]
        if absent:
            raise ValueError(
                f"{where} has no {absent[0]!r}, found {sorted(saved)}, so it is another optimizer's; load a state dict "
                "of DOSAdam, AdamW or Adam"
            )
        for key, value in own.items():
            saved.setdefault(key, value)  # settings that the saving version did not know
        # The kind of decay and the implementation are this optimizer's own choice, as in AdamW.
        for key in ("decoupled_weight_decay", "capturable", "differentiable"):
            saved[key] = own[key]
        self.check(saved, where)

    def extra(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return _WITH_MAX if group["amsgrad"] else _PLAIN

    def format(self, parameter: Tensor, *, extra: Collection[str]) -> Format:
        coded = self.state_format == INT8 and can_be_coded(parameter)
        return _known_format(
            str(parameter.dtype).removeprefix("torch."),
            state_format=INT8 if coded else None if self.state_format == INT8 else self.state_format,
            master_weights=self.master_weights,
            amsgrad=MAX_KEY in extra,
        )

    def problem(
        self, entry: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any] | None = None
    ) -> str | None:
        if not entry:
            return None
        for key in ("step", *(moment for moment in NEEDED_KEYS if not has_codes(entry, moment))):
            if entry.get(key) is None:
                there = sorted(name for name, value in entry.items() if value is not None)
                return f"its state has {there} but no {key!r}; expected the state of AdamW or DOSAdam"
        for key in STATE_KEYS:
            problem = None if entry.get(key) is None else _tensor_problem(key, entry[key], parameter)
            if problem:
                return problem
        step = entry["step"]
        if not (isinstance(step, numbers.Real) or (isinstance(step, Tensor) and step.numel() == 1 and _is_real(step))):
            return f"its state 'step' must be one number, found {step!r}"
        if not 0 <= float(step) < math.inf:
            return f"its state 'step' must be 0 or more and finite, found {float(step)}"
        if group is not None and group["amsgrad"] and entry.get(MAX_KEY) is None and float(step) > 0:
            return (
                f"amsgrad=True, and its state has no {MAX_KEY!r}, which torch.distributed.checkpoint leaves out where "
                "the optimizer was built without amsgrad; build it with amsgrad=True, or load the checkpoint with "
                "planner=dos.checkpoint.LoadPlanner()"
            )
        return None

    def empty_entry(self, parameter: Tensor) -> dict[str, Tensor]:
        keys = (key for key in STATE_KEYS if key not in CODE_TYPES or in_blocks(parameter.shape))
        return {key: empty_for(key, parameter) for key in keys}

    def settings(self, group: Mapping[str, Any], count: float, scale: float) -> AdamStep:
        beta1, beta2 = group["betas"]
        return AdamStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=count,
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
            decoupled_weight_decay=bool(group["decoupled_weight_decay"]),
            grad_scale=scale,
        )

    def batch(self, runs: Sequence[Run]) -> AdamBatch:
        # A placeholder of the right length for the gradient, whose address `point` sets.
        return AdamBatch([AdamArrays(updated, updated, **fields, out=out) for updated, fields, out in runs])


def _is_real(value: Tensor) -> bool:
    """Return whether the tensor is dense and has values in memory, which are real numbers."""
    return not (value.is_complex() or value.is_meta) and value.layout == torch.strided


def _tensor_problem(key: str, value: object, parameter: Tensor) -> str | None:
    """Return the reason why this value cannot be in the parameter's state under this name; None if it can."""
    if key in CODE_TYPES and not in_blocks(parameter.shape):
        return f"its state has {key!r}, but shape {tuple(parameter.shape)} is not whole blocks of {BLOCK} elements"
    expected = scale_shape(parameter.shape) if key.endswith("_scales") else tuple(parameter.shape)
    if not isinstance(value, Tensor) or tuple(value.shape) != expected or not _is_real(value):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and not _is_real(value):
            found += f", {value.dtype}, {value.layout}, on {value.device}"
        return f"its state {key!r} must have shape {expected}, found {found}"
    if value.dtype != CODE_TYPES.get(key, value.dtype):
        return (
            f"its state {key!r} must be {CODE_TYPES[key]}, found {value.dtype}: something has converted the state "
            "dict; codes cannot be converted, so save it with optimizer.state_dict() and load it as it is"
        )
    if is_sharded(value) and value.device_mesh != getattr(parameter, "device_mesh", None):  # type: ignore[attr-defined]
        return (
            f"its state {key!r} is divided over {value.device_mesh}, the parameter over "  # type: ignore[attr-defined]
            f"{getattr(parameter, 'device_mesh', 'nothing')}; load it with torch.distributed.checkpoint, which "
            "divides it anew, or as a full tensor"
        )
    return None
