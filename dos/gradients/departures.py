"""Gradients that leave during backward: which have gone, and whether what went is what the step will use."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dos.devices import Caller, Copy, Device
from dos.gradients.identity import Token
from dos.sharding.local import local
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from dos.step.transit import Transit
from dos.step.work import SubgroupUpdate, Subject

logger = logging.getLogger(__name__)


@dataclass
class _Seen:
    """The record of one parameter's gradient: what hooks saw in this iteration, and what to expect of the next.

    gradient: the last one. written: that as backward left it, where it is to leave: another one each time.
    times: how often backward wrote to it; expected: how often in the last iteration (accumulation, micro-batches).
    untouched: whether the step found it as backward had left it. If not, sending it early was in vain.
    """

    gradient: weakref.ref[Tensor] | None = None
    written: Token | None = None
    times: int = 0
    expected: int = 1
    untouched: bool = True

    def is_untouched(self, gradient: Tensor | None, writes: int | None) -> bool:
        """Whether `gradient` is what was written, but for `writes` writes that changed no value; None: it is not."""
        written = self.written
        if written is None or gradient is None:
            return False
        # DDP has put another tensor with the parameter: neither object nor version can tell, only the bits.
        if written.gradient is None:
            return not written.rewritten
        known = written.bits is not None or (writes is not None and written.writes(gradient) == writes)
        return known and written.holds(gradient)


@dataclass
class Departure:
    """The gradients of one subgroup on their way.

    awaited: pieces whose gradients are expected in this iteration and not gathered yet; all go once there are none.
    callers: in which of the caller's queues those that are gathered were written, or copied into another layout.
    """

    subgroup: Subgroup
    staging: Tensor
    awaited: set[Piece]
    gathered: dict[Piece, tuple[Copy, Token]] = field(default_factory=dict)
    callers: set[Caller] = field(default_factory=set)
    sent: dict[Piece, tuple[Transit, Token]] = field(default_factory=dict)

    @property
    def copies(self) -> list[Copy]:
        """The copies that bring the gathered gradients to the host."""
        return [copy for copy, _ in self.gathered.values()]

    def mark_sent(self, transit: Transit) -> None:
        """The gathered gradients are on their way."""
        self.sent |= {piece: (transit, written) for piece, (_, written) in self.gathered.items()}
        self.gathered, self.callers = {}, set()


class Departures:
    """Watches gradients become final, one parameter after the other, and says when those of whole subgroups may leave.

    A gradient that changes after it was sent (clipping or unscaling in place, another backward) is noticed by its
    identity and version, and the step sends it again: always right, fast where nothing was touched. What was always
    changed is not sent early next time.

    writes: how often every gradient was written between backward and the step that is being prepared without changing a
        value (GradScaler's check for inf); None: values have changed.
    """

    def __init__(self) -> None:
        self.writes: int | None = 0
        self._seen: dict[ParameterRecord, _Seen] = {}
        self._departures: dict[Subgroup, Departure] = {}
        self._fired = 0
        self._fired_last = 0
        self._explained = False

    @property
    def past_half(self) -> bool:
        """Whether backward has made half as many gradients as last time, so that it is past its peak of memory."""
        return 2 * self._fired > self._fired_last > 0

    def gather(
        self,
        record: ParameterRecord,
        places: Sequence[tuple[Subgroup, Piece]],
        wanted: Collection[Subgroup],
        device: Device,
        gradient: Tensor | None = None,
    ) -> list[Departure]:
        """Backward has written to the parameter's gradient, in the caller's present queue. Returns what leaves now.

        gradient: what the parameter's will be made of, where it is not that yet.
        places: the parameter's pieces, each with its subgroup. wanted: the subgroups whose gradients go to the host.
        """
        here = gradient is None
        seen, gradient = self.count(record, gradient), record.parameter.grad if gradient is None else gradient
        places = [place for place in places if place[0] in wanted]
        if gradient is None or not places:
            return []
        # Before the copy is issued: the step compares with the gradient as the copy reads it.
        written = seen.written = Token(gradient, here=here)
        staging = record.arena.gradient
        # Another micro-batch will add to it, or user code always changes it: it would leave in vain.
        if seen.times != seen.expected or not seen.untouched or staging.dtype != gradient.dtype:
            return []
        if record.changed() or record.stand_in:
            return []  # the step will read the parameter anew first
        caller = device.caller()
        with torch.no_grad():
            flat = record.flat_gradient(local(gradient))
        complete = []
        for subgroup, piece in places:
            departure = self._departures.get(subgroup)
            if departure is None:
                awaited = {other for other in subgroup.pieces if self._expects(other)}
                departure = self._departures[subgroup] = Departure(subgroup, staging, awaited)
            departure.awaited.discard(piece)
            departure.gathered[piece] = (subgroup.gradient[piece.run], piece.of_parameter(flat)), written
            # Autograd runs each node on the stream of its forward: gradients of one subgroup may be written on several.
            departure.callers.add(caller)
            if not departure.awaited:
                complete.append(departure)
        return complete

    def count(self, record: ParameterRecord, gradient: Tensor | None = None) -> _Seen:
        """Backward has written to the parameter's gradient. gradient: another tensor that has it."""
        gradient = record.parameter.grad if gradient is None else gradient
        seen = self._seen.get(record)
        if seen is None:
            seen = self._seen[record] = _Seen()
        seen.written = None
        if gradient is None:
            return seen
        self._fired += 1
        if seen.gradient is not None and seen.gradient() is gradient:
            seen.times += 1
        else:
            # Weak: user code frees a gradient by setting it to None, and its memory has to go then.
            seen.times, seen.gradient = 1, weakref.ref(gradient)
        return seen

    def marked(self) -> list[tuple[Token, Tensor]]:
        """Tensors that may have been written to since without being counted; see `look_at_bits`."""
        seen = ((seen.written, record.gradient) for record, seen in self._seen.items() if seen.written is not None)
        return [(written, gradient) for written, gradient in seen if gradient is not None]

    def subject(self, subgroup: Subgroup, update: SubgroupUpdate | None) -> Subject:
        """The subgroup in a step, with the transits that bring gradients which still hold."""
        if update is None or update.offloaded:
            return Subject(subgroup, update, (), ())
        holding, departed = self.arriving(subgroup, update.pieces)
        late = [item for item in update.items if item[0] not in holding] if holding else update.items
        return Subject(subgroup, update, departed, late)

    def arriving(self, subgroup: Subgroup, pieces: Iterable[Piece]) -> tuple[set[Piece], list[Transit]]:
        """The pieces whose gradients went early and still hold, and the transfers that bring them."""
        departure = self._departures.get(subgroup)
        if departure is None or departure.staging is not subgroup.arena.gradient:  # which may have become wider since
            return set(), []
        holding = set()
        transfers = {}
        for piece in pieces:
            if piece not in departure.sent:
                continue
            transit, written = departure.sent[piece]
            seen = self._seen[piece.record]
            # What went may be of an earlier backward than the last.
            if seen.written is written and seen.is_untouched(piece.record.parameter.grad, self.writes):
                holding.add(piece)
                transfers[transit.number] = transit
        return holding, list(transfers.values())

    def finish(self) -> None:
        """The step has used the gradients, or was skipped: learn from how they were found, and begin anew."""
        fired = [(record, seen) for record, seen in self._seen.items() if seen.written is not None]
        for record, seen in fired:
            seen.untouched = seen.is_untouched(record.parameter.grad, self.writes)
        for seen in self._seen.values():
            seen.expected = seen.times
        self._fired_last = self._fired
        self.forget()
        if fired and not any(seen.untouched for _, seen in fired) and not self._explained:
            self._explained = True
            logger.warning(
                "gradients change between backward and step(), so they cannot leave during backward, which is slower; "
                "clip with max_grad_norm= or optimizer.clip_grad_norm_() (or call dos.fold_clipping() once where the "
                "training loop is not yours), and let GradScaler.step() unscale"
            )

    def forget(self) -> None:
        """The gradients that are there are of no use: none of them is held, and none counts."""
        for seen in self._seen.values():
            seen.times, seen.gradient, seen.written = 0, None, None
        self._departures = {}
        self._fired = 0

    def forget_records(self, records: Iterable[ParameterRecord]) -> None:
        """Their parameters were replaced."""
        for record in records:
            self._seen.pop(record, None)

    def _expects(self, piece: Piece) -> bool:
        """Whether the subgroup waits for this piece before it goes: not if it was idle or changed last time."""
        seen = self._seen.get(piece.record)
        return seen is not None and seen.expected > 0 and seen.untouched and bool(piece.record.parameter.requires_grad)
