"""The state of parameters as flat tensors: at home in an arena, or carved from a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dos.devices import Copy, Device, Job
from dos.devices.coalesce import Kept
from dos.rules.base import Rule
from dos.sharding.local import local
from dos.state.host_tensor import HostTensor
from perfmodel.format import MASTER, REST, Field, Format
from perfmodel.plan import Tier

ALIGNMENT = 256
"""Tensors in larger memory begin on a multiple of this number of bytes, as CUDA's own allocations do."""


@dataclass(frozen=True, eq=False)
class State:
    """Optimizer state of a run of parameters: 1-D tensors on one device.

    fields: the format's fields by name, in its order.
    blocks: the number of parameters that share an element, by field, where it is not 1.
    """

    fields: Mapping[str, Tensor]
    blocks: Mapping[str, int]
    _moves: dict[bool, tuple[list[int], Kept]] = field(default_factory=dict)

    @property
    def master(self) -> Tensor | None:
        """The masters of the parameters; None where the update reads and writes the parameters themselves."""
        return self.fields.get(MASTER)

    @property
    def rest(self) -> Tensor | None:
        """The lower halves of masters whose upper halves are the parameters; None where masters are not split."""
        return self.fields.get(REST)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the format."""
        return tuple(self.fields.values())

    def cut(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return views of the fields of the parameters from start to stop, by name."""
        each = ((name, tensor, self.blocks.get(name, 1)) for name, tensor in self.fields.items())
        return {name: tensor[start // n : stop // n] for name, tensor, n in each}

    def slice(self, start: int, stop: int) -> State:
        """Return a view of the state of the parameters from start to stop."""
        return State(self.cut(start, stop), self.blocks)

    def zero(self) -> None:
        """Set all fields to zero, as for parameters that were never updated."""
        for tensor in self.tensors():
            tensor.zero_()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors())

    @cached_property
    def carved_bytes(self) -> int:
        """Bytes of a buffer from which a state like this one can be carved."""
        return sum(aligned(t.nbytes) for t in self.tensors())

    def carve(self, buffer: Tensor, alignment: int = ALIGNMENT) -> State:
        """Return a state like this one in `buffer` (1-D uint8), each tensor on a multiple of `alignment` bytes."""
        carved, offset = {}, 0
        for name, tensor in self.fields.items():
            carved[name] = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
            offset += aligned(tensor.nbytes, alignment)
        return State(carved, self.blocks)

    def moves(self, host: State, *, to_host: bool) -> Kept:
        """Return the copies between this state, on the device, and one on the host. Remembered for the last one."""
        theirs = host.tensors()
        # By address: user code may move the memory of state, as by `share_memory_`.
        addresses = [tensor.data_ptr() for tensor in theirs]
        known = self._moves.get(to_host)
        if known is None or known[0] != addresses:
            copies = state_copies(host, self) if to_host else state_copies(self, host)
            known = self._moves[to_host] = addresses, Kept(copies)
        return known[1]


def state_copies(destination: State, source: State) -> list[Copy]:
    """Return the copies that move a subgroup's state."""
    return list(zip(destination.tensors(), source.tensors(), strict=True))


class Arena:
    """Flat state of parameters that got their first gradient together.

    All are of one param group, one dtype and one memory (host or accelerator). Each parameter's state is contiguous,
    in the parameter's own memory order, so `optimizer.state[p]["exp_avg"]` is a view of it.

    device: the accelerator of the parameters; None: they are on the host.
    rule: updates them. format: the fields of the state.
    tier: the tier of the state's home; state whose home is the device never leaves it.
    homes: the host memory of the state.
    incoming: staging for gradients from the accelerator, in the parameters' dtype or wider. Only where they are there.
    outgoing: staging for new parameters to the accelerator; None where the host updates none. Where a parameter is its
        master, or half of it, the next update on the host reads it here. staging: both.
    whole_masters: whether each parameter has a master of which it is no half. reads_parameters: whether an update on
        the host reads the parameters, and not a master alone.
    weights: whether `outgoing` is the home of the parameters themselves.
    streams: whether they are at home now, and on the device only while their block computes. reading: the last copy of
        them to the device.

    Host memory is allocated when `make` is called for a part, or when a part is written.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device: Device | None,
        rule: Rule,
        state: Format,
        *,
        tier: Tier = Tier.HOST,
        part: int = 1,
        weights: bool = False,
    ) -> None:
        """part: parameters of a subgroup; host memory is allocated subgroup by subgroup where they share no pages."""
        self.dtype = parameters[0].dtype
        self.accelerated = device is not None
        self.tier = tier
        self.numel = sum(local(p).numel() for p in parameters)
        self.device = device
        self.rule = rule
        self.format = state
        self.whole_masters = state.master is not None  # each step asks for each parameter
        self.reads_parameters = not self.whole_masters
        self.weights, self.streams = weights, False
        self.reading: Job | None = None
        self._part = -(-part // self.format.block) * self.format.block
        self.homes: list[HostTensor] = []
        self._buffers: list[Tensor] = []
        blocks = {f.name: f.block for f in self.format.fields if f.block > 1}
        self.state = State({f.name: self._field(f) for f in self.format.fields}, blocks)
        self.staging: list[HostTensor] = []
        self.outgoing: HostTensor | None = None
        if device is not None:
            self.incoming = HostTensor(self.numel, self.dtype, device, self._part)
            self.staging.append(self.incoming)
            if weights or tier is Tier.HOST:
                self.outgoing = HostTensor(self.numel, self.dtype, device, self._part)
                self.staging.append(self.outgoing)
        self._slices: dict[tuple[int, int], State] = {}

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory of state whose home is the device."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def stage_gradients_as(self, dtype: torch.dtype) -> None:
        """Replace the gradient staging by one in float32 if it cannot represent gradients of `dtype`."""
        if self.device is not None and self.incoming.tensor.dtype not in (dtype, torch.float32):
            self.staging[0] = self.incoming = HostTensor(self.numel, torch.float32, self.device, self._part)

    def weights_at_home(self) -> HostTensor:
        """Return the host memory of the parameters themselves. Only where `weights`."""
        assert self.outgoing is not None, "their home"
        return self.outgoing

    @property
    def keeps_copies(self) -> bool:
        """Whether an update may read a copy of a parameter, or a master, which a write by user code does not reach."""
        return self.format.has_masters or (self.accelerated and self.tier is Tier.HOST and not self.streams)

    def slice(self, start: int, stop: int) -> State:
        """Return a view of the state from start to stop. Remembered, because every step needs the same views."""
        key = start, stop
        if key not in self._slices:
            self._slices[key] = self.state.slice(start, stop)
        return self._slices[key]

    def _field(self, field: Field) -> Tensor:
        dtype = getattr(torch, field.type)
        if self.device is None:
            return torch.zeros(self.numel // field.block, dtype=dtype, device="cpu")
        if self.tier is Tier.HOST:
            self.homes.append(HostTensor(self.numel, dtype, self.device, self._part, field.block))
            return self.homes[-1].tensor
        self._buffers.append(self.device.allocate(self.numel // field.block * dtype.itemsize))
        return self._buffers[-1].zero_().view(dtype)


def as_transport_dtype(flat: Tensor) -> Tensor:
    """Return the tensor as a state dict has it: int16 as bfloat16, which collectives support."""
    return flat.view(torch.bfloat16) if flat.dtype == torch.int16 else flat


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the bytes that a tensor of `nbytes` takes in larger memory, such as a slot."""
    return -(-nbytes // alignment) * alignment
