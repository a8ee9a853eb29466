"""One parameter: where it lies in memory, where its state lies in an arena, and what was last seen of both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import is_sharded, laid_out_as, local, version
from dos.state.arena import Arena, State, as_transport_dtype
from dos.torch_internals.dtensors import local_tensor
from dos.torch_internals.tensors import is_zero_tensor, version_counter
from perfmodel.format import scale_shape


class ParameterRecord:
    """One parameter's place: its flat memory, its slice of the arena, and what was last seen of it.

    parameter: as users have it. sharded: whether that is a DTensor.
    leaf: the tensor whose gradient backward writes: the parameter, or its copy on the device where weights stream.
    local: what this rank has of it, which is what is updated; all other figures are of that.
    kind: of `local`, which must not change. layout: of that, in whose order the state has its elements.
    number: of the record among those of its optimizer.
    flat: 1-D alias of the parameter's memory, or a contiguous stand-in if that is not its values in a row: it has gaps,
        or is lazily negated (see `stand_in`).
    version, data_ptr: of the parameter after our last write; anything else means that user code wrote to it.
    bits: a fingerprint of a DTensor after our last write, whose version proves nothing; None: it is not needed.
    rewritten: whether its bits were found to be others.
    views: what `optimizer.state[p]` holds beside the step: live views of the state, shaped like the parameter.
    step: what it holds as the step. count: the steps, which may be ahead of that.
    fresh: whether the state is zero, because nothing was ever written there.
    """

    def __init__(self, parameter: Tensor, arena: Arena, offset: int, number: int = 0) -> None:
        self.parameter = self.leaf = parameter
        self.sharded = is_sharded(parameter)
        self.arena = arena
        self.offset = offset
        self.number = number
        mine = local(parameter)
        self.numel = mine.numel()
        self.version = -1
        self.bits: Tensor | None = None
        self.rewritten = False
        self.data_ptr = -1
        self._strides: tuple[int, ...] = ()
        _, self._dtype, self._shape, self.layout = self.kind = kind_of(mine)
        self._gradient_dtype: torch.dtype | None = None
        self.step = torch.zeros((), dtype=torch.float32, device="cpu")
        self.count = self._step_written = 0.0
        self.fresh = True
        self._step_version = -1
        self.flat = torch.empty(0, dtype=mine.dtype, device=mine.device)
        self.stand_in = False
        self.views = self.make_views()
        self.locate()

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter."""
        p = self.parameter
        return local_tensor(p) if self.sharded else p

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient that backward has left."""
        gradient = self.leaf.grad
        return local(gradient) if self.sharded and gradient is not None else gradient

    @property
    def state(self) -> State:
        """This parameter's slice of the arena's state."""
        return self.arena.slice(self.offset, self.offset + self.numel)

    def locate(self) -> None:
        """Follow the parameter's memory if it was replaced, and read it if only a stand-in can be updated."""
        if self.moved():
            self.data_ptr = -1  # until it was updated there
            # Held, so that no other memory can have its address, by which `moved` knows it.
            self._memory = self.local.detach()
            alias = flat_alias(self._memory)
            self.stand_in = alias is None
            self.flat = self._memory.resolve_neg().contiguous().view(-1) if alias is None else alias
        elif self.stand_in:
            self.flat.copy_(self.local.detach().contiguous().view(-1))

    def relocate(self, *, written: bool) -> None:
        """Follow the parameter to where its optimizer has moved it. written: whether user code changed it before."""
        _, self._dtype, self._shape, self.layout = self.kind = kind_of(self.local)
        self.locate()
        self.saw()
        if written:
            self.version = -1

    def moved(self) -> bool:
        """Whether the parameter's memory is another, or seen otherwise, than after our last write."""
        p = self.local
        return self.data_ptr != p.data_ptr() or self._strides != p.stride() or (p.is_neg() and not self.stand_in)

    @property
    def replaced(self) -> bool:
        """Whether user code has replaced the memory to which the last update has written."""
        return not self.stand_in and self._memory.data_ptr() != self.local.data_ptr()

    def changed(self) -> bool:
        """Whether user code wrote to the parameter, or replaced its memory, since `saw`."""
        return self.rewritten or self.version != version(self.parameter) or self.moved()

    def settled(self, gradient: Tensor | None) -> bool:
        """Whether there is nothing to look into: the parameter is as the last step left it, the gradient like the last.

        Then it can be used where it lies. None: it is not with the parameter.
        """
        p = self.local
        return (
            (version(self.parameter) if self.sharded else version_counter(p)) == self.version
            and not self.rewritten
            and p.data_ptr() == self.data_ptr
            and p.stride() == self._strides
            and p.shape == self._shape
            and p.dtype is self._dtype
            and not p.is_neg()
            and (
                gradient is None
                or (
                    gradient.dtype is self._gradient_dtype
                    and gradient.layout is torch.strided
                    and gradient.stride() == self._strides
                    and gradient.shape == self._shape
                    and not gradient.is_neg()
                    and gradient.data_ptr() != 0  # as of a zero tensor, which has no memory
                )
            )
        )

    def remember_gradient(self, gradient: Tensor | None) -> None:
        """Everything about the parameter and this gradient was looked into."""
        self._gradient_dtype = None if self.stand_in or gradient is None else gradient.dtype

    def saw(self) -> None:
        """Remember the parameter as it is now."""
        p = self.local
        if self.sharded:
            self.rewritten = False
            self.bits = None if not self.arena.format.has_masters else fingerprint(p)
        self.version = version(self.parameter) if self.sharded else version_counter(p)
        self.data_ptr, self._strides = p.data_ptr(), p.stride()

    def write_back(self) -> None:
        """Bring a stand-in's new values to the parameter."""
        self.local.detach().copy_(self.flat.view(self.local.shape))

    def flat_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient as 1-D tensor in the order of `flat`; a copy only where its layout differs."""
        gradient = gradient.detach().resolve_neg()  # the sign of a lazily negated tensor is not in its memory
        if is_zero_tensor(gradient):  # which has no memory at all
            gradient = torch.zeros_like(self.local, dtype=gradient.dtype)
        return (gradient if self.layout is None else gradient.permute(self.layout)).contiguous().view(-1)

    def is_adopted(self, entry: Mapping[str, object]) -> bool:
        """Whether an entry of the optimizer's state holds exactly the live views, and no other state."""
        others = len(entry) > len(self.views) + 1  # beside the step
        return all(
            entry.get(key) is view and local(view).data_ptr() == self._addresses[key]
            for key, view in self.views.items()
        ) and not (others and any(key in entry for key in self.arena.rule.keys if key not in self.views))

    def adopt_step(self, step: Tensor) -> None:
        """Count from what the entry holds as the step."""
        self.step, self.count = step, float(step)
        self.saw_step()

    def saw_step(self) -> None:
        """Remember the step's tensor as it is now, with what was counted."""
        self._step_version, self._step_written = version_counter(self.step), self.count

    def write_step(self) -> None:
        """Bring what was counted to the step's tensor."""
        if self.count != self._step_written:
            self.step.fill_(self.count)
            self.saw_step()

    def intact(self, entry: Mapping[str, object]) -> bool:
        """Whether an entry holds exactly what the last step left there."""
        step = self.step
        seen = entry.get("step") is step and version_counter(step) == self._step_version
        return seen and float(step) == self.count and self.is_adopted(entry)

    def renew_views(self) -> None:
        """Take back a view whose memory a user has replaced (`view.data = ...`), with the values it was given."""
        for key, view in list(self.views.items()):
            if local(view).data_ptr() != self._addresses[key]:
                fresh = local(self.make_views()[key])
                fresh.copy_(local(view).detach().to(fresh.device))  # as `write_entry` does
                local(view).data = fresh

    def make_views(self) -> dict[str, Tensor]:
        """The arena's tensors by the names that they have in a state dict, divided as the parameter is."""
        views = {}
        self._addresses = {}
        for field in self.arena.format.fields:
            if field.key is not None:
                flat = as_transport_dtype(self.state.fields[field.name])
                shared = field.block > 1
                view = flat.view(scale_shape(self.local.shape)) if shared else self.shaped(flat)
                shape = scale_shape(self.parameter.shape) if shared else None
                views[field.key] = laid_out_as(view, self.parameter, shape)
                self._addresses[field.key] = view.data_ptr()
        return views

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of what is in the order of `flat`, shaped like this rank's part of the parameter."""
        if self.layout is None:
            return flat.view(self._shape)
        places = [self.layout.index(axis) for axis in range(len(self.layout))]
        return flat.view([self._shape[axis] for axis in self.layout]).permute(places)


def make_records(parameters: Sequence[Tensor], arena: Arena, first: int = 0) -> list[ParameterRecord]:
    """Places for the parameters, one after the other, in the arena that was made for them.

    first: the number of the first record.
    """
    offsets = itertools.accumulate((local(p).numel() for p in parameters), initial=0)
    places = zip(parameters, offsets, itertools.count(first), strict=False)
    return [ParameterRecord(parameter, arena, offset, number) for parameter, offset, number in places]


def step_of(entry: Mapping[str, Any]) -> Tensor:
    """The step that the entry has, as a float32 scalar on the host that counts writes; 0 if it has none."""
    step = entry.get("step", 0.0)
    usable = isinstance(step, Tensor) and step.device.type == "cpu" and step.dtype == torch.float32
    if not usable or step.ndim or step.is_inference():
        step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return step


Layout = tuple[int, ...] | None
"""The axes in the order in which they lie in memory, those of length 1 last; None: in their own, or there are gaps."""


def kind_of(tensor: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, Layout]:
    """The properties of a parameter that must stay as they were when it got its record."""
    return tensor.device, tensor.dtype, tensor.shape, _layout(tensor)


def flat_alias(tensor: Tensor) -> Tensor | None:
    """A 1-D view of the tensor's elements in memory order.

    None if that is not what its memory holds: with gaps or overlaps, or lazily negated.
    """
    if tensor.is_neg() or not is_dense(tensor):
        return None
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a piece of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _layout(tensor: Tensor) -> Layout:
    """How the tensor's elements lie in memory."""
    if tensor.is_contiguous() or flat_alias(tensor) is None:
        return None
    strides, shape = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.ndim), key=lambda axis: (shape[axis] == 1, -strides[axis])))
