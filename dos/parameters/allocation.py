"""Allocation of state: which parameters share an arena, how much host memory it takes, how large its subgroups are."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dos.devices import Device, DeviceFinder
from dos.guard import warn
from dos.options import Options
from dos.parameters.admission import Group
from dos.sharding.local import local
from dos.state.arena import Arena
from dos.state.record import ParameterRecord, make_records
from dos.state.subgroup import Subgroup, rounded, split
from perfmodel.footprint import HostBytes
from perfmodel.format import BYTES, MIXED, Format
from perfmodel.plan import Tier
from perfmodel.subgroups import automatic_subgroup_size

MOST_SUBGROUPS = 1_000
"""The number of subgroups above which issuing them takes longer than updating them."""
HOST_SIZE, SHARDED_SIZE = 100_000_000, 1 << 24
"""Parameters of a subgroup on the host unless the user chooses; the second is the limit for DTensors, because a layer
waits for the subgroups of its own parameters. An update of 2^24 parameters takes some milliseconds; the start of an
update is short beside that."""

LEAST_SHARES = 32
"""The least number of subgroups that fit in host memory, so that windows for state on disk take a small part of it."""


LEAST_ON_DISK = mmap.PAGESIZE // 2
"""Parameters whose gradients of 16 bits are a whole page."""


def pages(state: Format) -> int:
    """Return the least number of parameters whose gradients of 16 bits and each field of state are whole pages."""
    each = [field.block * mmap.PAGESIZE // BYTES[field.type] for field in state.fields]
    return math.lcm(LEAST_ON_DISK, *each)


class Allocation:
    """Allocates arenas and subgroups as the user's options say."""

    def __init__(self, options: Options, devices: DeviceFinder) -> None:
        self._options = options
        self._devices = devices

    def alike(self, parameters: Iterable[tuple[Tensor, Group]]) -> list[tuple[list[Tensor], Group]]:
        """Return the parameters by group, dtype, memory and format: each list can share an arena."""
        groups: dict[int, int] = {}
        members = [(groups.setdefault(id(group), len(groups)), p, group) for p, group in parameters]

        def kind(member: tuple[int, Tensor, Group]) -> tuple[int, str, bool, int, str]:
            number, p, group = member
            state = self._format(p, group)
            return number, str(p.dtype), self._devices.holds(p), state.block, state.name

        runs = [list(run) for _, run in itertools.groupby(sorted(members, key=kind), key=kind)]
        return [([p for _, p, _ in run], run[0][2]) for run in runs]

    def _format(self, parameter: Tensor, group: Group) -> Format:
        """Return the format of the parameter's state."""
        rule = self._options.rule
        return rule.format(parameter, extra=rule.extra(group))

    def host_bytes(self, parameter: Tensor, group: Group) -> int:
        """Return the most host memory that the state of a parameter takes, in bytes."""
        numel, accelerated = local(parameter).numel(), self._devices.holds(parameter)
        state = self._format(parameter, group)
        most = HostBytes.of(numel, state, accelerated=accelerated)
        if not (accelerated and self._lasting):
            return most.total
        gradients = numel * parameter.dtype.itemsize if self._options.offload_gradients else 0
        gradients += most.parameter_staging if id(parameter) in self._devices.streamed else 0
        return gradients + (most.state if self._devices.shares_host_memory else 0)

    def takes_host_memory_at_once(self, parameter: Tensor) -> bool:
        """Return whether state of a parameter takes memory of the host as soon as it is allocated."""
        return not self._devices.holds(parameter) or (self._lasting and self._devices.shares_host_memory)

    @property
    def _lasting(self) -> bool:
        """Whether state on the accelerator never moves to the host."""
        return self._options.never_leaves(self._devices.device)

    def size_on_device(self, numel: int) -> int:
        """Return the size of new subgroups on an accelerator that holds state of `numel` parameters."""
        chosen = self._options.subgroup_size
        if chosen is not None:
            if self._options.disk:
                chosen = max(chosen, LEAST_ON_DISK)
            if numel > MOST_SUBGROUPS * chosen:
                warn(
                    f"subgroup_size={chosen:_} makes {-(-numel // chosen):,} subgroups of {numel:,} parameters, and "
                    f"each takes time of the host in every step; choose {-(-numel // MOST_SUBGROUPS):_} or more, or "
                    "leave it out: DOSAdam then makes 128 at most"
                )
            return chosen
        device_bytes = 0
        if self._devices.device is not None:
            with contextlib.suppress(Exception):  # a device that cannot say: the size of its memory is not known
                device_bytes = max(0, self._devices.device.memory().total)
        size, host = automatic_subgroup_size(numel, device_bytes), self._options.host_memory
        if self._options.disk and host is not None:
            size = min(size, max(1, int(host / (LEAST_SHARES * MIXED.held_bytes))))
        return size

    def make_arena(
        self, parameters: list[Tensor], group: Group, first: int, size: int
    ) -> tuple[list[ParameterRecord], list[Subgroup]]:
        """Return records, numbered from `first`, and subgroups of a new arena.

        parameters: of one group, dtype and memory. size: parameters of a subgroup on the accelerator.
        """
        accelerated, state = self._devices.holds(parameters[0]), self._format(parameters[0], group)
        if not accelerated:
            size = self._options.subgroup_size or HOST_SIZE
        if accelerated and self._options.disk:
            whole = pages(state)
            size = -(-size // whole) * whole
        lasting = accelerated and self._lasting
        with explain_oom(self._devices.device):
            arena = Arena(
                parameters,
                self._devices.device if accelerated else None,
                self._options.rule,
                state,
                tier=Tier.DEVICE if lasting else Tier.HOST,
                part=rounded(size),
                weights=id(parameters[0]) in self._devices.streamed,
            )
        records = make_records(parameters, arena, first)
        if not accelerated and any(record.sharded for record in records):
            size = min(size, SHARDED_SIZE)
        return records, split(arena, records, size)


@contextlib.contextmanager
def explain_oom(device: Device | None) -> Iterator[None]:
    """Surround allocations of state that never leaves this device, and explain their OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device is not None and device.shares_host_memory:
            raise torch.OutOfMemoryError(
                f"{device} shares the host's memory, which has no room for all optimizer state; freeze parameters, use "
                f"state_format='int8', or end other programs ({error})"
            ) from error
        raise torch.OutOfMemoryError(
            "policy='resident' keeps all optimizer state on the device, which has no memory for it; use "
            f"policy='adaptive', with which what does not fit stays on the host ({error})"
        ) from error
