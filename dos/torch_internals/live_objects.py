"""Modules and optimizers of the process, by the garbage collector.

No hook runs when a parameter is replaced: `fully_shard` writes to `module._parameters`, past the hooks on registration
(`register_module_parameter_registration_hook`). Torch 2.6 to 2.13.
"""

from __future__ import annotations

import gc
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")


def objects_of(*kinds: type[_T]) -> list[_T]:
    """Return the objects of these classes that exist; takes some 50 ms."""
    # The list of all objects lives within one call, in which no other thread runs: as long as it refers to a tuple that
    # another thread makes of a generator, that raises SystemError in the other thread.
    types = set(map(type, chain.from_iterable(islice(iter(gc.get_objects, None), 1))))
    found = gc.get_referrers(*(each for each in types if issubclass(each, kinds)))
    return [each for each in found if issubclass(type(each), kinds)]


def parameters_of_all_modules() -> list[Tensor]:
    """Return the parameters of all modules of the process; takes some 50 ms."""
    modules = objects_of(nn.Module)
    # A module whose constructor has not run has no `_parameters`. By `dict`'s method, which waits for no update.
    found = (vars(module).get("_parameters", {}) for module in modules)
    each = (dict.values(own) if isinstance(own, dict) else own.values() for own in found)  # not, of scripted modules
    return [p for own in each for p in own if p is not None]


def parameters_of_all_optimizers() -> list[Tensor]:
    """Return the parameters of all optimizers of the process, ours included; takes as long."""
    found = objects_of(torch.optim.Optimizer)
    lists = [group["params"] for each in found for group in getattr(each, "param_groups", ())]
    # By the method of `list`, which waits for no update.
    return [p for each in lists for p in (list.__iter__(each) if isinstance(each, list) else each)]
