"""The protocol of an update. Only a rule's own files, and the shell that chooses it, name one."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from perfmodel.format import Format


class Run(NamedTuple):
    """The tensors that the update of one piece of a parameter works on, but for the gradient: 1-D, in one memory.

    updated: is read and written: the master. The parameter where that is updated itself, or is its master's upper half.
    fields: the rest of the state, by name.
    out: receives the new parameter, rounded; None: there is none beside `updated`.
    shaped: gives a tensor of the whole parameter's elements its shape. Of use to rules that have `whole`.
    """

    updated: Tensor
    fields: Mapping[str, Tensor]
    out: Tensor | None
    shaped: Callable[[Tensor], Tensor]


class Batch(Protocol):
    """The updates of some runs, the same ones step after step, by address: it must not hold their memory.

    That may be a slot of the device, which is freed after each step.
    """

    def follow(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Follow memory of the runs to another address. moves: from where, to where, and how many bytes."""

    def point(self, addresses: Sequence[int], dtypes: Sequence[Any]) -> None:
        """Say where the gradients of the next update are, one for each run; 0: there is none, and no update.

        As many elements as the run has lie there in its order; see `dos.torch_internals.operators.tensor_at`.
        """

    def choose(self, settings: Sequence[Any], which: Sequence[int] | None = None) -> None:
        """Say which of the step's settings each run takes; None: all the first. Called after `point`."""


class Rule(Protocol):
    """One optimizer's mathematics, and what follows from that. A value: it is pickled with the optimizer.

    keys: all names that its tensors may have in a state dict, beside the step.
    whole: whether it updates a parameter as one; then no subgroup has a part of one. Else it is elementwise.
    on_cpu: whether it can update on the CPU. Else no plan has a subgroup there, and parameters must be on the device.
    """

    keys: ClassVar[tuple[str, ...]]
    whole: ClassVar[bool]
    on_cpu: ClassVar[bool]

    def agreed(self) -> dict[str, str]:
        """The settings that all ranks must have chosen alike, by the name that users know."""

    def check(self, group: Mapping[str, Any], where: str) -> None:
        """Check the settings of a param group. Raises ValueError or TypeError that begins with `where`."""

    def adopt(self, saved: MutableMapping[str, Any], own: Mapping[str, Any], where: str) -> None:
        """Make a loaded group's settings whole by the optimizer's own ones. Raises ValueError if they are no use."""

    def extra(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        """The fields of the state that are there because of these settings, each with that, as users write it.

        Other settings may change between steps.
        """

    def format(self, parameter: Tensor, *, accelerated: bool, extra: Collection[str]) -> Format:
        """The format of a parameter's state; how much each lane has to do follows from it.

        accelerated: whether the parameter is on the accelerator. extra: fields to have besides.
        """

    def problem(
        self, entry: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any] | None = None
    ) -> str | None:
        """The reason why `entry`, which users have left, is not this parameter's state; None if it is, or is empty.

        group: the settings with which it is loaded, if it is.
        """

    def room(self, parameter: Tensor) -> dict[str, Tensor]:
        """Uninitialised host tensors for all that a state dict may have of this parameter, beside the step."""

    def write_entry(self, entry: Mapping[str, Any], parameter: Tensor, views: Mapping[str, Tensor]) -> None:
        """Write what the entry says to live views of the state, by `keys`; what it does not say becomes 0."""

    def settings(self, group: Mapping[str, Any], count: float, scale: float) -> Any:
        """The settings of a step. count: of the steps with this one. scale: by which gradients are multiplied first."""

    def batch(self, runs: Sequence[Run]) -> Batch:
        """The updates of these runs, all on one device."""

    def prepare(self, batches: Sequence[Any], settings: Sequence[Any]) -> Callable[[], None]:
        """Prepare the update of batches on one device, each of which has had its `choose`; returns what updates them.

        It waits for nothing on an accelerator, and what it returns leaves the host little to do.
        """


def check_number(value: object, what: str, *, or_bool: bool = True) -> None:
    """Raise TypeError unless the value is a number, or a tensor of one."""
    if (isinstance(value, bool) and not or_bool) or not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(f"{what} must be a number, found {value!r}")
