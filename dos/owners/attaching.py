"""Attaches a model: its hooks wait, its saved tensors move, its weights stream, or its backward updates."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from dos.activations.offload import Amount, Surrounding
from dos.guard import UNBROKEN, entry
from dos.in_backward import UNENDED, InBackward, check_updates, stop_watching, watch_backwards
from dos.owners.assembly import Assembly
from dos.owners.state import State
from dos.owners.waiting import Waiting
from dos.parameters.hooks import Attachment, lasting
from dos.parameters.replaced_modules import Successors
from dos.torch_internals.fsdp2 import reduced_before_hooks
from dos.torch_internals.module_parameters import parameters_of
from dos.weights.blocks import Amount as BlocksStaying
from dos.weights.homes import WeightHomes
from dos.weights.stream import stream_of


class Attaching:
    """Attaches models to one optimizer, one after the other.

    successors: looks for modules of the attached model that were replaced.
    """

    def __init__(self, session: Any, assembly: Assembly, waiting: Waiting, state: State) -> None:
        """session: told of the model's forward and backward; see `Session`."""
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._options = assembly, assembly.registry, assembly.options
        self._waiting, self._state = waiting, state
        self._session = weakref.ref(session)
        self.successors = Successors()

    def attach(
        self,
        model: nn.Module,
        amount: Amount | None,
        weights: BlocksStaying | None = None,
        blocks: Iterable[nn.Module] | None = None,
        *,
        updates: bool = False,
    ) -> None:
        """Let updates run on into the forward of this model. amount: how much of its saved tensors moves meanwhile.

        weights: how many of its blocks stay on the device; None: all, and nothing is moved.
        updates: whether backward updates. Raises ValueError, with nothing changed, where it cannot.
        """
        parts = self._assembly
        if parts.in_backward is not None and parts.in_backward.under_way:
            raise RuntimeError(UNENDED)
        if updates:
            check_updates(model, self._options)
        # Only hooks of the former model wait for updates in flight, and these hooks are removed below.
        self._waiting.synchronize()
        parts.look_for_device()
        if weights is not None:
            parts.weights = self._move_in(model, weights, blocks)
        elif stream_of(model) is not None:
            raise ValueError(
                "the weights of this model stream between host and device; pass weights= again, such as weights='auto'"
            )
        before = parts.attachment
        parts.attachment = Attachment(model, self._session(), amount, reads=parts.weights is None)
        if before is not None:
            before.detach()
        members = set(map(id, parameters_of(model)))
        for other in self._registry.watching.others():  # replaced, most likely, and not yet collected
            if other.assembly.in_backward is not None and members & other.assembly.in_backward.members:
                other.attaching.update_in_backward(None)
        self.update_in_backward(members if updates else None, reduced=members <= reduced_before_hooks(model))
        parts.connect()
        self.successors.begin(parts.attachment, parts.parameters)

    def update_in_backward(self, members: set[int] | None, *, reduced: bool = False) -> None:
        """Update parameters of these ids in backward from now on; None: none. reduced: as for `InBackward`."""
        parts, registry = self._assembly, self._registry
        if members is None:
            if parts.in_backward is not None:
                stop_watching(self._session())
                registry.watch_host(parts.parameters, wanted=False)
            parts.in_backward = None
            return
        registry.watch_host([p for p in parts.parameters if id(p) in members], wanted=True)
        parts.in_backward = InBackward(
            registry, parts.ledger, parts.reconciler, self.guard, self._options.rule, members, reduced=reduced
        )
        watch_backwards(self._session())

    def move_in_again(self) -> None:
        """Move the blocks whose weights stream into new homes; those before were in arenas that have gone."""
        weights = self._assembly.weights
        model = None if weights is None else weights.stream.model
        if weights is not None and model is not None:
            # Parameters are enrolled block by block there alone.
            self._assembly.weights = self._move_in(model, weights.amount, weights.stream.modules)
            self._assembly.connect()

    @entry(*UNBROKEN, enters=False)
    def _move_in(self, model: nn.Module, weights: BlocksStaying, blocks: Iterable[nn.Module] | None) -> WeightHomes:
        """Move the model's blocks into their homes, and let them stream. Raises as `WeightHomes.move_in`."""
        device = self._registry.devices.open()
        if device is None:
            raise ValueError(
                "weights= moves weights between host and accelerator, and this optimizer has none; build it with "
                "device='cuda'"
            )
        if device.shares_host_memory:
            raise ValueError(
                f"{device} shares the host's memory, so that weights have nowhere to go; leave weights= out"
            )
        if not self._registry.offloaded.enabled:
            raise ValueError(
                "weights= needs offload_gradients=True: gradients of weights that are on the host cannot stay on the "
                "device; build the optimizer with offload_gradients=True"
            )
        self._assembly.set_up_device()
        self._state.bring_home_within()
        homes = WeightHomes(device, self._registry, weights, self._assembly.weights)
        homes.move_in(model, blocks, self._assembly.groups, self._session(), self._lock)
        self._assembly.end_refusal()
        return homes

    def offload_activations(self, amount: Amount) -> AbstractContextManager[None]:
        """Return a context for forwards, which moves `amount` of the saved tensors of each to the host."""
        parts = self._assembly
        parts.look_for_device()
        if parts.on_device is None:
            return contextlib.nullcontext()
        parts.on_device.activations.size_pool(amount)
        model = None if parts.attachment is None else parts.attachment.model
        known = [*parts.parameters, *(() if model is None else lasting(model))]
        return Surrounding(parts.on_device.activations, amount, known)
