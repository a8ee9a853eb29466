"""A module's `_parameters`, from which code reads its parameters, and `_apply`, by which it moves.

Torch 2.6 to 2.13.

Modules have no hook for either. FSDP2 replaces parameters in the same way (`_fsdp_param.py`, `unsafe_setattr_param`).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class WatchedParameters(dict[str, Any]):
    """A module's parameters by name; `before_reading` is called before any is read. A copy is a plain dict."""

    def __init__(self, parameters: dict[str, Any], before_reading: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._before_reading = before_reading

    def __getitem__(self, name: str) -> Any:
        self._before_reading()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._before_reading()
        return super().get(name, default)

    def items(self) -> Any:
        self._before_reading()
        return super().items()

    def values(self) -> Any:
        self._before_reading()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        # Not left out: dict(self), {**self} and copy() go past all methods of a subclass that has dict's iterator.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def watch_parameters(module: nn.Module, before_reading: Callable[[], None]) -> None:
    """Call `before_reading` before the module's own parameters are read."""
    vars(module)["_parameters"] = WatchedParameters(own_parameters(module), before_reading)


def unwatch_parameters(module: nn.Module) -> None:
    """Undo `watch_parameters`."""
    vars(module)["_parameters"] = dict(own_parameters(module))


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the module's own parameters by name, without calling `before_reading`."""
    return dict(dict.items(vars(module)["_parameters"]))


def parameters_of(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    """Return `module.parameters()` as a list, without calling `before_reading`."""
    modules = module.modules() if recurse else (module,)
    found = (p for each in modules for p in own_parameters(each).values() if p is not None)
    return list({id(p): p for p in found}.values())


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the model's buffers, and no parameters, to a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def exchange(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Replace the module's parameter of this name."""
    # Not by `register_parameter`, which checks, and could move the name to the end: state dicts would have another
    # order while a block runs.
    if type(module).__setattr__ is nn.Module.__setattr__:
        vars(module)["_parameters"][name] = parameter
    else:  # nn.GRU, for one, has a list of its weights besides
        setattr(module, name, parameter)


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists, dicts and other containers that torch knows."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


class _Refusal:
    """A replacement of `module._apply` that raises; a copy or pickle of the module gets the method of its class."""

    def __init__(self, module: nn.Module, refuse: Callable[[], None]) -> None:
        # Weak: the module refers to this, and a cycle would leave its memory to the garbage collector.
        self._module, self._refuse = weakref.ref(module), refuse

    def __call__(self, *_: object, **__: object) -> Any:
        self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        return types.MethodType, (nn.Module._apply if module is None else type(module)._apply, module)


def refuse_to_move(module: nn.Module, refuse: Callable[[], None]) -> None:
    """Make `to`, `cuda`, `half` and similar methods call `refuse` instead, which raises."""
    vars(module)["_apply"] = _Refusal(module, refuse)


def let_move(module: nn.Module) -> None:
    """Undo `refuse_to_move`."""
    vars(module).pop("_apply", None)
