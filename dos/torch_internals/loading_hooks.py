"""The hooks that users registered on an optimizer's `load_state_dict`, for one that loads without torch's. 2.6 to 2.13.

torch's own cannot be called: it rounds state to the parameters' dtype.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict as the hooks leave it."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def after_loading(optimizer: Optimizer) -> None:
    """Call the hooks for when all is loaded."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
