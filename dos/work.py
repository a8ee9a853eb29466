"""What one step does to one subgroup: which pieces, with which gradients and settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy, Job
from dos.subgroup import Piece, State, Subgroup
from dos.update import AdamArrays, AdamStep, adam_update
from perfmodel.format import MASTER
from perfmodel.plan import Tier
from perfmodel.schedule import Found


@dataclass(frozen=True, eq=False)
class PieceUpdate:
    """The update of one piece in this step.

    gradient: 1-D, as long as the piece: where backward left it or, if it was offloaded, on the host.
    """

    piece: Piece
    gradient: Tensor
    step: AdamStep

    @property
    def parameter(self) -> Tensor:
        """The piece of the parameter: 1-D, on the parameter's device."""
        return self.piece.of_parameter(self.piece.record.flat)

    def apply(self, state: State, gradient: Tensor, parameter: Tensor | None) -> None:
        """Update `state` (of the whole subgroup) from `gradient` and give `parameter` the new values.

        gradient, parameter: 1-D, as long as the piece, on the state's device. parameter None: they stay in the master.
        """
        state = state.slice(self.piece.start, self.piece.stop)
        master = parameter if state.master is None else state.master
        assert master is not None, "an update needs a master or a parameter"
        narrower = parameter is not None and parameter.dtype != master.dtype
        moments = {name: tensor for name, tensor in state.fields.items() if name != MASTER}
        if not self.step.amsgrad:
            moments.pop("max_exp_avg_sq", None)  # there is room for it if amsgrad was ever on
        arrays = AdamArrays(gradient, master, **moments, out=parameter if narrower else None)
        adam_update(arrays, step=self.step)
        if parameter is not None and parameter is not master and not narrower:
            parameter.copy_(master)


@dataclass(frozen=True, eq=False)
class SubgroupUpdate:
    """What a step does to one subgroup: the pieces that have a gradient.

    offloaded: whether the gradients are on the host, although the parameters are not.
    """

    subgroup: Subgroup
    pieces: tuple[PieceUpdate, ...]
    offloaded: bool = False

    @property
    def numel(self) -> int:
        """Parameters updated."""
        return sum(p.piece.numel for p in self.pieces)

    def apply_in_place(self) -> None:
        """Update parameters that live on the host, without a copy."""
        for update in self.pieces:
            update.apply(self.subgroup.state, update.gradient, update.parameter)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that takes the state and, if they must come up again, the gradients."""
        return self.subgroup.state.carved_bytes + self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a slot that takes the gradients alone, if they must come up again."""
        return self.subgroup.offloaded_gradient_bytes if self.offloaded else 0

    def fetch_gradients(self, buffer: Tensor) -> tuple[Tensor, list[Copy]]:
        """Where in `buffer` (1-D uint8) offloaded gradients go, as long as the subgroup, and the copies to there."""
        gradient = buffer[: self.subgroup.numel * torch.float32.itemsize].view(torch.float32)
        return gradient, [(gradient[u.piece.run], u.gradient) for u in self.pieces]

    def apply_on_device(self, state: State, gradient: Tensor | None) -> None:
        """Update `state`, which is on the device, and the parameters there.

        gradient: what `fetch_gradients` fetched, or None if the gradients never left.
        """
        for update in self.pieces:
            update.apply(state, update.gradient if gradient is None else gradient[update.piece.run], update.parameter)

    def apply_on_host(self) -> None:
        """Update the host state from staged or offloaded gradients; the new parameters stay staged."""
        parameter = self.subgroup.parameter
        for update in self.pieces:
            run = update.piece.run
            gradient = update.gradient if self.offloaded else self.subgroup.gradient[run]
            update.apply(self.subgroup.state, gradient, None if parameter is None else parameter[run])

    def downloads(self, updates: Iterable[PieceUpdate]) -> list[Copy]:
        """The copies that stage the gradients of these pieces on the host."""
        return [(self.subgroup.gradient[u.piece.run], u.gradient) for u in updates]

    def uploads(self) -> list[Copy]:
        """The copies that bring the new parameters to the device."""
        parameter = self.subgroup.parameter
        staged = self.subgroup.state.master if parameter is None else parameter
        assert staged is not None, "accelerated parameters have a master"
        return [(u.parameter, staged[u.piece.run]) for u in self.pieces]


class Subject(NamedTuple):
    """One subgroup in a step.

    update: None without any gradient. departed: the copies by which gradients left during backward.
    missing: those that bring the others to the host, if they are to go there.
    """

    subgroup: Subgroup
    update: SubgroupUpdate | None
    departed: Sequence[Job]
    missing: Sequence[Copy]

    def found(self, state: Tier) -> Found:
        """What the step finds of it, but for what is under way. state: where that is."""
        update = self.update
        if update is None:
            return Found(state, None, 0, None, 0)
        parameter_bytes = update.numel * self.subgroup.arena.dtype.itemsize
        if update.offloaded:
            nbytes = sum(u.gradient.nbytes for u in update.pieces)
            return Found(state, Tier.HOST, update.numel, nbytes, parameter_bytes)
        late = sum(source.nbytes for _, source in self.missing) if self.missing else None
        return Found(state, Tier.DEVICE, update.numel, late, parameter_bytes)

    def slot_bytes(self, *, staying: bool) -> int:
        """Bytes of the slot that it needs. staying: its state has a place of its own there."""
        assert self.update is not None, "nothing passes through a slot without a gradient"
        return self.update.gradient_bytes if staying else self.update.slot_bytes
