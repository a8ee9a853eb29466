"""Checks that parameters can be optimised, and that their gradients and the state that users load can be used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.devices import DeviceFinder
from dos.kernels.adam import FLOATS
from dos.parameters.group_parameters import members
from dos.rules.base import Rule
from dos.sharding.local import local
from dos.state.record import Layout, ParameterRecord, is_dense, kind_of
from dos.torch_internals.tensors import is_wrapper

Group = dict[str, Any]
_FLOATS = ", ".join(map(str, FLOATS))


def check_parameter(
    parameter: Tensor,
    group: Group,
    entry: Mapping[str, Any],
    record: ParameterRecord | None,
    devices: DeviceFinder,
    rule: Rule,
) -> None:
    """Raise unless the parameter can be optimised and its gradient and state can be used.

    record: the parameter's, whose device, dtype and shape it must still have; None before its first update.
    """
    gradient = parameter.grad
    if gradient is None and record is not None:
        gradient = record.leaf.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise RuntimeError(
            f"{name_of(parameter, group)}: DOSAdam does not support sparse gradients, found layout "
            f"{gradient.layout}; use torch.optim.SparseAdam for this parameter, or sparse=False in its module"
        )
    if gradient is not None and gradient.dtype not in FLOATS:
        raise TypeError(f"{name_of(parameter, group)}: expected a gradient of {_FLOATS}, found {gradient.dtype}")
    if gradient is not None and gradient.shape != parameter.shape:
        raise RuntimeError(
            f"{name_of(parameter, group)} has a gradient of shape {tuple(gradient.shape)}, expected the "
            "parameter's; the parameter or its gradient was given other data after backward, so call zero_grad()"
        )
    now = kind_of(local(parameter))
    if record is not None and record.kind != now:
        raise RuntimeError(
            f"{name_of(parameter, group)} was {_described(*record.kind)} when the optimizer first updated it and is "
            f"{_described(*now)} now; move or convert the model before the first step, or save "
            "optimizer.state_dict(), build a new optimizer and load it there"
        )
    extra = {} if record is None else rule.extra(group)
    missing = [field for field in extra if record is not None and field not in record.arena.format.names]
    if missing:
        setting, field = extra[missing[0]], missing[0]
        raise RuntimeError(
            f"{name_of(parameter, group)}: found {setting}, set after the optimizer first updated it, so that its "
            f"state has no {field!r}; set it back, or save optimizer.state_dict(), build a new optimizer, load it "
            f"there and set {setting} before its first step"
        )
    if devices.awaits(parameter):
        raise RuntimeError(
            f"{name_of(parameter, group)} is on the host, and the optimizer was built with device={devices.requested}; "
            "call optimizer.attach(model, weights=...) before the first forward, with which weights are on the device "
            "while they are used, or move the model there"
        )
    check_kind(parameter, group, devices, rule)
    problem = rule.problem(entry, parameter)
    if problem:
        raise ValueError(f"{name_of(parameter, group)}: {problem}")


def check_kind(parameter: Tensor, group: Group, devices: DeviceFinder, rule: Rule) -> None:
    """Raise TypeError or ValueError, naming the parameter, if it cannot be optimised.

    A search through the group finds the name.
    """
    mine = local(parameter)
    if is_wrapper(mine):
        raise TypeError(
            f"{name_of(parameter, group)}: expected a plain tensor, a DTensor, or a wrapper of one dense tensor of the "
            f"same shape and dtype, found {type(mine).__name__}; leave quantised parameters out, as LoRA does"
        )
    if mine.is_inference():
        raise TypeError(
            f"{name_of(parameter, group)} was made in torch.inference_mode, where nothing can be trained; build the "
            "model outside of it"
        )
    if mine.layout != torch.strided:
        raise TypeError(f"{name_of(parameter, group)}: expected a dense parameter, found layout {mine.layout}")
    if mine.dtype not in FLOATS:
        number = mine.is_floating_point() or mine.is_complex()
        hint = "use torch.optim.AdamW for it" if number else "freeze it"
        raise TypeError(f"{name_of(parameter, group)}: expected a parameter of {_FLOATS}, found {mine.dtype}; {hint}")
    accelerated = devices.holds(parameter)
    if not accelerated and parameter.device.type != "cpu":
        raise ValueError(
            f"{name_of(parameter, group)} is on {parameter.device} and the optimizer's accelerator is "
            f"{devices.device}; DOSAdam updates the parameters of one accelerator, so load the model onto "
            "one (device_map='auto' spreads it over all), or build an optimizer for the parameters of each"
        )


def malformed(groups: Any, state: dict[Any, Any], settings: Collection[str]) -> str | None:
    """Return which of the param groups or entries of the state user code has made unlike torch's; None: none of them.

    settings: the names of those that each group needs.
    """
    for number, group in enumerate(groups if isinstance(groups, Collection) else [groups]):
        found = _group_problem(group, settings)
        if found:
            return (
                f"param group {number}: expected a dict of settings and a list of parameters, as add_param_group() "
                f"makes it, found {found}"
            )
    for parameter, entry in dict.items(state):
        if not isinstance(entry, Mapping):
            return (
                f"the entry of a parameter of shape {tuple(parameter.shape)} in optimizer.state must be a dict, found "
                f"{type(entry).__name__}; delete it to begin anew"
            )
    return None


def _group_problem(group: Any, settings: Collection[str]) -> str | None:
    if not isinstance(group, Mapping):
        return type(group).__name__
    missing = [name for name in ("params", *settings) if name not in group]
    if missing:
        return f"no {missing[0]!r}"
    found = group["params"]
    if not isinstance(found, Collection) or isinstance(found, Tensor):
        return type(found).__name__
    # Without waiting, which fails while a CUDA graph is captured.
    others = [each for each in members(found) if not isinstance(each, Tensor)]
    return f"{type(others[0]).__name__} among them" if others else None


def check_overlaps(members: Sequence[tuple[Tensor, Group]]) -> None:
    """Raise RuntimeError if two parameters with state share memory, where each would undo the other's update."""
    overlap = find_overlap([local(p).detach() for p, _ in members])
    if overlap is None:
        return
    one, other = (name_of(*members[i]) for i in overlap)
    if one == other:
        raise RuntimeError(
            f"{one} has elements that share memory, as `expand` makes them; give it memory of its own with .clone()"
        )
    raise RuntimeError(
        f"{one} and {other} share memory, so that each would undo the other's update; to tie two weights, make "
        "them one parameter (b.weight = a.weight), else give one of them memory of its own with .clone()"
    )


def name_of(parameter: Tensor, group: Group) -> str:
    """Return how messages call a parameter: its name if the group has names, else its position and shape."""
    position = next(i for i, p in enumerate(group["params"]) if p is parameter)
    names = group.get("param_names")
    return f"parameter {names[position]!r}" if names else f"parameter {position} of shape {tuple(parameter.shape)}"


def _described(device: torch.device, dtype: torch.dtype, shape: torch.Size, layout: Layout) -> str:
    order = "" if layout is None else f", its axes in the order {layout} in memory,"
    return f"{dtype} of shape {tuple(shape)}{order} on {device}"


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that share memory, or twice that of one whose own elements do, or None.

    Takes O(n log n) for dense tensors; a tensor with gaps is compared with every tensor in its range of addresses.
    """
    extents = sorted((*_extent(tensor), i) for i, tensor in enumerate(tensors) if tensor.numel())
    before: list[tuple[str, int, int, int]] = []
    for extent in extents:
        device, start, _, position = extent
        if _overlaps_itself(tensors[position]):
            return position, position
        before = [other for other in before if other[0] == device and other[2] > start]
        for *_, other in before:
            if np.shares_memory(_addresses(tensors[position]), _addresses(tensors[other])):
                return min(position, other), max(position, other)
        before.append(extent)
    return None


def _extent(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device, the first address and the address after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array at the tensor's addresses, on any device; numpy compares addresses and reads nothing."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of the tensor have one address."""
    if is_dense(tensor):
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return True
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    return int(offsets.unique().numel()) < tensor.numel()
