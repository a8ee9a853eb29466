"""What one step does to one subgroup: which pieces, with which gradients and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy, Job
from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.masters import follow, settle
from dos.kernels.update import AdamBatch, update_together
from dos.state.arena import State
from dos.state.record import ParameterRecord, flat_alias
from dos.state.subgroup import Piece, Subgroup
from perfmodel.format import MASTER, REST
from perfmodel.plan import Tier
from perfmodel.schedule import SubgroupState


class Given:
    """What a step is given, by number of the record.

    gradients: in the order of the record's `flat`, of any shape; None: it has none.
    addresses: of their first elements; 0: there is none.
    settings: those that occur; which: the one of each record.
    follows: the records to whose parameters user code wrote since our last step, so that their
        masters have to follow first.
    """

    def __init__(self, records: int) -> None:
        self.gradients: list[Tensor | None] = [None] * records
        self.addresses = [0] * records
        self.settings: list[AdamStep] = []
        self.which = [0] * records
        self.follows: set[ParameterRecord] = set()

    def add(self, record: ParameterRecord, gradient: Tensor) -> None:
        """The record has this gradient."""
        self.gradients[record.number] = gradient
        self.addresses[record.number] = gradient.data_ptr()


class SubgroupUpdate:
    """What a step does to one subgroup.

    pieces: those that have a gradient. gradients: of the parameters to which they belong, as a whole.
    numel: parameters updated. settings: those of the step that occur.
    offloaded: whether the gradients are on the host, although the parameters are not.
    """

    def __init__(self, subgroup: Subgroup, given: Given, *, offloaded: bool) -> None:
        self.subgroup = subgroup
        self.offloaded = offloaded
        numbers = subgroup.numbers
        self._addresses = [given.addresses[n] for n in numbers]
        gradients = [given.gradients[n] for n in numbers]
        self.gradients = [gradient for gradient in gradients if gradient is not None]
        # Skipped pieces have any type.
        self._types = [torch.float32 if gradient is None else gradient.dtype for gradient in gradients]
        whole = len(self.gradients) == len(numbers)
        self.pieces = (
            subgroup.pieces if whole else tuple(p for p in subgroup.pieces if given.addresses[p.record.number])
        )
        self.numel = subgroup.numel if whole else sum(piece.numel for piece in self.pieces)
        first = subgroup.pieces[0].parameter_start
        if first and self._addresses[0]:
            self._addresses[0] += first * self._types[0].itemsize
        self.settings = given.settings
        self._which = [given.which[n] for n in numbers] if len(given.settings) > 1 else None
        self._follows = [p for p in self.pieces if p.record in given.follows] if given.follows else []

    def release(self) -> None:
        """Let go of gradients on the device: what is still to be done reads none there."""
        if not self.offloaded:
            self.gradients = []

    @property
    def stale(self) -> Sequence[Piece]:
        """The pieces whose newest parameters the host lacks, where it needs them to update split masters."""
        newest = self.subgroup.newest
        if not self.subgroup.arena.format.splits or not (self._follows or len(newest) < len(self.subgroup.pieces)):
            return ()
        known = newest.difference(self._follows)
        return [piece for piece in self.pieces if piece not in known] if known else self.pieces

    @property
    def gradient_bytes(self) -> int:
        """Of the pieces that are updated."""
        return sum(p.numel * g.itemsize for p, g in zip(self.pieces, self.gradients, strict=True))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that takes the state and, if they must come up again, the gradients."""
        return self.subgroup.state.carved_bytes + self.slot_bytes_of_gradients

    @property
    def slot_bytes_of_gradients(self) -> int:
        """Bytes of a slot that takes the gradients alone, if they must come up again."""
        return self.subgroup.offloaded_gradient_bytes if self.offloaded else 0

    def downloads(self, pieces: Set[Piece]) -> list[Copy]:
        """The copies that stage the gradients of these pieces on the host."""
        staged = self.subgroup.gradient
        return [
            (staged[p.run], g) for p, g in zip(self.pieces, self._pieces_of_gradients(), strict=True) if p in pieces
        ]

    def download_parameters(self) -> list[Copy]:
        """The copies that bring stale parameters to the host."""
        staged = self.subgroup.parameter
        return [] if staged is None else [(staged[p.run], p.of_parameter(p.record.flat)) for p in self.stale]

    def fetch_gradients(self, buffer: Tensor) -> list[Copy]:
        """The copies that bring offloaded gradients up into `buffer` (1-D uint8), from where they are used then."""
        copies = []
        numbers = [number for number, address in enumerate(self._addresses) if address]
        for number, piece, gradient in zip(numbers, self.pieces, self._pieces_of_gradients(), strict=True):
            place = buffer[torch.float32.itemsize * piece.start :][: gradient.nbytes].view(gradient.dtype)
            self._addresses[number] = place.data_ptr()
            copies.append((place, gradient))
        return copies

    def uploads(self) -> list[Copy]:
        """The copies that bring the new parameters to the device."""
        parameter = self.subgroup.parameter
        staged = self.subgroup.state.master if parameter is None else parameter
        assert staged is not None, "accelerated parameters have a master"
        return [(p.of_parameter(p.record.flat), staged[p.run]) for p in self.pieces]

    def prepare(self, state: State, *, lasting: bool = True) -> AdamBatch:
        """The update of `state`, and of the parameters in the memory where it is, ready for `apply`.

        lasting: whether later steps find state in the same place.
        """
        self.follow(state)
        batch = self._batch("with parameters", state, lasting=lasting)
        batch.point(self._addresses, self._types)
        batch.choose(self.settings, self._which)
        return batch

    def finish(self, state: State) -> None:
        """What is to be done after an update where the parameters are."""
        if self.subgroup.newest:
            self.subgroup.newest.difference_update(self.pieces)
        if state.master is not None and state.master.dtype != torch.float32:
            for piece in self.pieces:
                piece.of_parameter(piece.record.flat).copy_(state.master[piece.run])

    def apply_on_host(self) -> None:
        """Update the host state from staged or offloaded gradients; the new parameters stay staged."""
        state = self.subgroup.state
        if state.rest is not None:
            for piece in self._follows:
                settle(state.rest[piece.run], self._staged(piece))
        batch = self._batch("at home", state)
        if self.offloaded:
            batch.point(self._addresses, self._types)
        else:
            staged = self.subgroup.gradient
            first, size = staged.data_ptr(), staged.itemsize
            places = [
                first + size * piece.start if address else 0
                for piece, address in zip(self.subgroup.pieces, self._addresses, strict=True)
            ]
            batch.point(places, [staged.dtype] * len(places))
        batch.update(self.settings, self._which)
        if state.rest is not None and len(self.subgroup.newest) < len(self.subgroup.pieces):
            self.subgroup.newest.update(self.pieces)

    def follow(self, state: State) -> None:
        """Let masters in `state`, which is where the parameters are, follow those that user code wrote to."""
        for piece in self._follows:
            parameter = piece.of_parameter(piece.record.flat)
            if state.master is not None:
                follow(state.master[piece.run], parameter)
            elif state.rest is not None:
                settle(state.rest[piece.run], parameter)

    def follow_on_host(self, fetch: Callable[[Tensor, Tensor], None]) -> None:
        """The same for masters on the host, but for split ones, whose other halves come with the step's gradients.

        fetch: copies from the parameters' device to the host; blocks.
        """
        master, staged = self.subgroup.state.master, self.subgroup.parameter
        if master is None:
            return
        for piece in self._follows:
            mine, theirs = master[piece.run], piece.of_parameter(piece.record.flat)
            if staged is None:
                fetch(mine, theirs)
            else:
                fetch(staged[piece.run], theirs)
                follow(mine, staged[piece.run])

    def _pieces_of_gradients(self) -> list[Tensor]:
        pieces = []
        for piece, gradient in zip(self.pieces, self.gradients, strict=True):
            flat = flat_alias(gradient)
            assert flat is not None, "the gradient has the order of the record's memory"
            pieces.append(piece.of_parameter(flat.detach()))
        return pieces

    def _batch(self, place: str, state: State, *, lasting: bool = True) -> AdamBatch:
        """The update of all pieces in one place, which is remembered where that lasts."""
        # By address: users may move the memory of a state that they have, such as by `share_memory_`.
        addresses = [tensor.data_ptr() for tensor in state.tensors()]
        known, batch = self.subgroup.batches.get(place, (None, None))
        if batch is None or known != addresses:
            batch = AdamBatch([self._arrays(p, state, at_home=place == "at home") for p in self.subgroup.pieces])
            if lasting:
                self.subgroup.batches[place] = addresses, batch
        return batch

    def _arrays(self, piece: Piece, state: State, *, at_home: bool) -> AdamArrays:
        """What the update of a piece works on; its gradient is said later."""
        fields = dict(state.slice(piece.start, piece.stop).fields)
        master, staged = fields.pop(MASTER, None), self.subgroup.parameter
        if at_home and REST in fields:
            return AdamArrays(self._staged(piece), self._staged(piece), **fields)
        if at_home:
            assert master is not None, "accelerated parameters have a master"
            return AdamArrays(master, master, **fields, out=None if staged is None else staged[piece.run])
        parameter = piece.of_parameter(piece.record.flat)
        if master is None:
            return AdamArrays(parameter, parameter, **fields)
        return AdamArrays(parameter, master, **fields, out=parameter if master.dtype == torch.float32 else None)

    def _staged(self, piece: Piece) -> Tensor:
        """The piece's parameters on the host."""
        staged = self.subgroup.parameter
        assert staged is not None, "what the host updates is staged"
        return staged[piece.run]


def apply(updates: Sequence[tuple[SubgroupUpdate, State]], *, lasting: bool = True) -> None:
    """Update subgroups together where their parameters are, with their states there.

    lasting: whether later steps find the states in the same places.
    """
    batches = [update.prepare(state, lasting=lasting) for update, state in updates]
    update_together(batches, updates[0][0].settings)
    for update, state in updates:
        update.finish(state)


class Subject(NamedTuple):
    """One subgroup in a step.

    update: None without any gradient. departed: the copies by which gradients left during backward.
    late: the pieces whose gradients have not.
    """

    subgroup: Subgroup
    update: SubgroupUpdate | None
    departed: Sequence[Job]
    late: Set[Piece]

    def found(self, state: Tier) -> SubgroupState:
        """What the step finds of it, but for what is under way. state: where that is."""
        update = self.update
        if update is None:
            return SubgroupState(state, None, 0, None, 0)
        itemsize = self.subgroup.arena.dtype.itemsize
        parameter_bytes, stale = update.numel * itemsize, update.stale
        stale_bytes = parameter_bytes if stale is update.pieces else itemsize * sum(p.numel for p in stale)
        if update.offloaded:
            gradient_bytes = update.gradient_bytes
            return SubgroupState(
                state, Tier.HOST, update.numel, gradient_bytes, parameter_bytes, stale_bytes=stale_bytes
            )
        late: int | None = update.gradient_bytes
        if len(self.late) < len(update.pieces):
            sizes = zip(update.pieces, update.gradients, strict=True)
            late = sum(p.numel * g.itemsize for p, g in sizes if p in self.late) or None
        return SubgroupState(state, Tier.DEVICE, update.numel, late, parameter_bytes, stale_bytes=stale_bytes)

    def slot_bytes(self, *, staying: bool) -> int:
        """Bytes of the slot that it needs. staying: its state has a place of its own there."""
        assert self.update is not None, "nothing passes through a slot without a gradient"
        return self.update.slot_bytes_of_gradients if staying else self.update.slot_bytes
