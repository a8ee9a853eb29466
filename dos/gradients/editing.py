"""Edits of gradients by user code, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dos.gradients.clipping import Clipping
from dos.gradients.departures import Departures
from dos.gradients.offload import OffloadedGradients
from dos.guard import warn
from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import counts_writes, laid_out_as, local, same_layout, version
from dos.state.record import ParameterRecord

Edit = Callable[[Tensor, Tensor], Tensor | None]
"""Called with a parameter and its gradient: edits that in place, or returns another one, or None to drop it."""


class Editing:
    """One pass of `edit` over the gradients of an optimizer. All of a subgroup are in one place."""

    def __init__(
        self, edit: Edit, offloaded: OffloadedGradients, clipping: Clipping, departures: Departures | None
    ) -> None:
        if not callable(edit):
            raise TypeError(f"edit_gradients() expects a function of a parameter and its gradient, found {edit!r}")
        self._edit = edit
        self._offloaded, self._clipping, self._departures = offloaded, clipping, departures
        self._dropped: list[tuple[Tensor, ParameterRecord | None]] = []
        self._in_place = self._given = 0
        """The numbers of gradients that were edited with nothing returned, and of gradients that were returned."""

    def run(self, members: Iterable[tuple[Tensor, ParameterRecord | None]]) -> None:
        """Edit the gradients of these parameters, each with its record, and drop those for which `edit` says so.

        Raises TypeError or ValueError for what `edit` must not return.
        """
        for parameter, record in members:
            if record is not None and record in self._offloaded.records:
                self._edit_away(parameter, record)
            elif parameter.grad is not None:
                self._edit_here(parameter, record)
        if self._dropped and self._in_place:
            raise ValueError(
                f"the function of edit_gradients() returned None for {self._in_place} gradients that it edited in place"
                f" and for {len(self._dropped)} that it did not edit, which would drop these; return the gradient from "
                "every call to keep it"
            )
        if not (self._dropped or self._in_place or self._given):
            warn("edit_gradients() found no gradient to edit; call it between backward() and step()")
        if self._dropped and not self._given:
            warn(
                "the function of edit_gradients() returned None for every gradient and edited none, which drops them "
                "all; return the gradient to keep it"
            )
        for parameter, record in self._dropped:
            parameter.grad = None
            if record is not None:
                self._offloaded.forget([record])

    def _edit_away(self, parameter: Tensor, record: ParameterRecord) -> None:
        """Edit a gradient on the host, in the dtype that `p.grad` would have."""
        flat, dtype = self._offloaded.flat(record), self._offloaded.dtype(record)
        self._clipping.apply(self._offloaded.handle(record), flat)
        # An alias with a version counter of its own: others of its arena may be written meanwhile.
        mine = flat.data if flat.dtype == dtype else flat.to(dtype)
        gradient = laid_out_as(record.shaped(mine), parameter)
        result = self._call(parameter, record, gradient)
        if result is not None and (result is not gradient or mine.dtype != flat.dtype):
            flat.copy_(record.flat_gradient(local(result)))

    def _edit_here(self, parameter: Tensor, record: ParameterRecord | None) -> None:
        """Edit a gradient in `p.grad`."""
        gradient = parameter.grad
        assert gradient is not None, "asked only for parameters that have one"
        self._clipping.apply(gradient, local(gradient))
        result = self._call(parameter, record, gradient)
        if result is not None and result is not gradient:
            parameter.grad = result
        if record is not None and self._departures is not None:
            # No version counts writes through `.data` or by numpy: what was sent early is sent again.
            self._departures.edited(record)

    def _call(self, parameter: Tensor, record: ParameterRecord | None, gradient: Tensor) -> Tensor | None:
        """Return the gradient to use; None if it is dropped."""
        before, mine = _state(gradient), local(gradient)
        bits = fingerprint(mine) if mine.layout is torch.strided else None
        result = self._edit(parameter, gradient)
        if result is not None:
            _check(result, gradient)
            self._given += 1
            return result
        # The bits, because no version counts writes through `.data` or by NumPy.
        if _state(gradient) == before and (bits is None or torch.equal(bits, fingerprint(mine))):
            self._dropped.append((parameter, record))
            return None
        self._in_place += 1
        return gradient


def _state(gradient: Tensor) -> object:
    """Return a value that changes when the gradient is written to."""
    return version(gradient) if counts_writes(gradient) else fingerprint(local(gradient)).tolist()


def _check(result: object, gradient: Tensor) -> None:
    """Raise TypeError or ValueError unless user code may put `result` in the place of the gradient."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"the function of edit_gradients() returned {type(result).__name__}, expected the gradient as a tensor, "
            "or None to drop it"
        )
    found, expected = _described(result), _described(gradient)
    if found != expected or not same_layout(result, gradient):
        raise ValueError(
            f"the function of edit_gradients() returned {found}, expected the gradient's own form, {expected}"
        )


def _described(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
