"""Gradients between backward and `step()`, when user code clips, edits, measures or discards them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dos.gradients.editing import Edit, Editing
from dos.guard import ANY, Phase, entry
from dos.owners.assembly import Assembly
from dos.owners.taking import Taking
from dos.owners.waiting import Waiting
from dos.state.record import ParameterRecord


class Edits:
    """Calls of user code that use or discard the gradients of one optimizer before a step does."""

    def __init__(self, assembly: Assembly, waiting: Waiting, taking: Taking) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._clipping = assembly, assembly.registry, assembly.clipping
        self._waiting, self._taking = waiting, taking

    @torch.no_grad()
    @entry(*ANY, enters=False)
    def edit_gradients(self, edit: Edit) -> None:
        """Call `edit` with each parameter that has a gradient, and with this. It may read state and the model."""
        self._before_editing()
        departures = None if self._assembly.on_device is None else self._assembly.on_device.departures
        members = [(p, self._registry.record(p)) for p in self._assembly.parameters]
        Editing(edit, self._registry.offloaded, self._clipping, departures).run(members)

    @entry(*ANY)
    def _before_editing(self) -> None:
        self._taking.offload_the_rest()

    @torch.no_grad()
    @entry(*ANY)
    def clip(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of all gradients in the next step; return the norm before."""
        self._taking.offload_the_rest()
        return self._clipping.clip(self._assembly.parameters, max_norm)

    @torch.no_grad()
    @entry(*ANY)
    def norm(self) -> Tensor:
        """Return the global 2-norm of all gradients as the next step will use them."""
        self._taking.offload_the_rest()
        return self._clipping.norm(self._assembly.parameters)

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a gradient of any of these is on the host. For torch's clipping."""
        return bool(self._registry.offloaded.gradients(set(map(id, parameters))))

    def may_have_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether `has_offloaded` may be true on some rank. For torch's clipping."""
        divided = self._registry.meshes and self._assembly.on_device is not None and self._registry.offloaded.enabled
        return bool(self._own(parameters)) if divided else self.has_offloaded(parameters)

    @entry(*ANY)
    def offloaded_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Offload all gradients and return the norm of these on the host. For torch's clipping."""
        self._taking.offload_the_rest()
        return self._clipping.norm_away(parameters, norm_type)

    @entry(*ANY)
    def fold_offloaded(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply these gradients on the host by the factor in the next step. For torch's clipping."""
        self._clipping.fold_away(parameters, factor)

    @torch.no_grad()
    @entry(*ANY)
    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Fold the factor into the next step for this optimizer's parameters, and return them.

        For torch's clipping after ``dos.fold_clipping()``.
        """
        own = self._own(parameters)
        self._clipping.fold(own, factor)
        return own

    def _own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        known = set(map(id, self._assembly.parameters))
        return [p for p in parameters if id(p) in known]

    def updates_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether backward updates any of these. For torch's clipping."""
        mode = self._assembly.in_backward
        return mode is not None and any(id(p) in mode.members for p in parameters)

    def discard_gradients(self, parameters: Sequence[Tensor], *, overwrites: bool) -> bool:
        """Forget what is offloaded of these parameters' gradients, because user code zeroes them.

        overwrites: whether it then writes to gradients in `p.grad`, which the step may still read.
        Returns whether any of them has state here.
        """
        records = [record for p in parameters if (record := self._registry.record(p)) is not None]
        mode = self._assembly.in_backward
        if mode is not None and mode.unended:
            mode.warn_of_zeroing(self._own(parameters))
        elif mode is not None and records:
            mode.drop_used()
        if overwrites and records and self._assembly.ledger.unfinished:
            self._waiting.synchronize()
        if records and self._registry.offloaded.enabled:
            self._discard([record for record in records if not self._keeps(record)])
        return bool(records)

    def _keeps(self, record: ParameterRecord) -> bool:
        """Return whether a backward that updates has ended, so that zeroing gradients does not drop this one."""
        return self._assembly.in_backward is not None and self._assembly.in_backward.keeps(record)

    @entry(*ANY)
    def _discard(self, records: Sequence[ParameterRecord]) -> None:
        self._registry.offloaded.forget(records)
        self._empty_copies(records)
        if self._assembly.on_device is not None:
            self._assembly.on_device.begin_gradients()

    @entry(*ANY)
    def forget_interrupted(self) -> None:
        """Forget gradients that a backward which raised left on copies before our hook, or that wait for others."""
        self._registry.offloaded.forget_interrupted()
        self._empty_copies(self._registry.records.values())

    def _empty_copies(self, records: Iterable[ParameterRecord]) -> None:
        """Forget gradients on copies of weights that stream, left by a backward that was interrupted."""
        for record in records:
            if record.leaf is not record.parameter:
                record.leaf.grad = None

    def forget_gradients(self) -> None:
        """Forget all gradients, because user code has discarded them."""
        self._clipping.forget()
        offloaded, mode = self._registry.offloaded, self._assembly.in_backward
        if mode is not None and mode.unended:
            mode.warn_of_zeroing(self._assembly.parameters)
            offloaded.forget([record for record in offloaded.records if not self._keeps(record)])
        else:
            offloaded.forget_all()
            if mode is not None:
                mode.drop_used()
        if self._assembly.weights is not None:
            self._empty_copies(self._registry.records.values())
        if self._assembly.on_device is not None:
            self._assembly.on_device.departures.forget()
            self._assembly.on_device.begin_gradients()
        if self.guard.phase is Phase.BACKWARD:
            self.guard.phase = Phase.IDLE
