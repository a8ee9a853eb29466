"""Gradients that leave `p.grad` for the host, as `offload_gradients=True` says."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dos.guard import ANY, entry
from dos.in_backward import TOUCHED
from dos.owners.assembly import Assembly
from dos.owners.waiting import Waiting
from dos.parameters.admission import Group
from dos.parameters.watching import hooks_of_others
from dos.sharding.local import laid_out_as, local
from dos.state.record import ParameterRecord
from dos.torch_internals.modes import backward_number, when_backward_ends, writes_gradient
from dos.weights.parts import check_parts


class Taking:
    """Offloads the gradients of one optimizer: in hooks of backward, or what no hook has taken before it is used."""

    def __init__(self, assembly: Assembly, waiting: Waiting) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._waiting = waiting

    def takes(self, parameter: Tensor, leaf: Tensor) -> bool:
        """Return whether a gradient that backward has just written is to be offloaded. Raises if that cannot be."""
        # It stays in `p.grad` until the step where hooks of user code read it there.
        if not self._registry.offloaded.enabled or hooks_of_others(leaf):
            return False
        known = self._registry.leaf(parameter)
        if leaf is known:
            self._registry.offloaded.refuse_second_thread(self._registry.record(parameter))
        elif writes_gradient(known):
            check_parts(parameter, known)
        return True

    def know(self, parameter: Tensor) -> None:
        """Enrol all parameters if gradients are offloaded and this one is new."""
        if self._registry.offloaded.enabled and self._registry.record(parameter) is None:
            self._assembly.enrol(
                [(p, group) for group in self._assembly.groups for p in group["params"] if p.requires_grad]
            )

    def take_written(self, record: ParameterRecord, leaf: Tensor) -> None:
        """Offload a gradient that backward has just written."""
        offloaded, parameter = self._registry.offloaded, record.parameter
        # Not what another thread of autograd may be writing to the parameter itself; its own hook comes next.
        taken = record in offloaded.records and record not in offloaded.left
        joins = parameter is not leaf and parameter.grad is not None and not taken
        with torch.no_grad():
            self._take(record, leaf, in_backward=True)
        if joins:  # set by user code before any backward, which adds to it
            offloaded.left.add(record)

    def take_remaining(self, active: Sequence[tuple[ParameterRecord, Group]]) -> None:
        """Offload gradients that no hook has taken, so that all gradients of a subgroup are in one place.

        Raises RuntimeError, with none taken, if user code has set one beside a gradient on the host.
        """
        offloaded = self._registry.offloaded
        if self._assembly.on_device is None:
            return
        found = [(r, leaf) for r, _ in active if r.arena.accelerated for leaf in _leaves(r)]
        for record, leaf in found:
            # On a copy, which user code does not know, is what a backward that raised has left.
            if leaf is record.parameter and record in offloaded.records and record not in offloaded.left:
                raise RuntimeError(
                    f"user code has set p.grad of a parameter of shape {tuple(record.parameter.shape)} whose gradient "
                    "DOSAdam(offload_gradients=True) has moved to the host, where p.grad does not replace it; edit "
                    "gradients with optimizer.edit_gradients(), or call optimizer.zero_grad() before you set p.grad"
                )
        for record, leaf in found:
            self._take(record, leaf, in_backward=False)

    def _take(self, record: ParameterRecord, leaf: Tensor, *, in_backward: bool) -> None:
        """Offload a gradient, in `leaf.grad`: add it to the one on the host and release it here."""
        self._assembly.clipping.about_to_add(record)
        subgroups = [subgroup for subgroup, _ in self._registry.places[record]]
        index = self._registry.index[subgroups[0]] if subgroups else 0
        assert leaf.grad is not None, "it is taken from there"
        # Before `stages` is called, which counts the memory of the staging: a wider gradient replaces it.
        record.arena.stage_gradients_as(leaf.grad.dtype)
        # Not in backward where ranks divide parameters: spilling waits for the device, whose collectives wait for other
        # ranks, which may wait for this one.
        if not (in_backward and record.sharded) and not all(map(self._registry.host_store.stages, subgroups)):
            self._ledger.spill_to_disk(self._registry.accelerated)
        if self._registry.offloaded.take(record, leaf, subgroups, index, self._ledger, in_backward=in_backward):
            when_backward_ends(functools.partial(self._backward_ends, backward_number()))

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def _backward_ends(self, number: int) -> None:
        """Add the gradients that `OffloadedGradients.take` has held in vain in this backward."""
        self._registry.offloaded.end_backward(number, self._ledger.lane)

    @torch.no_grad()
    @entry(*ANY)
    def give_back(self, wanted: Collection[int]) -> None:
        """Put offloaded gradients into `p.grad` of parameters that user code has taken out of this optimizer's groups.

        Another optimizer may have them now, and finds later gradients there, too. wanted: the ids of such parameters.
        """
        self.give_back_within(wanted)

    def give_back_within(self, wanted: Collection[int] | None = None) -> None:
        """Do the same within another call of the optimizer. wanted: None for all that are gone."""
        offloaded, own = self._registry.offloaded, set(map(id, self._assembly.parameters))
        for record in [r for r in offloaded.records if id(r.parameter) not in own]:
            parameter = record.parameter
            if wanted is None or id(parameter) in wanted:
                flat = offloaded.flat(record)
                self._assembly.clipping.apply(offloaded.handle(record), flat)
                values = record.shaped(flat.to(offloaded.dtype(record), copy=True)).to(local(parameter).device)
                gradient = laid_out_as(values, parameter)
                offloaded.forget([record])
                if record.leaf is parameter:  # else backward goes on to write the gradient of the copy
                    self._registry.watching.watch(parameter, wanted=False)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def offload_the_rest(self) -> None:
        """Redistribute gradients to the placements of their parameters; if gradients are offloaded, offload all."""
        if self.guard.lost:
            self.guard.check()
        if self._assembly.in_backward is not None:
            raise RuntimeError(TOUCHED)
        self._registry.agree(self._assembly.groups)
        if self._registry.offloaded.enabled:
            self._registry.renew_hooks()
        self._registry.place_gradients(self._assembly.groups)
        if self._registry.offloaded.enabled:
            self._waiting.end_last_step()
            settled, others, *_ = self._assembly.reconciler.look(self._assembly.groups)
            self.take_remaining(settled + self._assembly.enrol(others))


def _leaves(record: ParameterRecord) -> list[Tensor]:
    """Return the tensors that have a gradient of the parameter: itself, and its copy where weights stream."""
    found = [record.leaf] if record.leaf is record.parameter else [record.parameter, record.leaf]
    return [each for each in found if each.grad is not None]
