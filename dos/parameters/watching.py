"""Hooks on parameters, by which an optimizer learns that backward has written a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dos.torch_internals.tensors import hook_again, tensor_address


class _Hook(NamedTuple):
    """A hook on one parameter. address: of torch's own tensor, which has the hook."""

    handle: RemovableHandle
    address: int


_last: weakref.WeakValueDictionary[int, Watching] = weakref.WeakValueDictionary()
"""The instance that began last to watch each parameter, by the parameter's id."""


class Watching:
    """The hooks on the gradients of one optimizer's parameters, until the `watcher` is collected."""

    def __init__(self, watcher: Any, *, takes: bool) -> None:
        """watcher: its `gradient_ready` is called with the parameter. takes: whether that sets `grad` to None."""
        self._watcher = weakref.ref(watcher)  # parameters must not keep their optimizer alive
        self._takes = takes
        self._watched: dict[Tensor, _Hook] = {}
        self._leaves: dict[Tensor, Tensor] = {}
        """The tensor to whose `grad` backward writes, by parameter, where it is another than the parameter."""
        self._sharing: weakref.WeakSet[Watching] = weakref.WeakSet()
        """The other instances that watch, or have watched, any of these parameters."""
        # Parameters outlive their optimizer, and each backward would call its hooks in vain.
        weakref.finalize(watcher, self.keep)

    def __len__(self) -> int:
        """Return the number of parameters that are watched."""
        return len(self._watched)

    def others(self) -> list[Any]:
        """Return the other watchers that have any of these parameters, too."""
        found = (other._watcher() for other in list(self._sharing))
        return [watcher for watcher in found if watcher is not None]

    def watch(self, parameter: Tensor, wanted: bool) -> None:
        """Call the watcher each time backward has written to the gradient, if `wanted`; else stop that.

        An earlier optimizer that takes the gradient away no longer does: most likely user code has replaced it, and the
        garbage collector has not collected it yet.
        """
        if not wanted and parameter in self._watched:
            self._watched.pop(parameter).handle.remove()
        if not wanted or parameter in self._watched:
            return
        earlier = _last.get(id(parameter))
        if earlier is not None and earlier._takes and parameter in earlier._watched:
            earlier._watched[parameter].handle.remove()
        for other in {earlier, *earlier._sharing} - {self} if earlier is not None else ():
            other._sharing.add(self)
            self._sharing.add(other)
        # Another parameter may get this id later: readers check that the watcher has the parameter.
        _last[id(parameter)] = self
        if not parameter.requires_grad:
            return
        reference, leaf = self._watcher, self._leaf(parameter)
        home = None if leaf is parameter else parameter  # a hook that refers to its own parameter is a cycle

        def report(written: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive.gradient_ready(written if home is None else home)

        self._watched[parameter] = _Hook(leaf.register_post_accumulate_grad_hook(report), tensor_address(leaf))

    def watch_at(self, parameter: Tensor, leaf: Tensor) -> None:
        """Hook the gradient of `leaf` instead, to which backward writes the parameter's gradient from now on."""
        self.watch(parameter, wanted=False)
        self._leaves[parameter] = leaf
        self.watch(parameter, wanted=True)

    def _leaf(self, parameter: Tensor) -> Tensor:
        return self._leaves.get(parameter, parameter)

    def renew(self) -> None:
        """Hook again where torch has swapped tensors, and where an optimizer that took gradients away was collected.

        Raises RuntimeError if an optimizer that takes them away is still alive.
        """
        # `model.to()` swaps the tensors of DTensors: their hooks are still listed, and never called.
        for parameter in [p for p, hook in self._watched.items() if hook.address != tensor_address(self._leaf(p))]:
            hook_again(parameter)
            self._watched[parameter] = self._watched[parameter]._replace(address=tensor_address(parameter))
        if not self._takes:
            return
        lost = {p: other for p in self._watched if (other := _last.get(id(p))) is not self}
        others = [p for p, other in lost.items() if other is not None and other._takes and p in other._watched]
        if others:
            raise RuntimeError(
                f"another optimizer, built later with offload_gradients=True, takes away the gradients of "
                f"{len(others)} of this one's parameters, the first of them of shape {tuple(others[0].shape)}; what is "
                "taken away serves one optimizer alone, so build both with offload_gradients=False, or delete the other"
            )
        for parameter in [p for p, other in lost.items() if other is None]:
            self._watched.pop(parameter).handle.remove()
            self.watch(parameter, wanted=True)

    def keep(self, wanted: Collection[int] = ()) -> None:
        """Watch no parameters but those with these ids."""
        for parameter in [p for p in self._watched if id(p) not in wanted]:
            self._watched.pop(parameter).handle.remove()
            self._leaves.pop(parameter, None)
