"""Hooks on parameters, by which an optimizer learns that backward has written a gradient."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dos.torch_internals.tensors import first_counted, hook_again, hooks_after_accumulation, tensor_address


def hooks_of_others(leaf: Tensor) -> bool:
    """Return whether user code has hooks on the tensor that are called when its `grad` was written, and read it."""
    hooks = hooks_after_accumulation(leaf)
    return hooks is not None and bool(hooks) and set(map(_module, hooks.values())) != _OURS


def first_hooked(leaves: Iterable[Tensor]) -> Tensor | None:
    """Return the first of these tensors on which user code has such hooks; None if there is none."""
    # In one loop: each backward that updates asks of all parameters, and almost all have one hook, ours.
    for leaf in leaves:
        hooks = hooks_after_accumulation(leaf)
        for hook in () if hooks is None else hooks.values():
            if hook.__module__ != __name__:
                return leaf
    return None


def check_hooks(parameters: Collection[Tensor]) -> None:
    """Raise ValueError if user code has a hook on one of the parameters for which a copy in its place has the gradient.

    Such a hook reads `p.grad`, or counts the parameters that get a gradient.
    """
    found = first_hooked(parameters)
    if found is not None:
        raise ValueError(
            f"a parameter of shape {tuple(found.shape)} of a block has a hook of "
            "register_post_accumulate_grad_hook(), which would find no p.grad: with weights= backward writes the "
            "gradient of a copy, which then moves to the host; use parameter.register_hook(), or "
            "optimizer.edit_gradients() before step()"
        )
    found = first_counted(parameters)
    if found is not None:
        raise ValueError(
            f"a parameter of shape {tuple(found.shape)} of a block has a hook of register_multi_grad_hook(), which "
            "counts the parameters whose gradients backward writes: with weights= it writes that of a copy; use "
            "mode='any', parameter.register_hook(), or optimizer.edit_gradients() before step()"
        )


_module: Callable[[object], Any] = operator.attrgetter("__module__")
_OURS = {__name__}
"""The module of all hooks of this package on gradients."""


class _Hook(NamedTuple):
    """The hooks of one parameter, and the address of torch's own tensor to whose `grad` backward writes.

    handles: of the hook there, and of the one on the parameter, if that is another tensor.
    """

    handles: tuple[RemovableHandle, ...]
    address: int

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


_last: weakref.WeakValueDictionary[int, Watching] = weakref.WeakValueDictionary()
"""The instance that began last to watch each parameter, by the parameter's id."""


def latest_watcher(parameter: Tensor) -> Any:
    """Return the watcher of the instance that began last to watch this parameter; None: none watches it."""
    found = _last.get(id(parameter))
    return None if found is None or parameter not in found._watched else found._watcher()


class Watching:
    """The hooks on the gradients of one optimizer's parameters, until the `watcher` is collected."""

    def __init__(self, watcher: Any, *, takes: bool) -> None:
        """watcher: the session; `gradient_ready` gets the parameter and the tensor to whose `grad` backward wrote.

        takes: whether that sets `grad` to None.
        """
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
        return [watcher for other in list(self._sharing) if (watcher := other._watcher()) is not None]

    def watch(self, parameter: Tensor, wanted: bool) -> None:
        """Call the watcher each time backward has written to the gradient, if `wanted`; else stop that.

        An earlier optimizer that takes the gradient away no longer does: most likely user code has replaced it, and the
        garbage collector has not collected it yet.
        """
        if not wanted and parameter in self._watched:
            self._watched.pop(parameter).remove()
        if not wanted or parameter in self._watched:
            return
        earlier = _last.get(id(parameter))
        # Where its weights stream it goes on: it alone can get the gradients of copies.
        streams = earlier is not None and parameter in earlier._leaves
        if earlier is not None and earlier._takes and parameter in earlier._watched and not streams:
            earlier._watched[parameter].remove()
        for other in {earlier, *earlier._sharing} - {self} if earlier is not None else ():
            other._sharing.add(self)
            self._sharing.add(other)
        # Another parameter may get this id later: readers check that the watcher has the parameter.
        _last[id(parameter)] = self
        if not parameter.requires_grad:
            return
        leaf = self._leaf(parameter)
        # Of the parameter, too: user code may use it in the graph beside its copy, as a penalty on all weights does.
        leaves = (leaf,) if leaf is parameter else (leaf, parameter)
        handles = tuple(self._hook(each, None if leaf is parameter else parameter) for each in leaves)
        self._watched[parameter] = _Hook(handles, tensor_address(leaf))

    def _hook(self, leaf: Tensor, home: Tensor | None) -> RemovableHandle:
        """Hook the gradient of `leaf`. home: the parameter of which this is a copy, if it is one."""
        # A hook that refers to its own parameter is a cycle.
        reference = self._watcher

        def report(written: Tensor) -> None:
            alive = reference()
            if home is not None and not home.requires_grad:
                written.grad = None  # frozen since the forward: autograd would drop the gradient of a plain parameter
            elif alive is not None:
                alive.gradients.gradient_ready(written if home is None else home, written)

        return leaf.register_post_accumulate_grad_hook(report)

    def watch_at(self, parameter: Tensor, leaf: Tensor) -> None:
        """Hook the gradient of `leaf` instead, to which backward writes the parameter's gradient from now on."""
        self.watch(parameter, wanted=False)
        self._leaves[parameter] = leaf
        self.watch(parameter, wanted=True)

    def _leaf(self, parameter: Tensor) -> Tensor:
        return self._leaves.get(parameter, parameter)

    def renew(self) -> list[Tensor]:
        """Hook again where torch has swapped tensors, and where an optimizer that took gradients away was collected.

        Returns the parameters of which backward may have written gradients without a hook. Raises RuntimeError if an
        optimizer that takes them away is still alive.
        """
        # `model.to()` swaps the tensors of DTensors: their hooks are still listed, and never called.
        elsewhere = bool(self._leaves)  # tensors are hashed in Python
        swapped = [
            p for p, hook in self._watched.items() if hook.address != tensor_address(self._leaf(p) if elsewhere else p)
        ]
        for parameter in swapped:
            hook_again(parameter)
            self._watched[parameter] = self._watched[parameter]._replace(address=tensor_address(parameter))
        if not self._takes:
            return swapped
        lost = {p: other for p in self._watched if (other := _last.get(id(p))) is not self}
        others = [p for p, other in lost.items() if other is not None and other._takes and p in other._watched]
        if others:
            raise RuntimeError(
                f"another optimizer, built later with offload_gradients=True, takes away the gradients of "
                f"{len(others)} of this one's parameters, the first of them of shape {tuple(others[0].shape)}; what is "
                "taken away serves one optimizer alone, so build both with offload_gradients=False, or delete the other"
            )
        unhooked = [p for p, other in lost.items() if other is None]
        for parameter in unhooked:
            self._watched.pop(parameter).remove()
            self.watch(parameter, wanted=True)
        return swapped + unhooked

    def keep(self, wanted: Collection[int] = ()) -> None:
        """Watch no parameters but those with these ids."""
        for parameter in [p for p in self._watched if id(p) not in wanted]:
            self._watched.pop(parameter).remove()
            self._leaves.pop(parameter, None)
