"""The order of a module's `__dict__`: what comes first is copied and pickled first. Torch 2.6 to 2.13.

Modules have no hook for that: those on `state_dict()` are not called. `__deepcopy__` and `__reduce_ex__` in the module
itself would take the place of what its class has.
"""

from __future__ import annotations

from torch import nn


def set_first(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute that comes before all others, above all the parameters."""
    object.__setattr__(module, "__dict__", {name: value, **vars(module)})
