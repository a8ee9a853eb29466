"""What can be optimised: parameters, their gradients, and state that users bring."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dos.devices import DeviceFinder
from dos.kernels.adam import FLOATS
from dos.sharding.local import is_sharded, local
from dos.state.entries import CODE_TYPES, MAX_KEY, has_codes, in_blocks, scale_shape
from dos.state.record import Layout, ParameterRecord, kind_of
from perfmodel.format import BLOCK, NEEDED_KEYS, STATE_KEYS

Group = dict[str, Any]
_FLOATS = ", ".join(map(str, FLOATS))


def check_parameter(
    parameter: Tensor, group: Group, entry: Mapping[str, Any], record: ParameterRecord | None, devices: DeviceFinder
) -> None:
    """Raise unless the parameter can be optimised and its gradient and state can be used.

    record: if it has one it must be what it was then.
    """
    gradient = parameter.grad
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
    if record is not None and group["amsgrad"] and not record.arena.amsgrad:
        raise RuntimeError(
            f"{name_of(parameter, group)}: found amsgrad=True, and amsgrad=False when the optimizer first updated it, "
            f"so that its state has no {MAX_KEY!r}; set amsgrad back to False, or save optimizer.state_dict(), build "
            "a new optimizer, load it there and set amsgrad=True before its first step"
        )
    check_kind(parameter, group, devices)
    problem = state_problem(entry, parameter)
    if problem:
        raise ValueError(f"{name_of(parameter, group)}: {problem}")


def check_kind(parameter: Tensor, group: Group, devices: DeviceFinder) -> None:
    """Raise TypeError or ValueError, naming the parameter, if it cannot be optimised.

    The name takes a search through the group.
    """
    mine = local(parameter)
    wraps: bool = is_traceable_wrapper_subclass(mine)
    if wraps:
        raise TypeError(
            f"{name_of(parameter, group)}: expected a plain tensor or a DTensor, found {type(mine).__name__}; other "
            "wrappers of tensors are not supported"
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
    if not devices.holds(parameter) and parameter.device.type != "cpu":
        raise ValueError(
            f"{name_of(parameter, group)} is on {parameter.device} and the optimizer's accelerator is "
            f"{devices.found}; DOSAdam updates the parameters of one accelerator, so load the model onto "
            "one (device_map='auto' spreads it over all), or build an optimizer for the parameters of each"
        )


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
    """How messages call a parameter: its name if the group has names, else its position and shape."""
    position = next(i for i, p in enumerate(group["params"]) if p is parameter)
    names = group.get("param_names")
    return f"parameter {names[position]!r}" if names else f"parameter {position} of shape {tuple(parameter.shape)}"


def state_problem(entry: Mapping[str, Any], parameter: Tensor) -> str | None:
    """What keeps `entry` from being AdamW's state of this parameter; None if it is, or is empty."""
    if not entry:
        return None
    for key in ("step", *(moment for moment in NEEDED_KEYS if not has_codes(entry, moment))):
        if entry.get(key) is None:
            there = sorted(name for name, value in entry.items() if value is not None)
            return f"its state has {there} but no {key!r}; expected the state of AdamW or DOSAdam"
    for key in STATE_KEYS:
        value = entry.get(key)
        if value is None:
            continue
        if key in CODE_TYPES and not in_blocks(parameter.shape):
            return f"its state has {key!r}, but shape {tuple(parameter.shape)} is not whole blocks of {BLOCK} elements"
        expected = scale_shape(parameter.shape) if key.endswith("_scales") else tuple(parameter.shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
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
    step = entry["step"]
    if not (isinstance(step, numbers.Real) or (isinstance(step, Tensor) and step.numel() == 1)):
        return f"its state 'step' must be one number, found {step!r}"
    if not float(step) >= 0:
        return f"its state 'step' must be 0 or more, found {float(step)}"
    return None


def _described(device: torch.device, dtype: torch.dtype, shape: torch.Size, layout: Layout) -> str:
    order = "" if layout is None else f", its axes in the order {layout} in memory,"
    return f"{dtype} of shape {tuple(shape)}{order} on {device}"


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Positions of two tensors that have memory in common, or of one twice whose own elements do; None: there are none.

    For dense tensors in O(n log n); tensors with gaps are compared with all that lie in between.
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
    """The device, the first address and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's addresses, on any device, as numpy understands them; nothing is read there."""
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
    """Whether two elements of the tensor are one in memory."""
    found = torch._debug_has_internal_overlap(tensor)
    if found != 2:  # it is known
        return bool(found)
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    return int(offsets.unique().numel()) < tensor.numel()
