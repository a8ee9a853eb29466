"""What of FSDP2 (`fully_shard`) is no public interface: its parameter groups, and when each is gathered.

Read in torch 2.6 to 2.13: `torch/distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

_HOOKS = "_dos_before_gathering"


class ShardedGroup:
    """The parameters that one `fully_shard` gathers together."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def parameters(self) -> list[Tensor]:
        """The sharded ones, as the optimizer has them."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def modules(self) -> set[nn.Module]:
        """Those that the parameters are of. While they run, they have gathered ones, which no optimizer sees."""
        infos = [each._module_info for each in self._group.fsdp_params]
        return {module for info in infos for module in (info.module, *info.shared_modules)}

    def before_gathering(self, wait: Callable[[Sequence[Tensor]], None]) -> Callable[[], None]:
        """Call `wait` each time before the shards are read, on each stream that reads them; returns what ends that.

        All ways lead through the group's `unshard`: a module's forward, what FSDP prefetches from there, and
        `module.unshard()`, as pipelines call it.
        """
        group = self._group
        if _HOOKS not in vars(group):
            hooks: list[Callable[[Sequence[Tensor]], None]] = []
            vars(group).update({_HOOKS: hooks, "unshard": _hooked(group, hooks)})
        hooks = vars(group)[_HOOKS]
        hooks.append(wait)

        def end() -> None:
            hooks.remove(wait)
            if not hooks and vars(group).get(_HOOKS) is hooks:
                del group.unshard, vars(group)[_HOOKS]

        return end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedGroup) and self._group is other._group

    def __hash__(self) -> int:
        return id(self._group)


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """Those of a module that `fully_shard` was called for; none of any other."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = None if implementation is None else implementation._get_module_fsdp_state(module)
    if state is None:
        return []
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [ShardedGroup(group) for group in groups if group is not None]


def _hooked(group: Any, hooks: Sequence[Callable[[Sequence[Tensor]], None]]) -> Callable[..., Any]:
    """The group's `unshard`, after the hooks."""
    unshard = group.unshard

    @functools.wraps(unshard)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        parameters = ShardedGroup(group).parameters
        # The shards are copied into the all-gather's input on a stream of its own, which does not wait for the present
        # one. There is none before the first forward.
        apart = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)
        for wait in hooks:
            wait(parameters)
            if apart is not None:
                with group.device_handle.stream(apart):
                    wait(parameters)
        return unshard(*args, **kwargs)

    return hooked
