"""The hooks that users registered on an optimizer's `load_state_dict`. Torch 2.6 to 2.13.

torch's own `load_state_dict` calls them, and rounds state to the parameters' dtype, so that DOSAdam cannot use it.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Call the hooks before loading; return the state dict that they return."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def after_loading(optimizer: Optimizer) -> None:
    """Call the hooks after loading."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
