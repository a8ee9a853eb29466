"""What one step does to one subgroup: which pieces, with which gradients and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dos.adam import AdamArrays, AdamStep, off_ties
from dos.devices import Copy, Job
from dos.subgroup import Piece, State, Subgroup
from dos.update import adam_update
from perfmodel.format import MASTER
from perfmodel.plan import Tier
from perfmodel.schedule import Found


@dataclass(frozen=True, eq=False)
class PieceUpdate:
    """The update of one piece in this step.

    gradient: 1-D, as long as the piece: where backward left it or, if it was offloaded, on the host.
    follows: whether somebody else wrote to the parameter since our last step, so that its master
        has to follow first.
    """

    piece: Piece
    gradient: Tensor
    step: AdamStep
    follows: bool

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
        self.follow_on_device(self.subgroup.state)
        for update in self.pieces:
            update.apply(self.subgroup.state, update.gradient, update.parameter)

    def follow_on_device(self, state: State) -> None:
        """Let masters in `state`, which is where the parameters are, follow those that somebody wrote to."""
        for update in self.pieces:
            if update.follows and state.master is not None:
                follow(state.master[update.piece.run], update.parameter)

    def follow_on_host(self, fetch: Callable[[Tensor, Tensor], None]) -> None:
        """The same for masters on the host. fetch: copies from the parameters' device to the host; blocks."""
        master, staged = self.subgroup.state.master, self.subgroup.parameter
        for update in self.pieces:
            if not update.follows or master is None:
                continue
            mine = master[update.piece.run]
            if staged is None:
                fetch(mine, update.parameter)
            else:
                fetch(staged[update.piece.run], update.parameter)
                follow(mine, staged[update.piece.run])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that takes the state and, if they must come up again, the gradients."""
        return self.subgroup.state.carved_bytes + self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a slot that takes the gradients alone, if they must come up again."""
        return self.subgroup.offloaded_gradient_bytes if self.offloaded else 0

    def fetch_gradients(self, buffer: Tensor) -> tuple[list[Tensor], list[Copy]]:
        """Where in `buffer` (1-D uint8) the pieces' offloaded gradients go, and the copies to there."""
        places = [buffer[torch.float32.itemsize * u.piece.start :][: u.gradient.nbytes] for u in self.pieces]
        gradients = [place.view(u.gradient.dtype) for place, u in zip(places, self.pieces, strict=True)]
        return gradients, [(gradient, u.gradient) for gradient, u in zip(gradients, self.pieces, strict=True)]

    def apply_on_device(self, state: State, gradients: Sequence[Tensor] | None) -> None:
        """Update `state`, which is on the device, and the parameters there.

        gradients: what `fetch_gradients` fetched, or None if they never left.
        """
        self.follow_on_device(state)
        for update, gradient in zip(self.pieces, gradients or [u.gradient for u in self.pieces], strict=True):
            update.apply(state, gradient, update.parameter)

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


def follow(master: Tensor, parameter: Tensor) -> None:
    """Give `master` the values of a parameter that was written to; 1-D, of one length, on one device.

    Where the parameter still is the master rounded, the master knows it better.
    """
    if master.dtype == parameter.dtype:
        master.copy_(parameter)
        return
    for start in range(0, len(master), _CHUNK):
        mine, now = master[start : start + _CHUNK], parameter[start : start + _CHUNK]
        kept = mine.to(now.dtype).view(torch.int16) == now.view(torch.int16)
        mine.copy_(torch.where(kept, mine, now.to(mine.dtype)))
        if now.dtype == torch.bfloat16:
            # No update leaves a tie, and formats may rely on that: one that was loaded would go
            # on with other bits in one that keeps it as two halves.
            mine.copy_(off_ties(mine))


_CHUNK = 1 << 20  # elements; bounds the memory of what is compared


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
