"""One parameter's record: its memory, the place of its state in an arena, and both as they were last seen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import is_sharded, is_wrapped, laid_out_as, local, version
from dos.state.arena import Arena, State, as_transport_dtype
from dos.state.own_storage import with_own_storage
from dos.torch_internals.dtensors import local_tensor
from dos.torch_internals.tensors import is_zero_tensor, storage_address, version_counter
from perfmodel.format import MASTER_KEY, scale_shape

Form = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]
"""The dtype, shape, strides and sign of a gradient."""


def form_of(gradient: Tensor) -> Form:
    """Return the form of a tensor."""
    return gradient.dtype, gradient.shape, gradient.stride(), gradient.is_neg()


class ParameterRecord:
    """One parameter's flat memory, its slice of the arena, and its version and address as they were last seen.

    parameter: the user's tensor. sharded: whether it is a DTensor. wrapped: whether it has its values in `local`.
    leaf: the tensor whose gradient backward writes: the parameter, or its copy on the device where weights stream.
    local: this rank's part of the parameter, which is updated; all other fields describe it.
    kind: its device, dtype, shape and layout, which must not change. layout: the order of its axes in memory, in which
        the state has its elements.
    number: the record's position among all records of its optimizer.
    flat: 1-D alias of the parameter's memory, or a contiguous stand-in if the parameter has gaps or is lazily negated
        (see `stand_in`).
    version, data_ptr: of the parameter after our last write; other values mean that user code wrote to it.
    bits: a fingerprint after our last write, by which writes are found that raise no version; None: it is not needed.
    rewritten: whether other bits were found. written_late: whether user code has written to the parameter between
        backward and a step without raising the version.
    views: the values of `optimizer.state[p]` beside the step: tensors in the memory of the state, shaped like the
        parameter.
    step: the step in `optimizer.state[p]`. count: the number of steps, which may be ahead of it.
    fresh: whether the state is zero, because it was never written.
    form: of the last gradient that was checked; None: none was that can be used in place.
    """

    # Of the class until they differ: CPython 3.11 keeps 30 attributes of an instance beside it. Of one that has more it
    # looks all up in a dictionary, which makes a step of many small parameters a third longer.
    written_late = False
    _master_version = 0
    _storage: torch.UntypedStorage | None = None

    def __init__(self, parameter: Tensor, arena: Arena, offset: int, number: int = 0) -> None:
        self.parameter = self.leaf = parameter
        self.sharded = is_sharded(parameter)
        self.wrapped = is_wrapped(parameter)
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
        self.form: Form | None = None
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
        if not self.wrapped:
            return p
        part = local_tensor(p) if self.sharded else p
        return part if type(part) is Tensor else local(p)  # a shortcut: each step asks several times

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient in `leaf.grad`."""
        gradient = self.leaf.grad
        return local(gradient) if self.wrapped and gradient is not None else gradient

    @property
    def state(self) -> State:
        """This parameter's slice of the arena's state."""
        return self.arena.slice(self.offset, self.offset + self.numel)

    def locate(self, memory: Tensor | None = None) -> None:
        """Follow the parameter's memory if it was replaced; copy its values if a stand-in is updated.

        memory: a tensor like the parameter, in the same memory, of a storage that device allocators know; None: itself.
        """
        if memory is not None or self.moved():
            self.data_ptr = -1  # until the parameter was updated there
            # A reference, so that no other memory can get the address, by which `moved` compares.
            self._memory = (self._held() if memory is None else memory).detach()
            self._address = self._memory.data_ptr()
            alias = flat_alias(self._memory)
            self.stand_in = alias is None
            self.flat = self._memory.resolve_neg().contiguous().view(-1) if alias is None else alias
        elif self.stand_in:
            self.flat.copy_(self.local.detach().contiguous().view(-1))

    def _held(self) -> Tensor:
        """Return the parameter, or, where a thread of ours updates it, a tensor that keeps its memory in any case."""
        p, device = self.local, self.arena.device
        if self._storage is not None:
            self._storage = None
        if device is None or device.queues or p.is_shared() or p.is_inference() or flat_alias(p) is None:
            return p
        # `share_memory_()` moves the storage of all tensors that share it, and frees the memory, to which an update may
        # still write. So the parameter gets a storage of its own over this memory, and the old one keeps it.
        kept = p.detach()
        p.data = with_own_storage(kept)
        self._storage = p.untyped_storage()
        return kept

    def follow_sharing(self) -> bool:
        """Copy the values of an update to the memory to which `share_memory_()` has moved the parameter meanwhile.

        Returns whether it has moved it, and nothing else has replaced the memory.
        """
        p, storage = self.local, self._storage
        if storage is None or not p.is_shared() or storage_address(storage) != storage_address(p.untyped_storage()):
            return False
        p.detach().copy_(self._memory)
        return True

    def relocate(self, memory: Tensor, *, written: bool) -> None:
        """Follow the parameter after the optimizer has moved it.

        memory: as in `locate`. written: whether user code changed the parameter before.
        """
        _, self._dtype, self._shape, self.layout = self.kind = kind_of(self.local)
        self.locate(memory)
        self.saw()
        if written:
            self.version = -1

    def moved(self) -> bool:
        """Return whether the parameter has other memory or other strides than after our last write."""
        p = self.local if self.wrapped else self.parameter
        return self.data_ptr != p.data_ptr() or self._strides != p.stride() or (p.is_neg() and not self.stand_in)

    @property
    def replaced(self) -> bool:
        """Whether user code has replaced the memory to which the last update has written."""
        # By number: `share_memory_()` moves the memory of all tensors that share a storage.
        return not self.stand_in and self._address != (self.local if self.wrapped else self.parameter).data_ptr()

    def changed(self) -> bool:
        """Return whether user code wrote to the parameter, or replaced its memory, since `saw`."""
        if self.wrapped:
            return self.rewritten or self.version != version(self.parameter) or self.moved()
        p = self.parameter  # as `moved`, without calls: each gradient that leaves asks
        if self.rewritten or self.version != version_counter(p) or self.data_ptr != p.data_ptr():
            return True
        return self._strides != p.stride() or (p.is_neg() and not self.stand_in)

    def settled(self, gradient: Tensor | None) -> bool:
        """Return whether the parameter is unchanged since the last step, and the gradient is like the last one.

        Both can then be used in place without a further check. gradient: None if it was offloaded.
        """
        p = self.local if self.wrapped else self.parameter
        return (
            (version(self.parameter) if self.wrapped else version_counter(p)) == self.version
            and not self.rewritten
            and p.data_ptr() == self.data_ptr
            and p.stride() == self._strides
            and p.shape == self._shape
            and p.dtype is self._dtype
            and not p.is_neg()
            and (
                gradient is None
                or (
                    self.form is not None
                    and gradient.dtype is self.form[0]
                    and gradient.layout is torch.strided
                    and gradient.stride() == self._strides
                    and gradient.shape == self._shape
                    and not gradient.is_neg()
                    and gradient.data_ptr() != 0  # zero tensors of forward-mode AD have no memory
                )
            )
        )

    def remember_gradient(self, gradient: Tensor | None) -> None:
        """Remember the form of a gradient that was checked, for `settled`."""
        self.form = None if self.stand_in or gradient is None else form_of(gradient)

    def saw(self, *, replaced: bool = True) -> bool:
        """Remember the parameter as it is now; return whether that was done.

        replaced: whether also where it is `replaced`.
        """
        p = self.local if self.wrapped else self.parameter
        address = p.data_ptr()
        if not (replaced or self.stand_in or self._address == address):
            return False
        self.rewritten = False
        self.bits = fingerprint(p) if self.wrapped and self.arena.keeps_copies else None
        self.version = version(self.parameter) if self.wrapped else version_counter(p)
        self.data_ptr, self._strides = address, p.stride()
        return True

    @property
    def master_written(self) -> bool:
        """Whether user code wrote to the whole master in `views` since `saw_master`."""
        master = self.views.get(MASTER_KEY)
        return master is not None and version(master) != self._master_version

    def saw_master(self) -> None:
        """Remember the whole master's version, if there is one."""
        if MASTER_KEY in self.views:
            self._master_version = version(self.views[MASTER_KEY])

    def saw_bits(self) -> None:
        """Remember the parameter's bits, too, because the next update may read a copy of it."""
        self.bits = fingerprint(self.local)

    def write_back(self) -> None:
        """Copy a stand-in's new values to the parameter."""
        self.local.detach().copy_(self.flat.view(self.local.shape))

    def flat_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient as a 1-D tensor in the order of `flat`; a copy only where its layout differs."""
        gradient = gradient.detach().resolve_neg()  # the sign of a lazily negated tensor is not in its memory
        if is_zero_tensor(gradient):  # it has no memory at all
            gradient = torch.zeros_like(self.local, dtype=gradient.dtype)
        return (gradient if self.layout is None else gradient.permute(self.layout)).contiguous().view(-1)

    def is_adopted(self, entry: Mapping[str, object]) -> bool:
        """Return whether an entry of the optimizer's state has exactly the live views, and no other state."""
        others = len(entry) > len(self.views) + 1  # beside the step
        return all(
            entry.get(key) is view and local(view).data_ptr() == self._addresses[key]
            for key, view in self.views.items()
        ) and not (others and any(key in entry for key in self.arena.rule.keys if key not in self.views))

    def adopt_step(self, step: Tensor) -> None:
        """Count from the step of an entry."""
        self.step, self.count = step, float(step)
        self.saw_step()

    def saw_step(self) -> None:
        """Remember the step's tensor as it is now, and the count."""
        self._step_version, self._step_written = version_counter(self.step), self.count

    def write_step(self) -> None:
        """Write the count to the step's tensor."""
        if self.count != self._step_written:
            self.step.fill_(self.count)
            self.saw_step()

    def intact(self, entry: Mapping[str, object]) -> bool:
        """Return whether an entry is unchanged since the last step."""
        step = self.step
        seen = entry.get("step") is step and version_counter(step) == self._step_version
        return seen and float(step) == self.count and self.is_adopted(entry)

    def renew_views(self) -> None:
        """Restore the memory of views that user code has replaced (`view.data = ...`), with the new values."""
        for key, view in list(self.views.items()):
            if local(view).data_ptr() != self._addresses[key]:
                fresh = local(self.make_views()[key])
                fresh.copy_(local(view).detach().to(fresh.device))  # as in `write_entry`
                local(view).data = fresh

    def make_views(self) -> dict[str, Tensor]:
        """Return the arena's tensors by their names in a state dict, divided over ranks as the parameter is.

        Each has a storage of its own: pickling one would else write the whole arena.
        """
        views = {}
        self._addresses = {}
        for field in self.arena.format.fields:
            if field.key is not None:
                flat = as_transport_dtype(self.state.fields[field.name])
                shared = field.block > 1
                view = with_own_storage(flat.view(scale_shape(self.local.shape)) if shared else self.shaped(flat))
                shape = scale_shape(self.parameter.shape) if shared else None
                views[field.key] = laid_out_as(view, self.parameter, shape)
                self._addresses[field.key] = view.data_ptr()
        return views

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view of a tensor in the order of `flat`, shaped like this rank's part of the parameter."""
        if self.layout is None:
            return flat.view(self._shape)
        places = [self.layout.index(axis) for axis in range(len(self.layout))]
        return flat.view([self._shape[axis] for axis in self.layout]).permute(places)


def make_records(parameters: Sequence[Tensor], arena: Arena, first: int = 0) -> list[ParameterRecord]:
    """Return records of the parameters, one after the other in the arena that was made for them.

    first: the number of the first record.
    """
    offsets = itertools.accumulate((local(p).numel() for p in parameters), initial=0)
    places = zip(parameters, offsets, itertools.count(first), strict=False)
    return [ParameterRecord(parameter, arena, offset, number) for parameter, offset, number in places]


def are_unchanged(records: Sequence[ParameterRecord]) -> bool:
    """Return whether no record is `changed`, as far as is known when all that are not wrapped are asked at once."""
    parameters = [record.parameter for record in records]
    return (
        True not in [record.rewritten or record.wrapped for record in records]
        and [*map(version_counter, parameters)] == [record.version for record in records]
        and [*map(Tensor.data_ptr, parameters)] == [record.data_ptr for record in records]
        and [*map(Tensor.stride, parameters)] == [record._strides for record in records]
        and not any(map(Tensor.is_neg, parameters))
    )


def step_of(entry: Mapping[str, Any]) -> Tensor:
    """Return the entry's step as a float32 scalar on the host that counts writes; 0 if it has none."""
    step = entry.get("step", 0.0)
    usable = isinstance(step, Tensor) and step.device.type == "cpu" and step.dtype == torch.float32
    if not usable or step.ndim or step.is_inference():
        step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return step


Layout = tuple[int, ...] | None
"""The axes in their order in memory, axes of length 1 last; None: the tensor is contiguous, or has gaps."""


def kind_of(tensor: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, Layout]:
    """Return the properties of a parameter that must not change once it has a record."""
    return tensor.device, tensor.dtype, tensor.shape, _layout(tensor)


def flat_alias(tensor: Tensor) -> Tensor | None:
    """Return a 1-D view of the tensor's elements in memory order.

    None if its memory has gaps or overlaps, or the tensor is lazily negated.
    """
    if tensor.is_neg() or not is_dense(tensor):
        return None
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill a piece of memory, in any order."""
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
    """Return the layout of the tensor's elements in memory."""
    if tensor.is_contiguous() or flat_alias(tensor) is None:
        return None
    strides, shape = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.ndim), key=lambda axis: (shape[axis] == 1, -strides[axis])))
