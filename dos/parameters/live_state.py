"""`optimizer.state`: a mapping that waits, and moves state home, only when an entry is read or changed."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dos.torch_internals.callers import unflattens_state


class LiveState(defaultdict[Tensor, Any]):
    """Optimizer state by parameter. Its length, its keys and whether it is empty can be read without moving state.

    torch.distributed.checkpoint and trainers read them often. If that moved state home, code that only looks would move
    all residents in each iteration, and raise MemoryError where the host has no memory for them.
    The optimizer itself, which knows which state is settled, calls methods of `dict`: `dict.get(state, parameter)`.

    read: whether user code may have an entry, and so change it whenever it likes: each step then compares entries.
    """

    def __init__(
        self, entries: Mapping[Tensor, Any], before: Callable[[Collection[Tensor]], None], keys: Sequence[str]
    ) -> None:
        """Take over the entries.

        before: a method, called before entries are read or changed, with the parameters of the entries that are read;
        its object is not kept alive. keys: all names that entries may have beside the step.
        """
        super().__init__(dict, entries)
        self.read = True  # by those who made the entries
        self._keys = keys
        # Weak: the session refers to this mapping, and a cycle would leave state to the garbage collector.
        self._before = weakref.WeakMethod(before)

    def _settle(self, keys: Collection[Tensor]) -> None:
        before = self._before()
        if before is not None:
            before(keys)
        self.read = True

    def __getitem__(self, key: Tensor) -> Any:
        self._settle([key])
        entry = super().__getitem__(key)
        if unflattens_state():
            # Torch takes only these names from a flattened state dict, which may be of another format.
            return dict.fromkeys(self._keys) | entry
        return entry

    def __iter__(self) -> Iterator[Tensor]:  # without this method dict(...) would copy entries without `_settle`
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.items()))

    def copy(self) -> Any:  # the same as after pickling
        return defaultdict(dict, self.items())

    __copy__ = copy


def _settles_first(name: str, read: Callable[..., Collection[Tensor]]) -> Callable[..., Any]:
    """Return the method of `defaultdict` of this name, preceded by `_settle`.

    read: maps its arguments to the parameters whose entries it reads.
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
