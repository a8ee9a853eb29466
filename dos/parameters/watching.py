"""Hooks on parameters: which gradients an optimizer watches become final in backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class _Hook(NamedTuple):
    """Of one parameter. watcher: what it calls. implementation: the address of torch's own tensor."""

    handle: RemovableHandle
    watcher: weakref.ref[Any]
    implementation: int


_takers: dict[int, _Hook] = {}
"""The hooks whose optimizer takes a parameter's gradient away, by the parameter's id."""


class Watching:
    """The hooks on the gradients of one optimizer's parameters, until there is no `watcher` any more."""

    def __init__(self, watcher: Any, *, takes: bool) -> None:
        """watcher: whose `gradient_ready` is called with the parameter. takes: whether it takes the gradients away."""
        self._watcher = weakref.ref(watcher)  # parameters must not keep their optimizer alive
        self._takes = takes
        self._watched: dict[Tensor, _Hook] = {}
        weakref.finalize(watcher, self.keep)

    def watch(self, parameter: Tensor, wanted: bool) -> None:
        """Call the watcher each time backward has written to the gradient, if that is wanted.

        An earlier optimizer that takes the gradient away no longer does: most likely it was replaced, and the garbage
        collector has not come to it yet.
        """
        if not wanted and parameter in self._watched:
            self._watched.pop(parameter).handle.remove()
        if not wanted or parameter in self._watched:
            return
        earlier = _takers.pop(id(parameter), None)
        if earlier is not None:
            earlier.handle.remove()  # does nothing if it was a hook of a parameter that is no more
        if not parameter.requires_grad:
            return
        reference = self._watcher

        def report(parameter: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive.gradient_ready(parameter)

        hook = _Hook(parameter.register_post_accumulate_grad_hook(report), reference, parameter._cdata)
        self._watched[parameter] = hook
        if self._takes:
            _takers[id(parameter)] = hook

    def renew(self) -> None:
        """Hook again where torch has swapped tensors, and where another optimizer took gradients away that is gone.

        Raises RuntimeError if another one does that is still there.
        """
        # `model.to()` swaps the tensors of DTensors: their hooks are still listed, and never called.
        for parameter in [p for p, hook in self._watched.items() if hook.implementation != p._cdata]:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
            self._watched[parameter] = self._watched[parameter]._replace(implementation=parameter._cdata)
        if not self._takes:
            return
        takers = {p: _takers[id(p)].watcher() for p in self._watched if id(p) in _takers}
        lost = {p: other for p, other in takers.items() if other is not self._watcher()}
        others = [parameter for parameter, other in lost.items() if other is not None]
        if others:
            raise RuntimeError(
                f"another optimizer, built later with offload_gradients=True, takes away the gradients of "
                f"{len(others)} of this one's parameters, the first of them of shape {tuple(others[0].shape)}; what is "
                "taken away serves one optimizer alone, so build both with offload_gradients=False, or delete the other"
            )
        for parameter in lost:
            self._watched.pop(parameter).handle.remove()
            self.watch(parameter, wanted=True)

    def keep(self, wanted: Collection[int] = ()) -> None:
        """Watch no parameters but those with these ids."""
        for parameter in [p for p in self._watched if id(p) not in wanted]:
            self._watched.pop(parameter).handle.remove()
