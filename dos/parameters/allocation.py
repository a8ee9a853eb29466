"""Makes room for state: which parameters share an arena, what it takes of the host, how large its subgroups are."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace

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
"""Chosen so small that there are more, subgroups take longer to issue than to update."""
HOST_SIZE, SHARDED_SIZE = 100_000_000, 1 << 24
"""Parameters of a subgroup on the host unless the user chooses, and at most where they are DTensors: a layer waits for
its own, and an update of so many takes some milliseconds, beside which starting it is nothing."""

LEAST_SHARES = 32
"""Subgroups that host memory takes at least, so that what passes through it on its way from disk leaves room."""


LEAST_ON_DISK = mmap.PAGESIZE // 2
"""Parameters whose gradients of 16 bits are a whole page."""


def pages(state: Format) -> int:
    """Parameters of which each field of the state is whole pages, and gradients of 16 bits are, too."""
    each = [field.block * mmap.PAGESIZE // BYTES[field.type] for field in state.fields]
    return math.lcm(LEAST_ON_DISK, *each)


class Allocation:
    """Allocates as the user's options say."""

    def __init__(self, options: Options, devices: DeviceFinder) -> None:
        self._options = options
        self._devices = devices

    def alike(self, parameters: Iterable[tuple[Tensor, Group]]) -> list[tuple[list[Tensor], Group]]:
        """The parameters by group, dtype and memory: each list can share an arena."""
        groups: dict[int, int] = {}
        members = [(groups.setdefault(id(group), len(groups)), p, group) for p, group in parameters]

        def kind(member: tuple[int, Tensor, Group]) -> tuple[int, str, bool, int, str]:
            number, p, group = member
            state = self._format(p, group)
            return number, str(p.dtype), self._devices.holds(p), state.block, state.name

        runs = [list(run) for _, run in itertools.groupby(sorted(members, key=kind), key=kind)]
        return [([p for _, p, _ in run], run[0][2]) for run in runs]

    def _format(self, parameter: Tensor, group: Group) -> Format:
        """Of the parameter's state."""
        rule = self._options.rule
        # The home of weights that stream is what an update on the host writes to: they need no master of their type.
        accelerated = self._devices.holds(parameter) and id(parameter) not in self._devices.streamed
        return rule.format(parameter, accelerated=accelerated, extra=rule.extra(group))

    def host_bytes(self, parameter: Tensor, group: Group) -> int:
        """Host memory for the state of a parameter, at most."""
        numel, accelerated = local(parameter).numel(), self._devices.holds(parameter)
        state = self._format(parameter, group)
        most = HostBytes.of(numel, state, accelerated=accelerated)
        if id(parameter) in self._devices.streamed:
            most = replace(most, parameter_staging=numel * state.value_bytes)
        if not (accelerated and self._lasting):
            return most.total
        gradients = numel * parameter.dtype.itemsize if self._options.offload_gradients else 0
        gradients += most.parameter_staging if id(parameter) in self._devices.streamed else 0
        return gradients + (most.state if self._devices.shares_host_memory else 0)

    def takes_host_memory_at_once(self, parameter: Tensor) -> bool:
        """Whether state of a parameter takes memory of the host as soon as it has room, wherever it is."""
        return not self._devices.holds(parameter) or (self._lasting and self._devices.shares_host_memory)

    @property
    def _lasting(self) -> bool:
        """Whether state on the accelerator stays there for good."""
        return self._options.never_leaves(self._devices.found)

    def size_on_device(self, numel: int) -> int:
        """Parameters of new subgroups there, where so many have state then."""
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
        if self._devices.found is not None:
            with contextlib.suppress(Exception):  # whatever it is, the size is not known then
                device_bytes = max(0, self._devices.found.memory().total)
        size, host = automatic_subgroup_size(numel, device_bytes), self._options.host_memory
        if self._options.disk and host is not None:
            size = min(size, max(1, int(host / (LEAST_SHARES * MIXED.held_bytes))))
        return size

    def make_arena(
        self, parameters: list[Tensor], group: Group, first: int, size: int
    ) -> tuple[list[ParameterRecord], list[Subgroup]]:
        """A new arena for parameters of one group, dtype and memory: records, numbered from `first`, and subgroups.

        size: of subgroups on the accelerator.
        """
        accelerated, state = self._devices.holds(parameters[0]), self._format(parameters[0], group)
        if not accelerated:
            size = self._options.subgroup_size or HOST_SIZE
        if accelerated and self._options.disk:
            whole = pages(state)
            size = -(-size // whole) * whole
        lasting = accelerated and self._lasting
        with explain_oom(self._devices.found):
            arena = Arena(
                parameters,
                self._devices.found if accelerated else None,
                self._options.rule,
                state,
                tier=Tier.DEVICE if lasting else Tier.HOST,
                part=1 if self._options.rule.whole else rounded(size),  # of whole parameters they differ in size
                weights=id(parameters[0]) in self._devices.streamed,
            )
        records = make_records(parameters, arena, first)
        if not accelerated and any(record.sharded for record in records):
            size = min(size, SHARDED_SIZE)
        return records, split(arena, records, size)


@contextlib.contextmanager
def explain_oom(device: Device | None) -> Iterator[None]:
    """Surrounds allocations of state that never leaves this device."""
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
