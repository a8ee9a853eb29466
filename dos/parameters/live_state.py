"""`optimizer.state`: a mapping that waits, and brings state home, only when an entry is read or changed."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from perfmodel.format import STATE_KEYS

_MISSING = object()


class LiveState(defaultdict[Tensor, Any]):
    """AdamW's state by parameter. Asking whether there is any, for which parameters, and how many, changes nothing.

    For code that only wants to know whether the optimizer has state yet, as
    torch.distributed.checkpoint does at every turn.
    """

    def __init__(self, entries: Mapping[Tensor, Any], before: Callable[[], None]) -> None:
        """before: a method, called before an entry is read or changed; its object is not kept alive."""
        super().__init__(dict, entries)
        self._before = weakref.WeakMethod(before)

    def _settle(self) -> None:
        before = self._before()
        if before is not None:
            before()

    def __getitem__(self, key: Tensor) -> Any:
        self._settle()
        entry = super().__getitem__(key)
        if sys._getframe(1).f_code.co_name == "_unflatten_optim_state_dict":
            # Torch takes these names alone from a flattened state dict, which may be of another format.
            return dict.fromkeys(STATE_KEYS) | entry
        return entry

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._settle()
        super().__setitem__(key, value)

    def __delitem__(self, key: Tensor) -> None:
        self._settle()
        super().__delitem__(key)

    def __eq__(self, other: object) -> bool:
        self._settle()
        return super().__eq__(other)

    def __iter__(self) -> Iterator[Tensor]:  # without one of its own, dict(...) would copy entries unseen
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.items()))

    def get(self, key: Tensor, default: Any = None) -> Any:
        self._settle()
        return super().get(key, default)

    def items(self) -> Any:
        self._settle()
        return super().items()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def copy(self) -> Any:  # as it is after pickling, too
        self._settle()
        return defaultdict(dict, self)

    __copy__ = copy

    def pop(self, *args: Any) -> Any:
        self._settle()
        return super().pop(*args)

    def popitem(self) -> tuple[Tensor, Any]:
        self._settle()
        return super().popitem()

    def setdefault(self, key: Tensor, default: Any = None) -> Any:
        self._settle()
        return super().setdefault(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().update(*args, **kwargs)

    def clear(self) -> None:
        self._settle()
        super().clear()


class Entries(MutableMapping[Tensor, Any]):
    """The same entries for the optimizer itself, which knows what is settled."""

    def __init__(self, state: LiveState) -> None:
        self.live = state

    def __getitem__(self, key: Tensor) -> Any:
        found = dict.get(self.live, key, _MISSING)
        if found is _MISSING:
            raise KeyError(key)
        return found

    def __setitem__(self, key: Tensor, value: Any) -> None:
        dict.__setitem__(self.live, key, value)

    def __delitem__(self, key: Tensor) -> None:
        dict.__delitem__(self.live, key)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.live)

    def __len__(self) -> int:
        return len(self.live)
