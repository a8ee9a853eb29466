"""Clipping of a session's gradients, by the optimizer's own methods or by torch's function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dos.guard import exclusive
from dos.parameters.admission import Group
from dos.session import Session


class Clipped:
    """The gradients of one session as clipping meets them, wherever they are."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = session.guard.lock

    @torch.no_grad()
    @exclusive
    def clip(self, groups: list[Group], max_norm: float) -> Tensor:
        """Let the next step clip the global 2-norm of all gradients; the norm before."""
        self._session.offload_the_rest(groups)
        return self._session.clipping.clip(self._session.with_gradients(), max_norm)

    @torch.no_grad()
    @exclusive
    def norm(self, groups: list[Group]) -> Tensor:
        """The global 2-norm of all gradients as the next step will use them."""
        self._session.offload_the_rest(groups)
        return self._session.clipping.norm(self._session.with_gradients())

    def has_offloaded(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether a gradient of any of these is on the host."""
        offloaded = self._session.registry.offloaded
        return offloaded is not None and bool(offloaded.gradients({id(p) for p in parameters}))

    def offloads(self, parameters: Sequence[Tensor]) -> bool:
        """Called by torch's clipping: whether that may be so on some rank."""
        session = self._session
        divided = session.meshes and session.on_device is not None and session.registry.offloaded is not None
        return bool(self._own(parameters)) if divided else self.has_offloaded(parameters)

    @exclusive
    def offloaded_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Called by torch's clipping: the norm of their gradients on the host, once all are there."""
        self._session.offload_the_rest(self._session.groups)
        return self._session.clipping.norm_away(parameters, norm_type)

    @exclusive
    def fold_offloaded(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Called by torch's clipping: multiply their gradients on the host by the factor in the next step."""
        self._session.clipping.fold_away(parameters, factor)

    @torch.no_grad()
    @exclusive
    def fold_factor(self, parameters: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        """Called by torch's clipping after ``dos.fold_clipping()``; returns those of them that are this optimizer's."""
        own = self._own(parameters)
        self._session.clipping.fold(own, factor)
        return own

    def _own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        known = {id(p) for group in self._session.groups for p in group["params"]}
        return [p for p in parameters if id(p) in known]
