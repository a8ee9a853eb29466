"""A module's `_parameters`, from which code reads its parameters, and `_apply`, by which it moves.

Recurrent layers have a list of their weights besides, and weak references to these.

Torch 2.6 to 2.13.

Modules have no hook for either. FSDP2 replaces parameters in the same way (`_fsdp_param.py`, `unsafe_setattr_param`).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Watcher(Protocol):
    """Waits before user code reads parameters of a module."""

    def before_reading(self, parameters: Iterable[Any]) -> None:
        """Wait until these may be read and written. Entries may be None."""

    def before_reading_all(self, parameters: Iterable[Any]) -> dict[int, Tensor] | None:
        """Do the same where all are listed, as for a state dict, which few modules do in their forward.

        Returns the parameters to list in the place of others, by the ids of these; None: those that there are.
        """


class _WaitingParameters(dict[str, Any]):
    """A module's parameters by name, in the place of its own dict while watchers wait. A copy is a plain dict.

    plain: the module's own dict. watchers: called before any parameter is read.
    """

    # Not for good: methods in Python would slow all reading down, and a model that was compiled before it is attached
    # would be compiled again, because torch.compile has seen a plain dict.
    __slots__ = ("_changed", "_plain", "watchers")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self._plain, self._changed = plain, False
        self.watchers: set[Watcher] = set()

    @property
    def plain(self) -> dict[str, Any]:
        """The module's own dict, with what was written to this one."""
        if self._changed:
            self._plain.clear()
            self._plain.update(dict.items(self))
            self._changed = False
        return self._plain

    def __iter__(self) -> Iterator[str]:
        # Not left out: dict(self), {**self} and copy() go past all methods of a subclass that has dict's iterator.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _wrapped(name: str, *, reads: bool, writes: bool) -> Callable[..., Any]:
    """Return the method of `dict` of this name for `_WaitingParameters`."""
    method = getattr(dict, name)
    lists = name in ("items", "values")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        others = None
        if reads:
            for watcher in tuple(self.watchers):
                if lists:
                    others = watcher.before_reading_all(dict.values(self)) or others
                else:
                    watcher.before_reading(dict.values(self))
        if writes:
            self._changed = True
        if others is not None:
            return method({key: others.get(id(p), p) for key, p in dict.items(self)})
        return method(self, *args, **kwargs)

    return call


for _name in ("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault"):
    setattr(_WaitingParameters, _name, _wrapped(_name, reads=True, writes=_name in ("pop", "popitem", "setdefault")))
for _name in ("__setitem__", "__delitem__", "update", "clear", "__ior__"):
    setattr(_WaitingParameters, _name, _wrapped(_name, reads=False, writes=True))


def wait_before_reading(modules: Iterable[nn.Module], watcher: Watcher) -> None:
    """Call `watcher.before_reading` before these modules' own parameters are read, until `end_waiting`.

    Does nothing for scripted modules, which are read in C++.
    """
    for module in modules:
        found = vars(module).get("_parameters")
        if type(found) is not _WaitingParameters:
            if not isinstance(found, dict):
                continue
            found = vars(module)["_parameters"] = _WaitingParameters(found)
        found.watchers.add(watcher)


def end_waiting(modules: Iterable[nn.Module], watcher: Watcher) -> None:
    """Undo `wait_before_reading`. The last watcher leaves each module its own dict."""
    for module in modules:
        found = vars(module).get("_parameters")
        if type(found) is _WaitingParameters:
            found.watchers.discard(watcher)
            if not found.watchers:
                vars(module)["_parameters"] = found.plain


def ids_of_own(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of these modules' own parameters, without waiting; that of None may be among them."""
    found = set[int]()
    for module in modules:
        own = vars(module).get("_parameters")
        found.update(map(id, dict.values(own) if isinstance(own, dict) else module.parameters(recurse=False)))
    return found


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the module's own parameters by name, without waiting."""
    found = vars(module).get("_parameters")
    # Scripted modules have none, or a view of parameters in C++, which is no dict.
    return dict(dict.items(found) if isinstance(found, dict) else module.named_parameters(recurse=False))


def own_parameter(module: nn.Module, name: str) -> Any:
    """Return the module's own parameter of this name, without waiting; None if it has none."""
    found = vars(module).get("_parameters")
    return dict.get(found, name) if isinstance(found, dict) else own_parameters(module).get(name)


Links = Iterable[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]]
"""Modules, each with a name and the module below it of this name."""


def are_linked(links: Links) -> bool:
    """Return whether all these modules are alive and have the modules below them that they had."""
    for parent, name, child in links:  # in one loop, for each forward of a block asks
        above, below = parent(), child()
        if above is None or below is None or above._modules.get(name) is not below:
            return False
    return True


def parameters_of(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    """Return `module.parameters()` as a list, without waiting."""
    if not recurse:  # each time that a module runs
        own = own_parameters(module)
        return list({id(p): p for p in own.values() if p is not None}.values()) if own else []
    found = (p for each in module.modules() for p in own_parameters(each).values() if p is not None)
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
        return
    setattr(module, name, parameter)  # nn.GRU, for one, has a list of its weights besides
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
        # On a GPU the next forward would copy weights that are not those of the last one into memory of their own.
        references: list[Any] = module._flat_weight_refs
        references[module._flat_weights_names.index(name)] = weakref.ref(parameter)


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists, dicts and other containers that torch knows."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def hidden_tensors(arguments: Any, depth: int = 4) -> list[Tensor]:
    """Return the tensors in attributes of objects that torch does not know, such as those of a dataclass."""
    found: list[Tensor] = []
    for leaf in tree_leaves(arguments) if depth else ():
        if isinstance(leaf, Tensor | nn.Module | type | types.FunctionType | types.ModuleType):
            continue
        slots = [vars(kind).get("__slots__", ()) for kind in type(leaf).__mro__]
        names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        values = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in names)]
        found += [*tensors_in(values), *hidden_tensors(values, depth - 1)]
    return found


class _Refusal:
    """A replacement of `module._apply` that raises; a copy or pickle of the module gets the method of its class."""

    def __init__(self, module: nn.Module, refuse: Callable[[], None]) -> None:
        # Weak: the module refers to this, and a cycle would leave its memory to the garbage collector.
        self._module, self._refuse = weakref.ref(module), refuse

    def __call__(self, *_: object, **__: object) -> Any:
        self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        # By name, as pickle knows no type of methods. The copy has no attributes yet, so that this is of its class.
        return getattr, (self._module(), "_apply")


def refuse_to_move(module: nn.Module, refuse: Callable[[], None]) -> None:
    """Make `to`, `cuda`, `half` and similar methods call `refuse` instead, which raises."""
    vars(module)["_apply"] = _Refusal(module, refuse)


def let_move(module: nn.Module) -> None:
    """Undo `refuse_to_move`."""
    vars(module).pop("_apply", None)
