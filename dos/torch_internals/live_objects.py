"""Modules and optimizers of the process, by the garbage collector.

No hook runs when a parameter is replaced: `fully_shard` writes to `module._parameters`, past the hooks on registration
(`register_module_parameter_registration_hook`). Torch 2.6 to 2.13.
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn


def parameters_of_all_modules() -> list[Tensor]:
    """Return the parameters of all modules of the process; takes some 50 ms."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    # A module whose constructor has not run has no `_parameters`. By `dict`'s method, which waits for no update.
    found = (vars(module).get("_parameters", {}) for module in modules)
    each = (dict.values(own) if isinstance(own, dict) else own.values() for own in found)  # not, of scripted modules
    return [p for own in each for p in own if p is not None]


def modules_of(kind: type[nn.Module]) -> list[nn.Module]:
    """Return the modules of a class that exist; takes some 50 ms."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def parameters_of_all_optimizers() -> list[Tensor]:
    """Return the parameters of all optimizers of the process, ours included; takes as long."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    lists = [group["params"] for each in found for group in getattr(each, "param_groups", ())]
    # By the method of `list`, which waits for no update.
    return [p for each in lists for p in (list.__iter__(each) if isinstance(each, list) else each)]
