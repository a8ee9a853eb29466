"""FSDP2's private state (`torch/distributed/fsdp/_fully_shard`): its parameter groups, and hooks before all-gathers.

`FSDPModule.unshard` is public, but neither a forward nor a prefetch calls it. FSDP2 calls the function of
`set_custom_all_gather` (not in 2.6) after it has read the shards. Torch 2.6 to 2.13; in 2.6 a module has one group, in
2.13 several.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_WAITING = "_dos_waiting"


def sharded_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups, one for each `fully_shard` of the model or of a module in it."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    groups: dict[Any, None] = {}
    for module in model.modules() if implementation is not None else ():
        state = implementation._get_module_fsdp_state(module)  # type: ignore[union-attr]
        if hasattr(state, "_fsdp_param_groups"):
            groups |= dict.fromkeys(state._fsdp_param_groups)
        else:
            groups[getattr(state, "_fsdp_param_group", None)] = None
    return [group for group in groups if group is not None]


def reduced_before_hooks(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that FSDP2 divides and whose hooks it calls when ranks have reduced a gradient.

    Not those that its CPUOffloadPolicy keeps on the host: hooks make it wait for each copy of a gradient.
    """
    found = [each for group in sharded_groups(model) for each in group.fsdp_params]
    return {id(each.sharded_param) for each in found if not each.offload_to_cpu}


def modules_of(group: Any) -> set[nn.Module]:
    """Return the modules of the group's parameters. While they run, they have gathered parameters instead."""
    infos = [each._module_info for each in group.fsdp_params]
    return {module for info in infos for module in (info.module, *info.shared_modules)}


def wait_before_gathering(group: Any, waits: Any) -> None:
    """Call `waits.before_gathering(parameters)` each time before shards are read, on each stream that reads them.

    It lasts until `end_waiting`, or until `waits` is collected. All callers use the group's `unshard`: a module's
    forward, prefetches of FSDP2, and `module.unshard()`, as pipelines call it.
    """
    if _WAITING not in vars(group):
        waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        vars(group).update({_WAITING: waiting, "unshard": _waits_first(group, waiting)})
    vars(group)[_WAITING].add(waits)


def end_waiting(group: Any, waits: Any) -> None:
    """Undo `wait_before_gathering`."""
    waiting = vars(group).get(_WAITING)
    if waiting is not None:
        waiting.discard(waits)
        if not waiting:
            del group.unshard, vars(group)[_WAITING]


def _waits_first(group: Any, waiting: weakref.WeakSet[Any]) -> Callable[..., Any]:
    """Return a function that waits, then calls the group's `unshard`."""
    unshard = group.unshard

    @functools.wraps(unshard)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        parameters = [each.sharded_param for each in group.fsdp_params]  # the parameters that the optimizer has
        # FSDP2 copies shards into the all-gather's input on another stream, which does not wait for the present one, so
        # that both must wait. It does not exist before the first forward.
        apart = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)
        for waits in list(waiting):
            waits.before_gathering(parameters)
            if apart is not None:
                with group.device_handle.stream(apart):
                    waits.before_gathering(parameters)
        return unshard(*args, **kwargs)

    return hooked
