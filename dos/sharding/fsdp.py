"""What of FSDP2 (`fully_shard`) is no public interface: its parameter groups, when each is gathered, what it replaces.

Read in torch 2.6 to 2.13: `torch/distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dos.sharding.local import is_sharded

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
    """Those that its parameters are of. While they run, they have gathered ones, which no optimizer sees."""
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


def find_replaced(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that got no gradient, are no module's any more, and have the shape of a DTensor that is.

    So `fully_shard` and `parallelize_module` leave the parameters that they were given. Without this search a model
    that was divided in part would train in part, silently: steps find gradients on the rest. It looks through all
    objects of the process if there can be such, which takes some 50 ms: to be asked once.
    """
    if "torch.distributed.tensor" not in sys.modules or not dist.is_initialized():
        return []
    candidates = [p for p in parameters if p.grad is None and p.requires_grad and not is_sharded(p)]
    if not candidates:
        return []
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    held = [p for module in modules for p in vars(module).get("_parameters", {}).values() if p is not None]
    names = {id(p) for p in held}
    shapes = {p.shape for p in held if is_sharded(p)}
    return [p for p in candidates if id(p) not in names and p.shape in shapes]
