"""`optimizer.state`: a mapping that waits, and brings state home, only when an entry is read or changed."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dos.torch_internals.callers import unflattens_state


class LiveState(defaultdict[Tensor, Any]):
    """Optimizer state by parameter. Asking whether there is any, for which parameters, and how many, changes nothing.

    torch.distributed.checkpoint and trainers ask that at every turn. If it brought state home, code that only looks
    would move all residents in each iteration, and run into MemoryError where the host has no room for them.
    The optimizer itself, which knows what is settled, calls the methods of `dict`: `dict.get(state, parameter)`.
    """

    def __init__(
        self, entries: Mapping[Tensor, Any], before: Callable[[Collection[Tensor]], None], keys: Sequence[str]
    ) -> None:
        """before: a method, called before entries are read or changed; its object is not kept alive.

        It is given the parameters of those that are read. keys: all names that entries may have beside the step.
        """
        super().__init__(dict, entries)
        self._keys = keys
        self._before = weakref.WeakMethod(before)

    def _settle(self, keys: Collection[Tensor]) -> None:
        before = self._before()
        if before is not None:
            before(keys)

    def __getitem__(self, key: Tensor) -> Any:
        self._settle([key])
        entry = super().__getitem__(key)
        if unflattens_state():
            # Torch takes these names alone from a flattened state dict, which may be of another format.
            return dict.fromkeys(self._keys) | entry
        return entry

    def __iter__(self) -> Iterator[Tensor]:  # without one of its own, dict(...) would copy entries without `_settle`
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.items()))

    def copy(self) -> Any:  # as it is after pickling, too
        return defaultdict(dict, self.items())

    __copy__ = copy


def _settles_first(name: str, read: Callable[..., Collection[Tensor]]) -> Callable[..., Any]:
    """The method of this name that `defaultdict` has, after `_settle`.

    read: of its arguments, the parameters whose entries it reads.
    """
    method = getattr(defaultdict, name)

    def call(self: LiveState, *args: Any, **kwargs: Any) -> Any:
        self._settle(read(self, *args))
        return method(self, *args, **kwargs)

    return call


for _name in ("__setitem__", "__delitem__", "update", "clear", "__ior__"):
    setattr(LiveState, _name, _settles_first(_name, lambda state, *_: ()))
for _name in ("get", "pop", "setdefault"):
    setattr(LiveState, _name, _settles_first(_name, lambda state, key, *_: (key,)))
for _name in ("popitem", "__eq__", "__ne__", "__repr__", "items", "values"):
    setattr(LiveState, _name, _settles_first(_name, lambda state, *_: state))
