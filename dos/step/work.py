"""The update of one subgroup in one step: its pieces, their gradients and settings."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos.devices import Copy, Job
from dos.kernels.masters import correct_rest, follow
from dos.rules.base import Batch, Run
from dos.state.arena import State
from dos.state.record import flat_alias
from dos.state.subgroup import Piece, Subgroup
from dos.state.windows import Window
from dos.step.transit import Transit
from dos.torch_internals.modes import without_gradients
from perfmodel.format import MASTER
from perfmodel.plan import Tier
from perfmodel.tasks import SubgroupState


class Input(NamedTuple):
    """The input of a step for one parameter.

    values: its gradient, in the order of the record's `flat`, of any shape; empty once it was released.
    address: of the first value that is used.
    setting: the index of its settings among those of the step.
    parameter_written: whether user code wrote to the parameter since our last step, so that its master follows first.
    fresh: whether its state is still zero: the master is the parameter, and the rest is zero.
    master_written: whether user code wrote to its whole master, which then is used as it is.
    form: the dtype, shape, strides and sign of the tensor that has `values`; None: not looked at.
    """

    values: Tensor
    address: int
    setting: int
    parameter_written: bool
    fresh: bool = False
    master_written: bool = False
    form: tuple[Any, ...] | None = None


new_input: Callable[[tuple[Any, ...]], Input] = partial(tuple.__new__, Input)
"""Makes an input of all its fields without a call of Python."""


class Columns(NamedTuple):
    """Inputs, field by field: the first step's work waits until all are made."""

    values: Sequence[Tensor]
    addresses: Sequence[int]
    settings: Sequence[int]
    parameter_written: Sequence[bool]
    fresh: Sequence[bool]
    master_written: Sequence[bool]
    forms: Sequence[tuple[Any, ...] | None]


new_columns: Callable[[Iterable[Any]], Columns] = partial(tuple.__new__, Columns)
"""Makes columns without a call of Python."""

_NOTHING = torch.empty(0, device="cpu")

Item = tuple[Piece, Input]
"""A piece that is updated, with its input."""


class SubgroupUpdate:
    """The update of one subgroup in one step.

    pieces: its pieces that have a gradient, with the `columns` of their inputs. whole: whether these are all pieces.
    numel: parameters updated. settings: the different settings of the step.
    offloaded: whether the gradients are on the host, although the parameters are not.
    place: has its state, gradients and parameters on the host; None: a window that the step will give it.
    weights: the parameters on the device, in the order of the subgroup, while an update there has them in a slot.
    from_disk: whether its state is not in memory before the step, so that masters follow parameters only then.
    any_written: whether any may be `parameter_written`.
    arriving: its offloaded gradients that may still be on their way, where it is issued in backward.
    """

    def __init__(
        self,
        subgroup: Subgroup,
        pieces: Sequence[Piece],
        columns: Columns,
        settings: Sequence[Any],
        *,
        offloaded: bool = False,
        written: bool = True,
    ) -> None:
        """pieces: at least one. columns: of these. written: `any_written`."""
        self.subgroup = subgroup
        self.settings = settings
        self.offloaded = offloaded
        self.place: Subgroup | Window | None = subgroup
        self._unseen: frozenset[Piece] = frozenset()
        self.weights: Tensor | None = None
        self.from_disk = False
        self.arriving: Sequence[Job] = ()
        self.any_written = written
        self.pieces = pieces
        self.take(columns)
        self.whole = len(pieces) == len(subgroup.pieces)
        self.numel = subgroup.numel if self.whole else sum([piece.numel for piece in pieces])

    @classmethod
    def of(
        cls, subgroup: Subgroup, gradients: Sequence[Input | None], settings: Sequence[Any], **others: bool
    ) -> SubgroupUpdate | None:
        """Return the update of a subgroup; None if it has no gradient. others: as above.

        gradients: by number of the record; None: no gradient.
        """
        given = subgroup.inputs_of(gradients)
        if None not in given:
            return cls(subgroup, subgroup.pieces, new_columns(zip(*given, strict=True)), settings, **others)
        found = [(piece, each) for piece, each in zip(subgroup.pieces, given, strict=True) if each is not None]
        if not found:
            return None
        pieces, inputs = zip(*found, strict=True)
        return cls(subgroup, pieces, new_columns(zip(*inputs, strict=True)), settings, **others)

    def take(self, columns: Columns) -> None:
        """Take the inputs of its pieces."""
        start = self.pieces[0].parameter_start  # only the first piece begins within its parameter
        if start:
            first, *others = columns.addresses
            values, _, *rest = columns
            columns = new_columns((values, (first + start * values[0].itemsize, *others), *rest))
        self.columns = columns

    @property
    def items(self) -> list[Item]:
        """The pieces with their inputs. Made anew, because who keeps them keeps the gradients' memory."""
        return [*zip(self.pieces, map(new_input, zip(*self.columns, strict=True)), strict=True)]

    def without(self, pieces: Collection[Piece]) -> SubgroupUpdate:
        """Leave these pieces out, which were updated before; return this update, of which nothing may be left."""
        kept = [piece not in pieces for piece in self.pieces] if pieces else [True]
        if not all(kept):
            self.pieces = [*itertools.compress(self.pieces, kept)]
            self.columns = new_columns(tuple(itertools.compress(column, kept)) for column in self.columns)
            self.whole = False
            self.numel = sum([piece.numel for piece in self.pieces])
        return self

    @property
    def masters_written(self) -> Sequence[Piece]:
        """The pieces to whose whole masters user code wrote since our last step."""
        return [*itertools.compress(self.pieces, self.columns.master_written)]

    @property
    def written_pieces(self) -> list[Piece]:
        """The pieces to whose parameters user code wrote since our last step."""
        if not self.any_written:
            return []
        return [*itertools.compress(self.pieces, self.columns.parameter_written)]

    @property
    def copied_pieces(self) -> list[Piece]:
        """The pieces of whose parameters an update on the host reads a copy, or a master, of an earlier step."""
        arena = self.subgroup.arena
        if arena.streams or (arena.reads_parameters and self.from_disk):
            return []
        _, _, _, written, fresh, _, _ = self.columns
        if not (True in written or True in fresh) and (
            not arena.reads_parameters or len(self.subgroup.newest) == len(self.subgroup.pieces)
        ):
            return [*self.pieces]  # as in most steps
        newer = map(operator.or_, written, fresh)
        older = [piece for piece, new in zip(self.pieces, newer, strict=True) if not new]
        return [piece for piece in older if piece in self.subgroup.newest] if arena.reads_parameters else older

    def release(self) -> None:
        """Release gradients on the device. Later work reads none there."""
        if not self.offloaded:
            self.columns = new_columns(((_NOTHING,) * len(self.pieces), *self.columns[1:]))

    @property
    def at_home(self) -> bool:
        """Whether `place` is the home of the state."""
        return self.place is self.subgroup

    @property
    def on_host(self) -> Subgroup | Window:
        """The place in which the host updates it."""
        assert self.place is not None, "the step has given it a window"
        return self.place

    @property
    def stale(self) -> Sequence[Piece]:
        """The pieces whose newest parameters the host lacks, where it reads them to update."""
        arena = self.subgroup.arena
        if not arena.reads_parameters or arena.streams:
            return ()
        # A window, or a home to which state is being read, has no parameters that were staged in earlier steps.
        newest = set() if self.from_disk else self.subgroup.newest
        if len(newest) == len(self.subgroup.pieces) and not (self.any_written and self.written_pieces):
            return ()  # as in most steps
        known = newest.difference(self.written_pieces) if newest else newest
        return [piece for piece in self.pieces if piece not in known] if known else self.pieces

    def downloads(self, items: Sequence[Item]) -> list[Copy]:
        """Return the copies of the gradients of these items, and of stale parameters, to the host."""
        stale = self.stale
        if self.at_home:
            if len(items) == len(self.subgroup.pieces) and not (stale or self.from_disk):
                lent = self.subgroup.lend([given.values for _, given in items])
                if lent is not None:
                    return lent
            staged = self.subgroup.staged_gradient
            copies = [(staged(item[0]), _values(item)) for item in items]
        else:
            gradient = self.on_host.gradient
            copies = [(gradient[item[0].run], _values(item)) for item in items]
        copies += self.download_written() if self.from_disk else []
        parameter = self.on_host.parameter if stale else None
        return copies + ([] if parameter is None else [(parameter[p.run], _of_parameter(p)) for p in stale])

    def fetch_gradients(self, buffer: Tensor) -> list[Copy]:
        """Return the copies of offloaded gradients and streamed weights to `buffer` (1-D uint8 on the device)."""
        gradients = [(self._element_bytes * item[0].start, _values(item)) for item in self.items]
        weights = [(parameter, home) for home, parameter in self.flush_weights(buffer)]
        return [(buffer[start : start + g.nbytes].view(g.dtype), g) for start, g in gradients] + weights

    @property
    def _element_bytes(self) -> int:
        """Bytes of each element of offloaded gradients in a slot; some gradients may be narrower."""
        return self.subgroup.arena.incoming.tensor.itemsize

    def flush_weights(self, buffer: Tensor) -> list[Copy]:
        """Return the copies of streamed weights that are updated from `buffer` back home."""
        subgroup = self.subgroup
        if not subgroup.arena.streams:
            return []
        home = subgroup.parameter
        assert home is not None, "they are there"
        # Behind the space of the gradients in their widest dtype: an update reads both at once.
        room = buffer[subgroup.offloaded_gradient_bytes :][: home.nbytes].view(home.dtype)
        self.weights = room
        return [(home[piece.run], room[piece.run]) for piece in self.pieces]

    def uploads(self) -> list[Copy]:
        """Return the copies of the new parameters to the device; none where their home is the host."""
        if self.subgroup.arena.streams:
            return []
        kept = self.subgroup.uploads
        if not (self.whole and self.at_home):
            return [(_of_parameter(p), self._staged(p)) for p in self.pieces]
        if not kept:
            kept += [(_of_parameter(p), self._staged(p)) for p in self.subgroup.pieces]
        return kept

    def prepare(self, state: State, gradient_buffer: Tensor | None = None) -> Batch:
        """Return the update of `state` and of the parameters on the same device, whose masters must `follow` first.

        gradient_buffer: the buffer of `fetch_gradients`, if the gradients are offloaded.
        """
        batch = self._batch("with parameters", state, self.weights)
        self._take_written(batch)
        if gradient_buffer is None:
            self._point(batch)
        else:
            self._point(batch, gradient_buffer.data_ptr(), self._element_bytes)
        return batch

    def finish(self) -> None:
        """Finish an update on the device of the parameters."""
        # The parameters that are staged on the host are older now: an update there would join rests with them.
        if self.subgroup.newest:
            self.subgroup.newest.difference_update(self.pieces)

    def prepare_on_host(self) -> HostUpdate:
        """Prepare the update of the host state from staged or offloaded gradients, which must have arrived.

        The new parameters stay staged.
        """
        state = self.on_host.state
        if self.from_disk:
            self.follow_on_host()
        if state.rest is not None:
            for piece in self._with_rests():
                correct_rest(state.rest[piece.run], self._staged(piece))
        batch = self._batch("at home", state, self.on_host.parameter)
        if self.subgroup.arena.streams:
            self._take_written(batch)
        if self.offloaded:
            self._point(batch)
        else:
            staged = self.on_host.gradient
            self._point(batch, staged.data_ptr(), staged.itemsize, staged.dtype)
        arena = self.subgroup.arena
        return HostUpdate(self, arena.rule.prepare([batch], self.settings))

    def finish_on_host(self) -> None:
        """Finish an update of `prepare_on_host`."""
        # Only at home do staged parameters last: another subgroup gets the window later.
        reads = self.at_home and self.subgroup.arena.reads_parameters
        if reads and len(self.subgroup.newest) < len(self.subgroup.pieces):
            self.subgroup.newest.update(self.pieces)

    def follow(self, state: State) -> None:
        """Let masters in `state`, on the device of the parameters, follow parameters that user code wrote to."""
        if state.master is not None:
            device = state.master.device
            # Weights that stream are at home, where no slot has them, while their state may be on the device.
            self._follow(state.master, lambda piece: self._parameter(piece).to(device))
        elif state.rest is not None:
            for piece in self._with_rests():
                correct_rest(state.rest[piece.run], self._parameter(piece).to(state.rest.device))

    def _parameter(self, piece: Piece) -> Tensor:
        """Return the piece's parameters on their device, in a slot where they stream."""
        return _of_parameter(piece) if self.weights is None else self.weights[piece.run]

    def _with_rests(self) -> list[Piece]:
        """Return the `written_pieces` that have a rest."""
        if not (self.any_written or self._unseen):
            return []
        return [piece for piece, given in self.items if self._is_written(piece, given) and not given.fresh]

    def _is_written(self, piece: Piece, given: Input) -> bool:
        return given.parameter_written or piece in self._unseen

    def _follow(self, master: Tensor, parameter_of: Callable[[Piece], Tensor]) -> None:
        for piece, gradient in self.items:
            if gradient.fresh:
                master[piece.run].copy_(parameter_of(piece))
            elif self._is_written(piece, gradient):
                follow(master[piece.run], parameter_of(piece))

    def download_unseen(self, pieces: Sequence[Piece]) -> list[Copy]:
        """Return the copies to the host of parameters to which user code wrote without raising a version."""
        return [(self._staged(p), _of_parameter(p)) for p in pieces]

    def take_over(self, pieces: Sequence[Piece]) -> None:
        """Let masters on the host follow the parameters of `download_unseen`, before the host updates."""
        # Not in `items`, which the caller's thread replaces at any time, in `release`.
        self._unseen = frozenset(pieces)
        master = self.on_host.state.master
        if master is not None and not self.from_disk:
            for piece in pieces:
                follow(master[piece.run], self._staged(piece))

    def download_written(self) -> list[Copy]:
        """Return the copies to the host of parameters that user code wrote to, whose masters there must follow.

        Without parameters that updates read in any case, which are copied with gradients, and parameters on the host.
        """
        if self.subgroup.arena.streams or not self.any_written:
            return []
        pieces = [] if self.on_host.state.master is None else self.written_pieces
        return [(self._staged(p), _of_parameter(p)) for p in pieces]

    def follow_on_host(self) -> None:
        """Let masters on the host follow the parameters of `download_written`."""
        master = self.on_host.state.master
        if master is not None:
            self._follow(master, self._staged)

    def _take_written(self, batch: Batch) -> None:
        """Let whole masters take over what user code has written to parameters that the update itself writes."""
        if self.subgroup.arena.whole_masters:
            kept = {*self.masters_written}
            batch.take_written([piece not in kept for piece in self.subgroup.pieces] if kept else None)

    def _point(self, batch: Batch, first: int = 0, itemsize: int = 0, dtype: torch.dtype | None = None) -> None:
        """Set the gradient and the settings of each run of the batch.

        first: the address of gradients in the order of the pieces, each element of `itemsize` bytes; 0: each gradient
        is at its own address. dtype: of all; None: their own.
        """
        values, addresses, settings, *_ = self.columns
        dtypes = [each.dtype for each in values] if dtype is None else [dtype] * len(values)
        if first:
            runs = zip(addresses, self.pieces, strict=True)
            addresses = [first + itemsize * piece.start if address else 0 for address, piece in runs]
        if not self.whole:
            given = {piece: place for place, piece in enumerate(self.pieces)}
            places = [given.get(piece) for piece in self.subgroup.pieces]
            addresses = [0 if place is None else addresses[place] for place in places]
            dtypes = [_NOTHING.dtype if place is None else dtypes[place] for place in places]
            settings = [0 if place is None else settings[place] for place in places]
        batch.point(addresses, dtypes)
        batch.choose(self.settings, settings if len(self.settings) > 1 else None)

    def _batch(self, place: str, state: State, parameters: Tensor | None) -> Batch:
        """Return the update of all pieces in one place. parameters: theirs, if a slot has these, too."""
        memory = [*state.tensors()] if parameters is None else [*state.tensors(), parameters]
        # Compared by address: each step may have another slot, and user code may move the memory of state, such as by
        # `share_memory_`.
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
        """Return the tensors of the update of a piece."""
        fields = state.cut(piece.start, piece.stop)
        master = fields.pop(MASTER, None)
        parameter = self._staged(piece) if at_home else self._parameter(piece)
        return Run(parameter, fields, None) if master is None else Run(master, fields, parameter)

    def _staged(self, piece: Piece) -> Tensor:
        """Return the piece's parameters on the host."""
        staged = self.on_host.parameter
        assert staged is not None, "what the host updates is staged"
        return staged[piece.run]


def _of_parameter(piece: Piece) -> Tensor:
    return piece.of_parameter(piece.record.flat)


def _values(item: Item) -> Tensor:
    """Return the piece's gradient."""
    piece, given = item
    gradient = given.values
    if gradient.is_contiguous() and not (gradient.is_neg() or gradient.requires_grad):
        flat = gradient.view(-1)
    else:
        alias = flat_alias(gradient)
        assert alias is not None, "the gradient has the order of the record's memory"
        flat = alias.detach()
    return flat if piece.numel == piece.record.numel else piece.of_parameter(flat)


class HostUpdate(NamedTuple):
    """An update on the host, prepared. apply: of the rule."""

    update: SubgroupUpdate
    apply: Callable[[], None]

    def __call__(self) -> None:
        """Update."""
        self.apply()
        self.update.finish_on_host()

    def in_order(self, order: Any, place: int) -> tuple[float, float] | None:
        """Update in a place of a `dos.kernels.update.Order`, where the rule's updates are native."""
        found: tuple[float, float] | None = self.apply.in_order(order, place)  # type: ignore[attr-defined]
        if found is not None:
            self.update.finish_on_host()
        return found

    @property
    def native(self) -> bool:
        """Whether it can run in an order, without Python."""
        return hasattr(self.apply, "in_order")


class Placed(NamedTuple):
    """An update on the device of the parameters. gradient_buffer: has the offloaded gradients, if there are any."""

    update: SubgroupUpdate
    state: State
    gradient_buffer: Tensor | None = None


@without_gradients
def prepare_updates(updates: Sequence[Placed]) -> Callable[[], None]:
    """Prepare the update of subgroups together on the device of their parameters, with their states there.

    Returns the function that updates. Preparing takes the host milliseconds, and reads no memory that other work
    writes.
    """
    batches = [each.update.prepare(each.state, each.gradient_buffer) for each in updates]
    first = updates[0].update
    update_together = first.subgroup.arena.rule.prepare(batches, first.settings)

    def apply() -> None:
        # Not while preparing: state, and parameters that user code wrote to, may still be in transit then.
        for each in updates:
            each.update.follow(each.state)
        update_together()
        for each in updates:
            each.update.finish()

    return apply


class Subject(NamedTuple):
    """One subgroup in a step.

    update: None without any gradient. departed: the transits of gradients that backward has sent.
    late: the items whose gradients are still to be sent; None: all.
    """

    subgroup: Subgroup
    update: SubgroupUpdate | None
    departed: Sequence[Transit]
    late: Sequence[Item] | None

    @property
    def sends(self) -> bool:
        """Whether any gradient is still to be sent."""
        return self.late is None or bool(self.late)

    def before_step(self, state: Tier) -> SubgroupState:
        """Return the subgroup as the step finds it, without transits. state: the tier of its state."""
        update = self.update
        if update is None:
            return SubgroupState(state, None, 0, None, 0)
        if update.offloaded or self.late is None:
            pairs = zip(update.pieces, update.columns.values, strict=True)
            gradient_bytes = sum([piece.numel * values.itemsize for piece, values in pairs])
        else:
            each = self.late
            gradient_bytes = sum([piece.numel * given.values.itemsize for piece, given in each]) if each else 0
        itemsize, stale = self.subgroup.arena.dtype.itemsize, update.stale
        part = stale and len(stale) < len(update.pieces)
        copied = sum([p.numel for p in stale]) if part else update.numel if stale else 0
        if update.from_disk and not (self.subgroup.arena.reads_parameters or self.subgroup.arena.streams):
            copied += sum([piece.numel for piece in update.written_pieces])  # whole masters follow them on the host
        return SubgroupState(
            state,
            Tier.HOST if update.offloaded else Tier.DEVICE,
            update.numel,
            gradient_bytes or None,
            update.numel * itemsize,
            stale_bytes=itemsize * copied,
            streams=self.subgroup.arena.streams,
        )

    def slot_bytes(self, *, staying: bool) -> int:
        """Return the bytes of the slot that it needs. staying: whether its state has room of its own on the device."""
        assert self.update is not None, "nothing passes through a slot without a gradient"
        state = 0 if staying else self.subgroup.state.carved_bytes
        return state + (self.subgroup.passing_bytes if self.update.offloaded else 0)
