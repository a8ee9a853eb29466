"""Hooks on parameters: which gradients an optimizer watches become final in backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dos.torch_internals.tensors import hook_again, tensor_address


class _Hook(NamedTuple):
    """Of one parameter. address: of torch's own tensor, which has the hook."""

    handle: RemovableHandle
    address: int


_last: weakref.WeakValueDictionary[int, Watching] = weakref.WeakValueDictionary()
"""The last to watch each parameter, by its id."""


class Watching:
    """The hooks on the gradients of one optimizer's parameters, until there is no `watcher` any more."""

    def __init__(self, watcher: Any, *, takes: bool) -> None:
        """watcher: whose `gradient_ready` is called with the parameter. takes: whether it takes the gradients away."""
        self._watcher = weakref.ref(watcher)  # parameters must not keep their optimizer alive
        self._takes = takes
        self._watched: dict[Tensor, _Hook] = {}
        self._leaves: dict[Tensor, Tensor] = {}
        """Where backward writes gradients, if that is another tensor than the parameter."""
        self._sharing: weakref.WeakSet[Watching] = weakref.WeakSet()
        """The other instances that watch, or have watched, any of these."""
        # Parameters outlive their optimizer, and each backward would call its hooks in vain.
        weakref.finalize(watcher, self.keep)

    def __len__(self) -> int:
        """How many parameters are watched."""
        return len(self._watched)

    def others(self) -> list[Any]:
        """The watchers that have any of these parameters, too."""
        found = (other._watcher() for other in list(self._sharing))
        return [watcher for watcher in found if watcher is not None]

    def watch(self, parameter: Tensor, wanted: bool) -> None:
        """Call the watcher each time backward has written to the gradient, if that is wanted.

        An earlier optimizer that takes the gradient away no longer does: most likely it was replaced, and the garbage
        collector has not come to it yet.
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
        # Another parameter may get this id later: who asks looks whether the watcher has that one.
        _last[id(parameter)] = self
        if not parameter.requires_grad:
            return
        reference, leaf = self._watcher, self._leaf(parameter)
        home = None if leaf is parameter else parameter  # a parameter whose hook has it would never be freed

        def report(written: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive.gradient_ready(written if home is None else home)

        self._watched[parameter] = _Hook(leaf.register_post_accumulate_grad_hook(report), tensor_address(leaf))

    def watch_at(self, parameter: Tensor, leaf: Tensor) -> None:
        """Watch the parameter from now on where backward writes its gradient."""
        self.watch(parameter, wanted=False)
        self._leaves[parameter] = leaf
        self.watch(parameter, wanted=True)

    def _leaf(self, parameter: Tensor) -> Tensor:
        return self._leaves.get(parameter, parameter)

    def renew(self) -> None:
        """Hook again where torch has swapped tensors, and where another optimizer took gradients away that is gone.

        Raises RuntimeError if another one does that is still there.
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
