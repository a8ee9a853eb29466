"""The update of one subgroup in one step: which pieces, with which gradients and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy
from dos.kernels.masters import correct_rest, follow
from dos.rules.base import Batch, Run
from dos.state.arena import State
from dos.state.record import flat_alias
from dos.state.subgroup import Piece, Subgroup
from dos.state.windows import Window
from dos.step.transit import Transit
from perfmodel.format import MASTER
from perfmodel.plan import Tier
from perfmodel.tasks import SubgroupState


class Input(NamedTuple):
    """The input of a step for one parameter.

    values: of its gradient, in the order of the record's `flat`, of any shape; empty once they were let go of.
    address: of the first one that is used.
    setting: which of the step's settings it takes.
    parameter_written: whether user code wrote to the parameter since our last step, so that its master follows first.
    fresh: whether its state is zeros yet: the master is the parameter, and the rest below that is none.
    """

    values: Tensor
    address: int
    setting: int
    parameter_written: bool
    fresh: bool = False


_NOTHING = torch.empty(0, device="cpu")
_NO_GRADIENT = Input(_NOTHING, 0, 0, False)

Item = tuple[Piece, Input]
"""A piece that is updated, with what the step is given for it."""


class SubgroupUpdate:
    """The update of one subgroup in one step.

    items: its pieces that have a gradient. numel: parameters updated. settings: those of the step that occur.
    offloaded: whether the gradients are on the host, although the parameters are not.
    place: where the host has state, gradients and parameters for it; None: in a window that the step will give it.
    weights: the parameters on the device, in the order of the subgroup, while an update there has them in a slot.
    from_disk: whether its state is not in memory before the step, so that masters follow parameters only then.
    """

    def __init__(
        self, subgroup: Subgroup, gradients: Sequence[Input | None], settings: Sequence[Any], *, offloaded: bool
    ) -> None:
        """gradients: by number of the record; None: it has none."""
        self.subgroup = subgroup
        self.settings = settings
        self.offloaded = offloaded
        self.place: Subgroup | Window | None = subgroup
        self.weights: Tensor | None = None
        self.from_disk = False
        given = zip(subgroup.pieces, [gradients[n] for n in subgroup.numbers], strict=True)
        self.items: list[Item] = [(piece, gradient) for piece, gradient in given if gradient is not None]
        self._whole = len(self.items) == len(subgroup.pieces)
        self.numel = subgroup.numel if self._whole else sum(piece.numel for piece, _ in self.items)
        if self.items and self.items[0][0].parameter_start:  # only the first piece begins within its parameter
            piece, gradient = self.items[0]
            start = piece.parameter_start * gradient.values.itemsize
            self.items[0] = piece, gradient._replace(address=gradient.address + start)

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces that are updated."""
        return self.subgroup.pieces if self._whole else [piece for piece, _ in self.items]

    @property
    def written_pieces(self) -> list[Piece]:
        """The pieces to whose parameters user code wrote since our last step."""
        return [piece for piece, gradient in self.items if gradient.parameter_written]

    def release(self) -> None:
        """Let go of gradients on the device: what is still to be done reads none there."""
        if not self.offloaded:
            self.items = [(piece, gradient._replace(values=_NOTHING)) for piece, gradient in self.items]

    @property
    def at_home(self) -> bool:
        """Whether that is where state has its home."""
        return self.place is self.subgroup

    @property
    def on_host(self) -> Subgroup | Window:
        """The place where the host updates it."""
        assert self.place is not None, "the step has given it a window"
        return self.place

    @property
    def written_bytes(self) -> int:
        """Of parameters that user code wrote to, where they come with the gradients and are not half of masters."""
        arena, itemsize = self.subgroup.arena, self.subgroup.arena.dtype.itemsize
        come = self.from_disk and not (arena.reads_parameters or arena.streams)
        return sum(piece.numel for piece in self.written_pieces) * itemsize if come else 0

    @property
    def stale(self) -> Sequence[Piece]:
        """The pieces whose newest parameters the host lacks, where it reads them to update."""
        arena = self.subgroup.arena
        if not arena.reads_parameters or arena.streams:
            return ()
        # A window, or a home that state is just coming to, has none of the parameters that were staged in earlier
        # steps.
        newest = set() if self.from_disk else self.subgroup.newest
        known = newest.difference(self.written_pieces) if newest else newest
        return [piece for piece in self.pieces if piece not in known] if known else self.pieces

    def downloads(self, items: Sequence[Item]) -> list[Copy]:
        """The copies that bring the gradients of these items, and stale parameters, to the host."""
        gradient, parameter = self.on_host.gradient, self.on_host.parameter
        copies = [(gradient[item[0].run], _values(item)) for item in items]
        copies += self.download_written() if self.from_disk else []
        return copies + ([] if parameter is None else [(parameter[p.run], _of_parameter(p)) for p in self.stale])

    def fetch_gradients(self, buffer: Tensor) -> list[Copy]:
        """The copies that bring offloaded gradients, and streamed weights, into `buffer` (1-D uint8 on the device)."""
        gradients = [(self._element_bytes * item[0].start, _values(item)) for item in self.items]
        weights = [(parameter, home) for home, parameter in self._weights_in(buffer)]
        return [(buffer[start : start + g.nbytes].view(g.dtype), g) for start, g in gradients] + weights

    @property
    def _element_bytes(self) -> int:
        """Bytes of each element of offloaded gradients in a slot; some gradients may be narrower."""
        return self.subgroup.arena.gradient.itemsize

    def flush_weights(self, buffer: Tensor) -> list[Copy]:
        """The copies that bring streamed weights home again, from where `fetch_gradients` has put them."""
        return self._weights_in(buffer)

    def _weights_in(self, buffer: Tensor) -> list[Copy]:
        """The homes of streamed weights that are updated, and their places behind the gradients in `buffer`."""
        subgroup = self.subgroup
        if not subgroup.arena.streams:
            return []
        home = subgroup.parameter
        assert home is not None, "they are there"
        # Behind the gradients, whose room is as wide as they are at most: an update reads both at once.
        room = buffer[subgroup.offloaded_gradient_bytes :][: home.nbytes].view(home.dtype)
        self.weights = room
        return [(home[piece.run], room[piece.run]) for piece, _ in self.items]

    def uploads(self) -> list[Copy]:
        """The copies that bring the new parameters to the device: none where they are at home on the host."""
        if self.subgroup.arena.streams:
            return []
        parameter = self.on_host.parameter
        staged = self.on_host.state.master if parameter is None else parameter
        assert staged is not None, "accelerated parameters have a master"
        return [(_of_parameter(p), staged[p.run]) for p, _ in self.items]

    def prepare(self, state: State, gradient_buffer: Tensor | None = None) -> Batch:
        """The update of `state`, and of the parameters in the memory where it is, whose masters have yet to `follow`.

        gradient_buffer: to which `fetch_gradients` brings the gradients, if that has to be.
        """
        batch = self._batch("with parameters", state, self.weights)
        if gradient_buffer is None:
            self._point(batch)
        else:
            self._point(batch, gradient_buffer.data_ptr(), self._element_bytes)
        return batch

    def finish(self, state: State) -> None:
        """Finish an update where the parameters are."""
        # The device has newer parameters now: the host would join its rests with upper halves of an earlier step.
        if self.subgroup.newest:
            self.subgroup.newest.difference_update(self.pieces)
        if state.master is not None and state.master.dtype != torch.float32:
            for piece, _ in self.items:
                self._parameter(piece).copy_(state.master[piece.run])

    def prepare_on_host(self) -> Callable[[], None]:
        """Prepare the update of the host state from staged or offloaded gradients, which are there.

        Returns what updates it; the new parameters stay staged.
        """
        state = self.on_host.state
        if self.from_disk:
            self.follow_on_host()
        if state.rest is not None:
            for piece in self._with_rests():
                correct_rest(state.rest[piece.run], self._staged(piece))
        batch = self._batch("at home", state, self.on_host.parameter)
        if self.offloaded:
            self._point(batch)
        else:
            staged = self.on_host.gradient
            self._point(batch, staged.data_ptr(), staged.itemsize, staged.dtype)
        arena = self.subgroup.arena
        apply = arena.rule.prepare([batch], self.settings)

        def update() -> None:
            apply()
            # Only at home does what is staged last: a window is another subgroup's later.
            if self.at_home and arena.reads_parameters and len(self.subgroup.newest) < len(self.subgroup.pieces):
                self.subgroup.newest.update(self.pieces)

        return update

    def follow(self, state: State) -> None:
        """Let masters in `state`, which is where the parameters are, follow those that user code wrote to."""
        if state.master is not None:
            self._follow(state.master, self._parameter)
        elif state.rest is not None:
            for piece in self._with_rests():
                correct_rest(state.rest[piece.run], self._parameter(piece))

    def _parameter(self, piece: Piece) -> Tensor:
        """The piece's parameters where they are updated, but for the host's staging."""
        return _of_parameter(piece) if self.weights is None else self.weights[piece.run]

    def _with_rests(self) -> list[Piece]:
        """The `written_pieces` that have a rest."""
        return [piece for piece, gradient in self.items if gradient.parameter_written and not gradient.fresh]

    def _follow(self, master: Tensor, parameter_of: Callable[[Piece], Tensor]) -> None:
        for piece, gradient in self.items:
            if gradient.fresh:
                master[piece.run].copy_(parameter_of(piece))
            elif gradient.parameter_written:
                follow(master[piece.run], parameter_of(piece))

    def download_written(self) -> list[Copy]:
        """The copies that bring parameters to which user code wrote to the host, before their masters there follow.

        But for those that updates read in any case, which come with the step's gradients, and those that are there.
        """
        if self.subgroup.arena.streams:
            return []
        master, staged = self.on_host.state.master, self.on_host.parameter
        place = master if staged is None else staged
        pieces = [] if master is None else self.written_pieces
        return [] if place is None else [(place[p.run], _of_parameter(p)) for p in pieces]

    def follow_on_host(self) -> None:
        """Let masters on the host follow what `download_written` has brought."""
        master, staged = self.on_host.state.master, self.on_host.parameter
        if master is not None and staged is not None:
            self._follow(master, lambda piece: staged[piece.run])

    def _point(self, batch: Batch, first: int = 0, itemsize: int = 0, dtype: torch.dtype | None = None) -> None:
        """Say what each run of the batch is given.

        first: the address from which on gradients lie as the pieces do, an element every `itemsize` bytes; 0: each lies
        where it was given. dtype: of all; None: their own.
        """
        items = self.items
        if not self._whole:
            given = dict(items)
            items = [(piece, given.get(piece, _NO_GRADIENT)) for piece in self.subgroup.pieces]
        if first:
            addresses = [first + itemsize * piece.start if gradient.address else 0 for piece, gradient in items]
        else:
            addresses = [gradient.address for _, gradient in items]
        batch.point(addresses, [gradient.values.dtype if dtype is None else dtype for _, gradient in items])
        batch.choose(self.settings, [gradient.setting for _, gradient in items] if len(self.settings) > 1 else None)

    def _batch(self, place: str, state: State, beside: Tensor | None) -> Batch:
        """The update of all pieces in one place. beside: their parameters, where these are in such memory, too."""
        memory = [*state.tensors()] if beside is None else [*state.tensors(), beside]
        # By address: each step may have another slot, and users may move the memory of a state that they have, such as
        # by `share_memory_`.
        addresses = [tensor.data_ptr() for tensor in memory]
        batch, known = self.subgroup.batches.get((place, len(memory)), (None, []))
        if batch is None:
            runs = [self._run(piece, state, at_home=place == "at home") for piece in self.subgroup.pieces]
            batch = self.subgroup.arena.rule.batch(runs)
        elif known != addresses:
            batch.follow(zip(known, addresses, [tensor.nbytes for tensor in memory], strict=True))
        self.subgroup.batches[place, len(memory)] = batch, addresses
        return batch

    def _run(self, piece: Piece, state: State, *, at_home: bool) -> Run:
        """The tensors that the update of a piece works on."""
        fields = state.cut(piece.start, piece.stop)
        master, shaped = fields.pop(MASTER, None), piece.record.shaped
        if at_home:
            if master is None:
                return Run(self._staged(piece), fields, None, shaped)
            staged = self.on_host.parameter
            return Run(master, fields, None if staged is None else staged[piece.run], shaped)
        parameter = self._parameter(piece)
        if master is None:
            return Run(parameter, fields, None, shaped)
        return Run(master, fields, parameter if master.dtype == torch.float32 else None, shaped)

    def _staged(self, piece: Piece) -> Tensor:
        """The piece's parameters on the host."""
        staged = self.on_host.parameter
        assert staged is not None, "what the host updates is staged"
        return staged[piece.run]


def _of_parameter(piece: Piece) -> Tensor:
    return piece.of_parameter(piece.record.flat)


def _values(item: Item) -> Tensor:
    """The piece's gradient."""
    piece, gradient = item
    flat = flat_alias(gradient.values)
    assert flat is not None, "the gradient has the order of the record's memory"
    return piece.of_parameter(flat.detach())


class Placed(NamedTuple):
    """An update where the parameters are. gradient_buffer: to which offloaded gradients have come, if they have."""

    update: SubgroupUpdate
    state: State
    gradient_buffer: Tensor | None = None


@torch.no_grad()
def prepare_updates(updates: Sequence[Placed]) -> Callable[[], None]:
    """Prepare the update of subgroups together where their parameters are, with their states there.

    Returns what updates them. Preparing takes the host milliseconds, and reads no memory that other work writes.
    """
    batches = [each.update.prepare(each.state, each.gradient_buffer) for each in updates]
    first = updates[0].update
    update_together = first.subgroup.arena.rule.prepare(batches, first.settings)

    def apply() -> None:
        # Here and not when it is prepared: state, and what user code wrote, may still be on the way then.
        for each in updates:
            each.update.follow(each.state)
        update_together()
        for each in updates:
            each.update.finish(each.state)

    return apply


class Subject(NamedTuple):
    """One subgroup in a step.

    update: None without any gradient. departed: the copies by which gradients left during backward.
    late: what is updated and has not left.
    """

    subgroup: Subgroup
    update: SubgroupUpdate | None
    departed: Sequence[Transit]
    late: Sequence[Item]

    def found(self, state: Tier) -> SubgroupState:
        """The subgroup as the step finds it, but for transfers under way. state: where that is."""
        update = self.update
        if update is None:
            return SubgroupState(state, None, 0, None, 0)
        items = update.items if update.offloaded else self.late
        gradient_bytes = sum(piece.numel * gradient.values.itemsize for piece, gradient in items)
        itemsize, stale = self.subgroup.arena.dtype.itemsize, update.stale
        return SubgroupState(
            state,
            Tier.HOST if update.offloaded else Tier.DEVICE,
            update.numel,
            gradient_bytes or None,
            update.numel * itemsize,
            stale_bytes=itemsize * (update.numel if len(stale) == len(update.items) else sum(p.numel for p in stale))
            + update.written_bytes,
            streams=self.subgroup.arena.streams,
        )

    def slot_bytes(self, *, staying: bool) -> int:
        """Bytes of the slot that it needs. staying: its state has a place of its own there."""
        assert self.update is not None, "nothing passes through a slot without a gradient"
        state = 0 if staying else self.subgroup.state.carved_bytes
        return state + (self.subgroup.passing_bytes if self.update.offloaded else 0)
