"""A group's list of parameters, which waits before user code reads it while updates run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


class GroupParameters(list[Tensor]):
    """`group["params"]`: a plain list but for its type, as long as it does not wait. A copy is a plain list.

    The list waits and not the group: schedulers, GradScaler and Accelerate read other entries in each iteration.
    """

    __slots__ = ("_before_reading",)

    def __init__(self, parameters: Iterable[Tensor], before_reading: Callable[[], None]) -> None:
        """before_reading: a method, called before parameters are read; its object is not kept alive."""
        super().__init__(parameters)
        self._before_reading = weakref.WeakMethod(before_reading)

    def wait(self) -> None:
        """Call `before_reading` before each reading from now on."""
        self.__class__ = _Waiting

    def rest(self) -> None:
        """Undo `wait`."""
        self.__class__ = GroupParameters

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class _Waiting(GroupParameters):
    """The same, which waits."""

    __slots__ = ()

    def __radd__(self, other: Any) -> Any:
        return other + list(self)


def _waits_first(name: str) -> Callable[..., Any]:
    """Return the method of `list` of this name, preceded by `before_reading`."""
    method = getattr(list, name)

    def call(self: GroupParameters, *args: Any) -> Any:
        before_reading = self._before_reading()
        if before_reading is not None:
            before_reading()
        return method(self, *args)

    return call


for _name in ("__iter__", "__reversed__", "__getitem__", "__add__", "__mul__", "__rmul__", "copy", "pop"):
    setattr(_Waiting, _name, _waits_first(_name))


def members(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Iterate over a group's parameters without waiting."""
    return list.__iter__(parameters) if isinstance(parameters, list) else iter(parameters)
