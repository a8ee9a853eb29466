"""Which parameters' gradients an optimizer watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dos.parameters.hooks import Hooks, hook_again, taker, watch_gradient


class Watching:
    """The hooks on the gradients of one optimizer's parameters. takes: whether it takes the gradients away."""

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes
        self._watched: dict[Tensor, Hooks] = {}

    def watch(self, parameter: Tensor, watcher: Any, wanted: bool) -> None:
        """Watch the parameter's gradient if that is wanted, and no longer if it is not."""
        if not wanted and parameter in self._watched:
            self._watched.pop(parameter).remove()
        elif wanted and parameter not in self._watched:
            hooks = watch_gradient(parameter, watcher, takes=self._takes)
            if hooks is not None:
                self._watched[parameter] = hooks

    def renew(self, watcher: Any, takes: bool) -> None:
        """Hook again where torch has swapped tensors, and where another optimizer took gradients away that is gone.

        Raises RuntimeError if another one does that is still there.
        """
        hook_again(self._watched)
        if not takes:
            return
        lost = {p: there() for p in self._watched if (there := taker(p)) is not None and there() is not watcher}
        others = [parameter for parameter, other in lost.items() if other is not None]
        if others:
            raise RuntimeError(
                f"another optimizer, built later with offload_gradients=True, takes away the gradients of "
                f"{len(others)} of this one's parameters, the first of them of shape {tuple(others[0].shape)}; what is "
                "taken away serves one optimizer alone, so build both with offload_gradients=False, or delete the other"
            )
        for parameter in lost:
            self._watched.pop(parameter).remove()
            self.watch(parameter, watcher, wanted=True)

    def keep(self, wanted: Callable[[Tensor], bool]) -> None:
        """Watch no parameters but these."""
        for parameter in [p for p in self._watched if not wanted(p)]:
            self._watched.pop(parameter).remove()

    def clear(self) -> None:
        """Watch none, for an optimizer that is gone."""
        self.keep(lambda _: False)
