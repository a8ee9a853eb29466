"""The protocol of an update. Only a rule's own files, and the shell that chooses it, name a rule."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from perfmodel.format import Format


class Run(NamedTuple):
    """The tensors of an update of one piece of a parameter, except the gradient: 1-D, on one device.

    updated: the tensor that is read and written: the master, or the parameter where that has no master or is the upper
        half of it.
    fields: all other fields of the state, by name.
    out: receives the new parameter, rounded; None: `updated` is the parameter.
    """

    updated: Tensor
    fields: Mapping[str, Tensor]
    out: Tensor | None


class Batch(Protocol):
    """The updates of some runs, the same ones each step, by address: it must not refer to their memory.

    The memory may be a slot of the device, which is released after each step.
    """

    def follow(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Follow memory of the runs to another address. moves: (old address, new address, bytes)."""

    def point(self, addresses: Sequence[int], dtypes: Sequence[Any]) -> None:
        """Set the addresses of the gradients of the next update, one for each run; 0: no gradient, and no update.

        Each address has as many elements as the run; see `dos.torch_internals.operators.tensor_at`.
        """

    def take_written(self, which: Sequence[bool] | None = None) -> None:
        """Let each update first replace masters that, rounded, are not the parameter in `out`, by `kernels.adam.taken`.

        User code has written to that parameter. which: for each run, whether to do so; None: for all. Lasts; False at
        first. Called where there are masters.
        """

    def choose(self, settings: Sequence[Any], which: Sequence[int] | None = None) -> None:
        """Set the index of the step's settings for each run; None: 0 for all. Called after `point`."""


class Rule(Protocol):
    """One elementwise optimizer's mathematics, and its settings, formats and state dicts.

    A value, pickled with the optimizer. keys: all names that its tensors may have in a state dict, beside the step.
    """

    keys: ClassVar[tuple[str, ...]]

    def agreed(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, by the name that users know."""

    def check(self, group: Mapping[str, Any], where: str) -> None:
        """Check the settings of a param group. Raises ValueError or TypeError that begins with `where`."""

    def adopt(self, saved: MutableMapping[str, Any], own: Mapping[str, Any], where: str) -> None:
        """Complete a loaded group's settings by the optimizer's own. Raises ValueError if they cannot be used."""

    def extra(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the fields of the state that settings of the group add, each with its setting as users write it.

        Other settings may change between steps.
        """

    def format(self, parameter: Tensor, *, extra: Collection[str]) -> Format:
        """Return the format of a parameter's state, from which the work of each lane follows.

        extra: names of additional fields.
        """

    def problem(
        self, entry: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any] | None = None
    ) -> str | None:
        """Return why `entry`, which user code has set, cannot be this parameter's state; None if it can, or is empty.

        group: the settings with which it is loaded, if it is loaded.
        """

    def empty_entry(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return uninitialised host tensors under all names that a state dict may have for it, beside the step."""

    def write_entry(self, entry: Mapping[str, Any], parameter: Tensor, views: Mapping[str, Tensor]) -> None:
        """Write the entry's values to live views of the state, by `keys`; views without a value become 0."""

    def settings(self, group: Mapping[str, Any], count: float, scale: float) -> Any:
        """Return the settings of a step. count: its number, from 1. scale: the factor of gradients."""

    def batch(self, runs: Sequence[Run]) -> Batch:
        """Return the updates of these runs, all on one device, as a batch."""

    def prepare(self, batches: Sequence[Any], settings: Sequence[Any]) -> Callable[[], None]:
        """Prepare the update of batches on one device, after `choose` of each; return the function that updates them.

        Neither waits for an accelerator, and the function takes little time of the host.
        """


def check_number(value: object, what: str, *, or_bool: bool = True) -> None:
    """Raise TypeError unless the value is a number, or a tensor of one."""
    number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)
    if not number or (isinstance(value, bool) and not or_bool):
        raise TypeError(f"{what} must be a number, found {value!r}")
