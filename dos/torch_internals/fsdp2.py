"""FSDP2's private state (`torch/distributed/fsdp/_fully_shard`): its parameter groups, and when each is gathered.

`FSDPModule.unshard` is public, but neither a forward nor a prefetch calls it. What `set_custom_all_gather` sets (not in
2.6) is called when shards have been read. Torch 2.6 to 2.13; in 2.6 a module has one group, in 2.13 several.
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
    """FSDP2's parameter groups, each of what one `fully_shard` of the model or of a module in it gathers together."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    groups: dict[Any, None] = {}
    for module in model.modules() if implementation is not None else ():
        state = implementation._get_module_fsdp_state(module)  # type: ignore[union-attr]
        if hasattr(state, "_fsdp_param_groups"):
            groups |= dict.fromkeys(state._fsdp_param_groups)
        else:
            groups[getattr(state, "_fsdp_param_group", None)] = None
    return [group for group in groups if group is not None]


def modules_of(group: Any) -> set[nn.Module]:
    """The modules that its parameters are of. While they run, they have gathered ones, which no optimizer sees."""
    infos = [each._module_info for each in group.fsdp_params]
    return {module for info in infos for module in (info.module, *info.shared_modules)}


def wait_before_gathering(group: Any, waits: Any) -> None:
    """Call `waits.before_gathering(parameters)` each time before shards are read, on each stream that reads them.

    Until `end_waiting`, or until it is gone. All ways lead through the group's `unshard`: a module's forward, what FSDP
    prefetches from there, and `module.unshard()`, as pipelines call it.
    """
    if _WAITING not in vars(group):
        waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        vars(group).update({_WAITING: waiting, "unshard": _waits_first(group, waiting)})
    vars(group)[_WAITING].add(waits)


def end_waiting(group: Any, waits: Any) -> None:
    """The end of `wait_before_gathering`."""
    waiting = vars(group).get(_WAITING)
    if waiting is not None:
        waiting.discard(waits)
        if not waiting:
            del group.unshard, vars(group)[_WAITING]


def _waits_first(group: Any, waiting: weakref.WeakSet[Any]) -> Callable[..., Any]:
    """The group's `unshard`, after those that wait."""
    unshard = group.unshard

    @functools.wraps(unshard)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        parameters = [each.sharded_param for each in group.fsdp_params]  # as the optimizer has them
        # The shards are copied into the all-gather's input on a stream of its own, which does not wait for the present
        # one. There is none before the first forward.
        apart = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)
        for waits in list(waiting):
            waits.before_gathering(parameters)
            if apart is not None:
                with group.device_handle.stream(apart):
                    waits.before_gathering(parameters)
        return unshard(*args, **kwargs)

    return hooked
