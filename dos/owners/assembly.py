"""The parts of one optimizer, which the owners in this folder share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from dos.backward import Backward
from dos.gradients.clipping import Clipping
from dos.guard import Guard
from dos.in_backward import InBackward
from dos.options import Options
from dos.parameters.admission import Group
from dos.parameters.group_parameters import members
from dos.parameters.hooks import Attachment, refuse_forward
from dos.parameters.reconciler import Reconciler
from dos.parameters.registry import Registry
from dos.planning.decisions import Decisions
from dos.sharding.meshes import Meshes
from dos.state.record import ParameterRecord
from dos.step.ledger import Ledger
from dos.weights.homes import WeightHomes

logger = logging.getLogger(__name__)


class Assembly:
    """The parts of one optimizer. None of them refers to the optimizer or to its session: no cycle.

    registry: the parameters that have state. reconciler: compares them with what user code has made of them.
    ledger: where state is, and the transfers in flight.
    clipping: of the gradients of the next step.
    groups: the optimizer's param groups.
    on_device: backward and the plans on the accelerator; None until a parameter there is admitted.
    attachment: the model into whose next forward updates run, if any.
    weights: the model's blocks whose weights stream, if any do.
    in_backward: the updates during backward, if the model was attached with them.
    """

    def __init__(self, options: Options, guard: Guard, registry: Registry, meshes: Meshes) -> None:
        self.options, self.guard, self.registry = options, guard, registry
        self.ledger = Ledger(guard)
        self.reconciler = Reconciler(registry, options.rule)
        self.clipping = Clipping(registry.offloaded, options.max_grad_norm, meshes, skips=options.skip_nonfinite)
        self.groups: list[Group] = []
        self.on_device: Backward | None = None
        self.attachment: Attachment | None = None
        self.weights: WeightHomes | None = None
        self.in_backward: InBackward | None = None
        self._awaited: set[int] = set()
        """The ids of parameters on the host that must be on the accelerator when they are used."""
        self._refusal: RemovableHandle | None = None

    @property
    def decisions(self) -> Decisions | None:
        """The plans for the device; None without one."""
        return None if self.on_device is None else self.on_device.decisions

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [p for group in self.groups for p in members(group["params"])]

    def await_device(self, parameters: Sequence[Tensor]) -> None:
        """Set the accelerator up if any of these is there; refuse to compute with those that have yet to move there."""
        self.set_up_device()
        self._awaited |= {id(p) for p in parameters if self.registry.devices.awaits(p)}
        if self._awaited and self._refusal is None:
            awaited, devices = self._awaited, self.registry.devices
            self._refusal = refuse_forward(lambda p: id(p) in awaited and devices.awaits(p))
            weakref.finalize(self, self._refusal.remove)

    def end_refusal(self) -> None:
        """Let all parameters be used on the host, where weights stream from."""
        if self._refusal is not None:
            self._refusal.remove()

    def set_up_device(self) -> None:
        """Set the accelerator up if a parameter there was found, once."""
        found = self.registry.devices.device
        if self.on_device is not None or found is None:
            return
        policy = self.options.policy_on(found)
        if found.shares_host_memory and self.options.never_leaves(found):
            logger.info(
                "%s shares the host's memory: all optimizer state stays there, as with policy='resident'", found
            )
        self.on_device = Backward(found, self.registry, self.ledger, policy, self.options, self.guard)
        self.connect()

    def connect(self) -> None:
        """Connect the device and the attachment, if there are both."""
        if self.on_device is not None and self.attachment is not None:
            self.on_device.attached, self.on_device.updates = True, self.in_backward is not None
            if self.weights is not None:
                self.attachment.homes = self.weights.stream.copies.homes
                self.weights.stream.updates = self.on_device.updates
                self.on_device.stream_weights(self.weights)
            self.attachment.surround(self.on_device.activations)

    def look_for_device(self) -> None:
        """Set the accelerator up if user code has moved parameters there since they were admitted."""
        if self.on_device is None and any(self.registry.devices.holds(p) for p in self.parameters if not is_lazy(p)):
            self.set_up_device()

    def enrol(self, members: Sequence[tuple[Tensor, Group]]) -> list[tuple[ParameterRecord, Group]]:
        """Return the records of these parameters with their groups; allocate those of new ones. Raises MemoryError."""
        self.registry.enrol(members)
        self.set_up_device()
        return [(self.registry.records[id(p)], group) for p, group in members]

    def forget(self, gone: Sequence[ParameterRecord]) -> None:
        """Forget these records with their arenas, everywhere: a reference that stays would use released memory."""
        if gone:
            with self.guard.change():
                if self.on_device is not None:
                    self.on_device.forget(gone)
                self.reconciler.forget()
                if self.in_backward is not None:
                    self.in_backward.expectations = None
                self.registry.forget(gone, self.parameters)
