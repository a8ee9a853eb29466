"""The order of a module's `__dict__`: the first attribute is copied and pickled first. Torch 2.6 to 2.13.

Modules have no hook for copies: hooks on `state_dict()` do not run. `__deepcopy__` and `__reduce_ex__` in the module
itself would replace the methods of its class.
"""

from __future__ import annotations

from torch import nn


def set_first(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute before all others, in particular before the parameters."""
    object.__setattr__(module, "__dict__", {name: value, **vars(module)})
