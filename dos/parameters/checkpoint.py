"""Loading state dicts: everything is checked before anything changes, and nothing is rounded on the way."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dos.options import check_settings
from dos.parameters.admission import Group, name_of, state_problem
from dos.sharding.local import to_host


def makes_state() -> bool:
    """Whether the step that calls this is that by which torch.distributed.checkpoint makes a fresh optimizer's state.

    It gives all parameters zeros for gradients, and lr is 0. AdamW counts it, and corrects the next step's bias for it.
    Who calls is asked, for values do not tell: those of a warm-up's first step may be the same, on some ranks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        known = frame.f_code.co_name == "_init_optim_state"
        if known and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any], state_format: str | None = None) -> None:
    """What `Optimizer.load_state_dict` does, hooks included, except that state keeps its precision.

    torch casts state to the parameter's dtype, which would round float32 moments and masters of bfloat16 parameters.
    Tensors are copied into the optimizer's own memory at the next step.

    state_format: of the optimizer.
    Raises ValueError naming the first parameter that does not match.
    """
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict

    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(f"an optimizer's state dict has 'state' and 'param_groups', found {sorted(state_dict)}")
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
        for key, value in group.items():
            saved_group.setdefault(key, value)  # settings that the saving version did not know
        # How to decay and how to run are this optimizer's own choice, as AdamW has it.
        for key in ("decoupled_weight_decay", "capturable", "differentiable"):
            saved_group[key] = group[key]
        saved_group["params"] = group["params"]
        check_settings(saved_group, f"param group {number} of the state dict", state_format)
        ids = state_dict["param_groups"][number]["params"]
        by_id.update(zip(ids, zip(group["params"], itertools.repeat(group)), strict=False))

    state: defaultdict[Any, Any] = defaultdict(dict)
    for saved_id, entry in state_dict["state"].items():
        if saved_id not in by_id:
            state[saved_id] = entry
            continue
        parameter, group = by_id[saved_id]
        problem = state_problem(entry, parameter)
        if problem:
            raise ValueError(f"{name_of(parameter, group)}: {problem}")
        # At once, for a checkpoint that was loaded to the accelerator may fill it.
        state[parameter] = {key: to_host(value) if isinstance(value, Tensor) else value for key, value in entry.items()}

    optimizer.__setstate__({"state": state, "param_groups": saved})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
