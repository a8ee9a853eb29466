"""Loading state dicts: all of it is checked before anything changes, and no value is rounded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dos.parameters.admission import Group, name_of
from dos.rules.base import Rule
from dos.sharding.local import to_host, version


def to_be_filled(optimizer: Optimizer, state_dict: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """Return the state dict with empty tensors of all formats as its state, for torch to merge with a full one.

    `load_state_dict` leaves out the tensors that torch has not filled.
    """
    state = dict(state_dict["state"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter.requires_grad:
            empty = {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **rule.empty_entry(parameter)}
            for tensor in empty.values():
                tensor._dos_version = version(tensor)  # type: ignore[attr-defined]
            state[number] = {**state.get(number, {}), **empty}
    return {**state_dict, "state": state}


def _is_unfilled(value: object) -> bool:
    """Return whether torch has put no value here: an unchanged tensor of `to_be_filled`, or an empty dict."""
    if isinstance(value, dict) and not value:
        return True
    given = getattr(value, "_dos_version", None)
    return given is not None and given == version(value)


def _misshapen(state_dict: Mapping[Any, Any]) -> str | None:
    """Return what has another form than in any optimizer's state dict; None if nothing has."""
    if not {"state", "param_groups"} <= state_dict.keys():
        return str(sorted(map(str, state_dict)))
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not (isinstance(state, Mapping) and isinstance(groups, list | tuple)):
        return f"them as {type(state).__name__} and {type(groups).__name__}"
    wrong = [each for each in (*state.values(), *groups) if not isinstance(each, Mapping)]
    wrong += [
        group.get("params") for group in groups if not wrong and not isinstance(group.get("params"), list | tuple)
    ]
    return f"{type(wrong[0]).__name__} in them" if wrong else None


def checked(optimizer: Optimizer, state_dict: dict[str, Any], rule: Rule) -> tuple[dict[Any, Any], list[Group]]:
    """Return the state and the groups that `Optimizer.load_state_dict` would make of a state dict, but not rounded.

    torch casts state to the parameter's dtype, which would round float32 moments and masters of bfloat16 parameters.
    Tensors are copied into the optimizer's own memory at the next step.

    Raises ValueError naming the first parameter that does not match.
    """
    wrong = _misshapen(state_dict)
    if wrong is not None:
        raise ValueError(f"an optimizer's state dict has 'state' and 'param_groups', found {wrong}")
    groups, saved = optimizer.param_groups, copy.deepcopy(state_dict["param_groups"])
    if len(groups) != len(saved):
        raise ValueError(f"the state dict has {len(saved)} param groups, the optimizer has {len(groups)}")
    by_id: dict[Any, tuple[Tensor, Group]] = {}
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            raise ValueError(
                f"param group {number} has {len(saved_group['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer"
            )
        rule.adopt(saved_group, group, f"param group {number} of the state dict")
        saved_group["params"] = group["params"]
        ids = state_dict["param_groups"][number]["params"]
        by_id.update(zip(ids, zip(group["params"], itertools.repeat(saved_group)), strict=False))

    state: dict[Any, Any] = {}
    for saved_id, loaded in state_dict["state"].items():
        if saved_id not in by_id:
            state[saved_id] = loaded
            continue
        parameter, group = by_id[saved_id]
        entry = {key: value for key, value in loaded.items() if not _is_unfilled(value)}
        if len(entry) < len(loaded) and entry.keys().isdisjoint(("step", *rule.keys)):
            entry = optimizer.state.get(parameter) or {}  # torch loads nothing for this parameter
            if not entry:
                continue
        problem = rule.problem(entry, parameter, group)
        if problem:
            raise ValueError(f"{name_of(parameter, group)}: {problem}")
        # At once, because a checkpoint that was loaded to the accelerator may fill its memory.
        state[parameter] = {key: to_host(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
    return state, saved
