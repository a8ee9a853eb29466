"""Parameters to subgroups: the flat host state of each, and where every parameter lies in it."""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dos.devices import Device, host_zeros
from dos.host_memory import HostTensor
from perfmodel import SubgroupLoad
from perfmodel.format import BYTES, MASTER, Field, float32
from perfmodel.plan import Tier

_ROUNDED_FROM, _ROUNDING = 1 << 20, mmap.PAGESIZE // min(BYTES.values())
"""Parameters of a subgroup from which its size is rounded up, and to a multiple of how many.

So a subgroup begins on a page, and its host memory is made and pinned without its neighbours'. And
the part of a tensor that begins with it lies where a GPU loads 16 bytes at once. A tensor whose
length is no multiple of that still misaligns those behind it.
"""
_ALIGNMENT = 256
"""Bytes; every tensor carved from a slot starts on such a boundary, as CUDA's own allocations do."""


@dataclass(frozen=True, eq=False)
class State:
    """Optimizer state of a run of parameters: 1-D tensors of equal length on one device.

    fields: by name, those of the format and in its order.
    """

    fields: Mapping[str, Tensor]

    @property
    def master(self) -> Tensor | None:
        """The parameters as they are updated, or None where the update goes straight to them."""
        return self.fields.get(MASTER)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the format."""
        return tuple(self.fields.values())

    def slice(self, start: int, stop: int) -> State:
        """A view of the elements from start to stop."""
        return State({name: tensor[start:stop] for name, tensor in self.fields.items()})

    def zero(self) -> None:
        """Make it the state of parameters that were never updated."""
        for tensor in self.tensors():
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors())

    @property
    def carved_bytes(self) -> int:
        """Bytes of a buffer from which a state like this can be carved."""
        return sum(aligned(t.nbytes) for t in self.tensors())

    def carve(self, buffer: Tensor) -> State:
        """A state like this one whose tensors lie in `buffer` (1-D uint8, at least `carved_bytes` long)."""
        carved, offset = {}, 0
        for name, tensor in self.fields.items():
            carved[name] = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
            offset += aligned(tensor.nbytes)
        return State(carved)


class Arena:
    """Flat state of parameters that got their first gradient together.

    All are of one param group, one dtype and one memory (host or accelerator). Each parameter's state is contiguous,
    in the parameter's own memory order, so `optimizer.state[p]["exp_avg"]` is a view of it.

    tier: where the state has its home; on the device it is there for good.
    format: what the state consists of; amsgrad: whether with room for amsgrad.
    gradient: staging for gradients on their way from the accelerator, in the parameters' dtype.
    parameter: staging for new parameters on their way to the accelerator; None where master has their dtype already.

    What lies on the host takes memory when `make` is called for it, or when something is written there.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device: Device | None,
        *,
        master_weights: bool,
        amsgrad: bool,
        tier: Tier = Tier.HOST,
        part: int = 1,
    ) -> None:
        """part: elements of its subgroups, whose host memory is made one by one where they share no pages."""
        self.dtype = parameters[0].dtype
        self.accelerated = device is not None
        self.tier = tier
        self.numel = sum(p.numel() for p in parameters)
        self.amsgrad = amsgrad
        self._device = device
        self._part = part
        self._format_with = functools.partial(
            float32, str(self.dtype).removeprefix("torch."), master_weights=master_weights, accelerated=self.accelerated
        )
        self.format = self._format_with(amsgrad=amsgrad)
        self._homes: dict[str, HostTensor] = {}
        self._buffers: list[Tensor] = []
        self.state = State({f.name: self._field(f) for f in self.format.fields})
        self._gradient: HostTensor | None = None
        self._parameter: HostTensor | None = None
        self._accumulated: HostTensor | None = None
        if device is not None:
            self._gradient = HostTensor(self.numel, self.dtype, device, part)
        if device is not None and self.format.rounds and tier is Tier.HOST:
            self._parameter = HostTensor(self.numel, self.dtype, device, part)
        self._slices: dict[tuple[int, int], State] = {}

    @property
    def gradient(self) -> Tensor | None:
        return None if self._gradient is None else self._gradient.tensor

    @property
    def parameter(self) -> Tensor | None:
        return None if self._parameter is None else self._parameter.tensor

    @property
    def accumulated(self) -> Tensor | None:
        """Where gradients add up on the host, float32, once `accumulate` was called."""
        return None if self._accumulated is None else self._accumulated.tensor

    @property
    def device_bytes(self) -> int:
        """Device memory that it takes for good."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def stage_gradients_as(self, dtype: torch.dtype) -> None:
        """Make the gradient staging wide enough for gradients of `dtype`, which may differ from the parameters'."""
        if self._gradient is not None and self._gradient.tensor.dtype not in (dtype, torch.float32):
            assert self._device is not None, "nothing is staged for parameters on the host"
            self._gradient = HostTensor(self.numel, torch.float32, self._device, self._part)

    def accumulate(self) -> None:
        """Make room for gradients that add up on the host."""
        assert self._device is not None, "gradients of parameters on the host stay where they are"
        self._accumulated = HostTensor(self.numel, torch.float32, self._device, self._part)

    def home(self) -> list[HostTensor]:
        """The host memory of its state."""
        return list(self._homes.values())

    def incoming(self) -> list[HostTensor]:
        """The host memory through which gradients come, and in which they add up."""
        return [tensor for tensor in (self._gradient, self._accumulated) if tensor is not None]

    def outgoing(self) -> list[HostTensor]:
        """The host memory through which new parameters go."""
        return [] if self._parameter is None else [self._parameter]

    def slice(self, start: int, stop: int) -> State:
        """A view of the state from start to stop. Remembered, because every step asks for the same ones."""
        key = start, stop
        if key not in self._slices:
            self._slices[key] = self.state.slice(start, stop)
        return self._slices[key]

    def add_amsgrad(self, make: Callable[[HostTensor], None]) -> None:
        """Make room for amsgrad, switched on after construction. The views of its records are to be made anew.

        make: makes the host memory of one more field for all whose state is there.
        Whatever that or an allocation raises, nothing has changed.
        """
        wider, fields, homes = self._format_with(amsgrad=True), dict(self.state.fields), dict(self._homes)
        buffers = len(self._buffers)
        try:
            for field in wider.fields:
                if field.name not in fields:
                    fields[field.name] = self._field(field)
                    if field.name in self._homes:
                        make(self._homes[field.name])
        except BaseException:
            self._homes = homes
            del self._buffers[buffers:]
            raise
        self.state = State({field.name: fields[field.name] for field in wider.fields})
        self.format, self.amsgrad = wider, True
        self._slices.clear()

    def _field(self, field: Field) -> Tensor:
        dtype = getattr(torch, field.type)
        if self._device is None:
            return host_zeros(self.numel, dtype)
        if self.tier is Tier.HOST:
            self._homes[field.name] = HostTensor(self.numel, dtype, self._device, self._part)
            return self._homes[field.name].tensor
        self._buffers.append(self._device.allocate_lasting(self.numel * dtype.itemsize))
        return self._buffers[-1].zero_().view(dtype)


class ParameterRecord:
    """One parameter's place: its flat memory, its slice of the arena, and what was last seen of it.

    number: of the record among those of its optimizer.
    flat: 1-D alias of the parameter's memory, or a contiguous stand-in if that is not its values in a row: it has gaps,
        or is lazily negated (see `stand_in`).
    version, data_ptr: of the parameter after our last write; anything else means that somebody wrote to it.
    layout: of the parameter, in whose order `flat` and the state have its elements.
    views: what `optimizer.state[p]` holds beside the step: live views of the state, shaped like the parameter.
    step: what it holds as the step. count: the steps, which may be ahead of that.
    fresh: whether the state is zero, because nothing was ever written there.
    """

    def __init__(self, parameter: Tensor, arena: Arena, offset: int, number: int = 0) -> None:
        self.parameter = parameter
        self.arena = arena
        self.offset = offset
        self.number = number
        self.numel = parameter.numel()
        self.version = -1
        self.data_ptr = -1
        self._strides: tuple[int, ...] = ()
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self._gradient_dtype: torch.dtype | None = None
        self.step = torch.zeros((), dtype=torch.float32, device="cpu")
        self.count = self._step_written = 0.0
        self.fresh = True
        self._step_version = -1
        self.flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.stand_in = False
        self.views: dict[str, Tensor] = {}
        self.remember_layout()
        self.locate()

    @property
    def state(self) -> State:
        """This parameter's slice of the arena's state."""
        return self.arena.slice(self.offset, self.offset + self.numel)

    def locate(self) -> None:
        """Follow the parameter's memory if it was replaced, and read it if only a stand-in can be updated."""
        if self.moved():
            alias = flat_alias(self.parameter.detach())
            self.stand_in = alias is None
            self.flat = self.parameter.detach().resolve_neg().contiguous().view(-1) if alias is None else alias
        elif self.stand_in:
            self.flat.copy_(self.parameter.detach().contiguous().view(-1))

    def moved(self) -> bool:
        """Whether the parameter's memory is another, or seen otherwise, than after our last write."""
        return self.data_ptr != self.parameter.data_ptr() or self._strides != self.parameter.stride()

    def changed(self) -> bool:
        """Whether somebody else wrote to the parameter, or replaced its memory, since `saw`."""
        return self.version != self.parameter._version or self.moved()

    def settled(self, gradient: Tensor | None) -> bool:
        """Whether there is nothing to look into: the parameter is as the last step left it, the gradient like the last.

        Then it can be used where it lies. None: it is not with the parameter.
        """
        p = self.parameter
        return (
            p._version == self.version
            and p.data_ptr() == self.data_ptr
            and p.stride() == self._strides
            and p.shape == self._shape
            and p.dtype is self._dtype
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

    def settle(self, gradient: Tensor | None) -> None:
        """Everything about the parameter and this gradient was looked into."""
        self._gradient_dtype = None if self.stand_in or gradient is None else gradient.dtype

    def saw(self) -> None:
        """Remember the parameter as it is now."""
        self.version = self.parameter._version
        self.data_ptr = self.parameter.data_ptr()
        self._strides = self.parameter.stride()

    def write_back(self) -> None:
        """Bring a stand-in's new values to the parameter."""
        if self.stand_in:
            self.parameter.detach().copy_(self.flat.view(self.parameter.shape))

    def flat_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient as 1-D tensor in the order of `flat`; a copy only where its layout differs."""
        parameter = self.parameter
        gradient = gradient.detach().resolve_neg()  # the sign of a lazily negated tensor is not in its memory
        if gradient._is_zerotensor():  # which has no memory at all
            gradient = torch.zeros_like(parameter, dtype=gradient.dtype)
        if self.stand_in:
            return gradient.contiguous().view(-1)
        if not _same_layout(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        alias = flat_alias(gradient)
        assert alias is not None, "a dense parameter's layout is dense"
        return alias

    def layout_changed(self) -> bool:
        """Whether the parameter's elements lie in another order in memory than `flat` and the state have them."""
        return self.layout != _layout(self.parameter)

    def remember_layout(self) -> None:
        """Take the parameter's present layout for that of `flat` and of the views of the state."""
        self.layout = _layout(self.parameter)
        self.data_ptr = -1
        self.views = self.make_views()

    def is_adopted(self, entry: Mapping[str, object]) -> bool:
        """Whether an entry of the optimizer's state holds exactly the live views."""
        return all(
            entry.get(key) is view and view.data_ptr() == self._addresses[key] for key, view in self.views.items()
        )

    def adopt_step(self, step: Tensor) -> None:
        """Count from what the entry holds as the step."""
        self.step, self.count = step, float(step)
        self.saw_step()

    def saw_step(self) -> None:
        """Remember the step's tensor as it is now, with what was counted."""
        self._step_version, self._step_written = self.step._version, self.count

    def write_step(self) -> None:
        """Bring what was counted to the step's tensor."""
        if self.count != self._step_written:
            self.step.fill_(self.count)
            self.saw_step()

    def intact(self, entry: Mapping[str, object]) -> bool:
        """Whether an entry holds exactly what the last step left there."""
        step = self.step
        return entry.get("step") is step and step._version == self._step_version and self.is_adopted(entry)

    def renew_views(self) -> None:
        """Take back a view whose memory a user has replaced (`view.data = ...`), with the values it was given."""
        for key, view in list(self.views.items()):
            if view.data_ptr() != self._addresses[key]:
                fresh = self.make_views()[key]
                fresh.copy_(view.detach())
                view.data = fresh

    def make_views(self) -> dict[str, Tensor]:
        """The arena's tensors by the names that they have in a state dict."""
        flat, fields = self.state.fields, self.arena.format.fields
        views = {field.key: self.shaped(flat[field.name]) for field in fields if field.key is not None}
        self._addresses = {name: view.data_ptr() for name, view in views.items()}
        return views

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of what is in the order of `flat`, shaped like the parameter."""
        if flat_alias(self.parameter) is None or self.parameter.is_contiguous():
            return flat.view(self.parameter.shape)
        return flat.as_strided(self.parameter.size(), self.parameter.stride(), flat.storage_offset())


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one parameter's elements within a subgroup.

    start, stop: within the subgroup. parameter_start: of the first element, within the parameter.
    """

    record: ParameterRecord
    start: int
    stop: int
    parameter_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def run(self) -> slice:
        """Its elements within the subgroup."""
        return slice(self.start, self.stop)

    def of_parameter(self, flat: Tensor) -> Tensor:
        """This piece of a tensor that is as long as the parameter."""
        return flat[self.parameter_start : self.parameter_start + self.numel]


@dataclass(frozen=True, eq=False)
class Subgroup:
    """A contiguous run of an arena, updated as one unit.

    start, stop: within the arena.
    batches: what was made for its updates, by place, with what that holds for; to be cleared when
        the memory of a parameter is another.
    """

    arena: Arena
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    batches: dict[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def numbers(self) -> list[int]:
        """Of the records to which its pieces belong."""
        return [piece.record.number for piece in self.pieces]

    @property
    def state(self) -> State:
        """Views of the host state."""
        return self.arena.slice(self.start, self.stop)

    @property
    def gradient(self) -> Tensor:
        """The host staging of its gradients. Only where the parameters are on the accelerator."""
        assert self.arena.gradient is not None
        return self.arena.gradient[self.start : self.stop]

    @property
    def parameter(self) -> Tensor | None:
        """The host staging of its new parameters; None where the master itself is sent."""
        return None if self.arena.parameter is None else self.arena.parameter[self.start : self.stop]

    @property
    def offloaded_gradient_bytes(self) -> int:
        """Bytes of a slot that takes its gradients as they are, or are added up, on the host."""
        return aligned(self.numel * torch.float32.itemsize)

    def load(self) -> SubgroupLoad:
        """Its bytes on every lane."""
        return SubgroupLoad.of(self.numel, self.arena.format)


def make_records(parameters: Sequence[Tensor], arena: Arena, first: int = 0) -> list[ParameterRecord]:
    """Places for the parameters, one after the other, in the arena that was made for them.

    first: the number of the first record.
    """
    offsets = itertools.accumulate((p.numel() for p in parameters), initial=0)
    places = zip(parameters, offsets, itertools.count(first), strict=False)
    return [ParameterRecord(parameter, arena, offset, number) for parameter, offset, number in places]


def rounded(subgroup_size: int) -> int:
    """Parameters of a subgroup: a large size is rounded up a little."""
    return subgroup_size if subgroup_size < _ROUNDED_FROM else -(-subgroup_size // _ROUNDING) * _ROUNDING


def split(arena: Arena, records: Iterable[ParameterRecord], subgroup_size: int) -> list[Subgroup]:
    """The arena as subgroups of `subgroup_size` parameters, the last shorter: large tensors are split, small share.

    records: all of the arena, in order. subgroup_size: see `rounded`.
    """
    subgroup_size = rounded(subgroup_size)
    count = -(-arena.numel // subgroup_size)
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for record in records:
        first, end = record.offset, record.offset + record.numel
        while first < end:
            number, start = divmod(first, subgroup_size)
            last = min(end, (number + 1) * subgroup_size)
            pieces[number].append(Piece(record, start, start + last - first, first - record.offset))
            first = last
    ends = [min((number + 1) * subgroup_size, arena.numel) for number in range(count)]
    return [Subgroup(arena, i * subgroup_size, ends[i], tuple(pieces[i])) for i in range(count)]


def flat_alias(tensor: Tensor) -> Tensor | None:
    """A 1-D view of the tensor's elements in memory order.

    None if that is not what its memory holds: with gaps or overlaps, or lazily negated.
    """
    if tensor.is_neg():
        return None
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


Layout = tuple[int, ...] | None
"""The strides of axes that have any; None where memory has gaps and elements are taken in logical order."""


def _layout(tensor: Tensor) -> Layout:
    if flat_alias(tensor) is None:
        return None
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether elements lie in the same order in both; strides of axes of length 1 do not matter."""
    return all(
        stride_a == stride_b or size == 1
        for stride_a, stride_b, size in zip(a.stride(), b.stride(), b.shape, strict=True)
    )


def aligned(nbytes: int) -> int:
    """The bytes that a tensor of `nbytes` takes in a slot."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
