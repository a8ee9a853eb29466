"""The parameters of one optimizer: which there are, where they are, and whose gradients are watched."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dos.deciding.decisions import Decisions
from dos.deciding.policies import resolve_policy
from dos.device_side import DeviceSide
from dos.devices import Device, DeviceFinder
from dos.guard import Guard
from dos.options import Options
from dos.parameters.active import Active
from dos.parameters.admission import Group
from dos.parameters.registry import Registry
from dos.parameters.watching import Watching
from dos.sharding.local import is_sharded
from dos.sharding.meshes import Meshes
from dos.state.record import ParameterRecord


class Members:
    """The parameters with which a session works; it is what their hooks report to.

    groups: the optimizer's param groups, as it last was called with.
    on_device: what is done on the accelerator; None until a parameter there is met.
    agreed: whether all ranks have the same ones and settings, as far as is known.
    """

    def __init__(self, options: Options, device: Device | torch.device | str | None, meshes: Meshes) -> None:
        self.groups: list[Group] = []
        self.guard = Guard()
        self._lock = self.guard.lock
        self.meshes = meshes
        self.devices = DeviceFinder(device)
        self.registry = Registry(options, self.devices, self.guard, meshes)
        self.on_device: DeviceSide | None = None
        self.agreed = False
        self._options = options
        self._warned_idle = False
        self._watching = Watching(takes=bool(options.offload_gradients))
        weakref.finalize(self, self._watching.keep)

    @property
    def decisions(self) -> Decisions | None:
        """What is decided for the device; None without one."""
        return None if self.on_device is None else self.on_device.decisions

    def admit(self, groups: list[Group], group: Group) -> None:
        """Take in one of the groups. Raises TypeError, ValueError or MemoryError for one that cannot be optimised."""
        self.groups = groups
        self.registry.admit(group)
        for parameter in group["params"]:
            if not is_lazy(parameter):
                self._accelerates(parameter)  # which raises where it cannot be
                # From the first gradient on, for the first peak of memory is one, too; it may be moved until then.
                # Not where FSDP2 keeps its shards on the host: it copies gradients there only while they have no hook.
                self._watching.watch(parameter, self, self.devices.holds(parameter) or not is_sharded(parameter))
        self.agreed = False

    def agree(self) -> None:
        """Look at the parameters as they are when they are first used, which frameworks may have exchanged.

        Ranks that are not alike hear of it, before one of them waits for another that never comes.
        """
        if self.agreed:
            return
        parameters = [p for group in self.groups for p in group["params"]]
        # Let go of parameters that are in no group any more; Accelerate exchanges them when it shards the model.
        self._watching.keep({*map(id, parameters), *self.registry.records})
        self.registry.refuse_replaced(self.groups)
        self.meshes.meet(parameters)
        if self.meshes:
            counts = {
                "the number of parameters": len(parameters),
                "the elements of all parameters": sum(p.numel() for p in parameters),
            }
            self.meshes.agree(counts, stages=False)  # stages of a pipeline differ in size
            self.meshes.agree(self._options.agreed())
        self.agreed = True

    def _let_go(self, records: Sequence[ParameterRecord]) -> None:
        """Free what is held for parameters that were replaced, with all parameters of their arenas."""
        if self.on_device is not None:
            arenas = {record.arena for record in records}
            self.on_device.let_go([s for s in self.registry.accelerated if s.arena in arenas], records)
        self.registry.forget(records)
        self._watching.keep({*(id(p) for group in self.groups for p in group["params"]), *self.registry.records})

    def _enrol(self, members: Sequence[tuple[Tensor, Group]]) -> list[tuple[ParameterRecord, Group]]:
        """The records of these parameters with their groups.

        Of new ones the gradients are watched, and the accelerator is set up if they are on it. Raises MemoryError.
        """
        for record in self.registry.enrol(members):
            self._accelerates(record.parameter)
            self._watching.watch(record.parameter, self, record.arena.accelerated)
        return [(self.registry.records[id(p)], group) for p, group in members]

    def _accelerates(self, parameter: Tensor) -> bool:
        """Whether the parameter is on the accelerator, which is set up when the first such parameter is met."""
        accelerates = self.devices.holds(parameter)
        if self.on_device is None and self.devices.found is not None:
            policy = resolve_policy(self._options.policy)
            self.on_device = DeviceSide(self.devices.found, self.registry, policy, self._options, self.guard)
            # Work in flight ends when the optimizer is collected or the interpreter exits.
            weakref.finalize(self, self.on_device.engine.finish)
        return accelerates

    def _warn_if_idle(self, active: Active) -> None:
        if not active.members and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                "DOSAdam.step() found no gradient on any of its parameters. If backward() was called, the model's "
                "parameters were replaced after the optimizer was built; build it anew from model.parameters().",
                stacklevel=4,
            )
