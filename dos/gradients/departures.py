"""Gradients that are sent to the host during backward, and whether the step can use them as they were sent."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Caller, Copy, Device
from dos.gradients.identity import Token, Tokens
from dos.sharding.local import local
from dos.state.record import ParameterRecord, are_unchanged
from dos.state.subgroup import Piece, Subgroup
from dos.step.transit import Transit
from dos.step.work import Item, SubgroupUpdate, Subject
from dos.torch_internals.modes import dispatch_modes

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Seen:
    """One parameter's gradient as hooks saw it in this iteration, and expectations for the next.

    gradient: the last one. written: its token from when backward wrote it, where it is to be sent: a new one each time.
    times: how often backward wrote to it; expected: how often in the last iteration (accumulation, micro-batches).
    untouched: whether the step found it as backward had written it. If not, sending it early was in vain.
    """

    gradient: weakref.ref[Tensor] | None = None
    written: Token | None = None
    times: int = 0
    expected: int = 1
    untouched: bool = True

    def is_untouched(self, gradient: Tensor | None, writes: int | None) -> bool:
        """Return whether `gradient` has the values that backward wrote.

        writes: the number of later writes that changed no value; None: values have changed.
        """
        written = self.written
        if written is None or gradient is None:
            return False
        # DDP has set another tensor as `grad`: neither object nor version can tell whether it is equal, only the bits.
        if written.gradient is None:
            return not written.rewritten
        return written.unchanged(gradient, writes)


@dataclass
class Departure:
    """The gradients of one subgroup that backward sends to the host.

    awaited: pieces whose gradients are expected in this iteration and have not come yet; once it is empty, the gathered
        ones are sent, and those of `waiting`, which are gathered then.
    callers: the caller's queues in which these gradients were written, or copied into another layout. queue: the number
        of the last one that was added.
    gathered: of each piece, its parameter's whole gradient, whose elements are in the order of the record's memory.
    whole: the transit of all pieces, and their tokens in the order of the pieces; None: they were not sent at once.
    """

    subgroup: Subgroup
    staging: Tensor
    awaited: set[Piece]
    waiting: dict[Piece, _Seen] = field(default_factory=dict)
    queue: int = -1
    gathered: dict[Piece, tuple[Tensor, Token]] = field(default_factory=dict)
    callers: set[Caller] = field(default_factory=set)
    sent: dict[Piece, tuple[Transit, Token]] = field(default_factory=dict)
    whole: tuple[Transit, Tokens] | None = None

    @property
    def copies(self) -> Sequence[Copy]:
        """The copies that send the gathered gradients to the host."""
        subgroup, gathered = self.subgroup, self.gathered
        if len(gathered) == len(subgroup.pieces):
            lent = subgroup.lend([gathered[piece][0] for piece in subgroup.pieces])
            if lent is not None:
                return lent
        staged = subgroup.staged_gradient
        return [(staged(piece), piece.of_parameter(source.view(-1))) for piece, (source, _) in gathered.items()]

    def mark_sent(self, transit: Transit) -> None:
        """Note that the gathered gradients are in transit."""
        gathered, pieces = self.gathered, self.subgroup.pieces
        if len(gathered) == len(pieces):
            self.whole = transit, Tokens([gathered[piece][1] for piece in pieces], pieces[0].parameter_start)
        else:
            self.whole = None
        self.sent |= {piece: (transit, written) for piece, (_, written) in self.gathered.items()}
        self.gathered, self.callers, self.queue = {}, set(), -1

    def written_in(self, device: Device) -> None:
        """Note the queue in which backward has written a gradient."""
        # Autograd runs each node on the stream of its forward: gradients of one subgroup may be written on several.
        self.queue = device.caller_number()
        self.callers.add(device.caller())


class SoFar(NamedTuple):
    """The departures so far, the number of gradients that backward has written, and the untouched departures."""

    departures: Mapping[Subgroup, Departure]
    fired: int
    whole: list[Departure]


class Departures:
    """Watches gradients become final, one parameter after the other, and returns whole subgroups of them to send.

    The step notices by identity and version that a gradient has changed after it was sent (clipping or unscaling in
    place, another backward), and sends it again. A gradient that user code changes is not sent early next time.

    """

    def __init__(self) -> None:
        self._writes: int | None = 0
        self._checked: dict[_Seen, bool] = {}
        """Whether gradients are untouched, as far as this step has looked."""
        self._seen: dict[ParameterRecord, _Seen] = {}
        self._with_bits: dict[ParameterRecord, _Seen] = {}
        """The records of which a token of this iteration has had bits."""
        self._departures: dict[Subgroup, Departure] = {}
        self._fired = 0
        self._fired_last = 0
        self._again = False
        """Whether a gradient has another token than when it was sent, or may have been edited."""
        self._whole: list[Departure] = []
        """Departures that this step has found to be untouched as a whole."""
        self._explained = False
        self._modes = dispatch_modes()
        self._changes = self._modes.changes

    @property
    def past_half(self) -> bool:
        """Whether backward has made over half as many gradients as last time, so that it is past its peak of memory."""
        return 2 * self._fired > self._fired_last > 0

    def gather(
        self,
        record: ParameterRecord,
        places: Sequence[tuple[Subgroup, Piece]],
        wanted: Collection[Subgroup],
        device: Device,
        gradient: Tensor | None = None,
    ) -> list[Departure]:
        """Gather a gradient that backward has written in the caller's present queue; return the complete departures.

        gradient: the tensor of which the parameter's gradient will be made, where `p.grad` does not have it yet.
        places: the parameter's pieces, each with its subgroup. wanted: the subgroups whose gradients are sent.
        """
        here = gradient is None
        seen, gradient = self.count(record, gradient), record.parameter.grad if gradient is None else gradient
        if len(places) != 1:
            places = [place for place in places if place[0] in wanted]
        elif places[0][0] not in wanted:  # most lie in one subgroup
            return []
        if gradient is None or not places:
            return []
        found = self._look(record, seen, gradient, here=here)
        if found is None:
            return []
        complete = []
        for subgroup, piece in places:
            departure = self._departures.get(subgroup)
            if departure is None:
                staging = record.arena.incoming.tensor
                departure = self._departures[subgroup] = Departure(subgroup, staging, self._awaited(subgroup))
            departure.awaited.discard(piece)
            departure.gathered[piece] = found
            if departure.queue != device.caller_number():
                departure.written_in(device)
            if not departure.awaited and (not departure.waiting or self._gather_waiting(departure)):
                complete.append(departure)
        return complete

    def wait(self, record: ParameterRecord, places: Sequence[tuple[Subgroup, Piece]], device: Device) -> bool:
        """Count a gradient with which nothing is to be done until others of its subgroup have come; else return False.

        Most of those that are sent are of this kind. It is looked at when the last one of its subgroup has come.
        places: the parameter's pieces, at least one, each with its subgroup.
        """
        if len(places) > 1:
            return False
        subgroup, piece = places[0]
        departure, seen, gradient = self._departures.get(subgroup), self._seen.get(record), record.parameter.grad
        if departure is None or seen is None or not seen.untouched or record.wrapped or record.layout is not None:
            return False
        # Others are copied into another layout, or have their bits summed, in the queue in which they were written.
        if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.is_inference():
            return False
        if not gradient.is_contiguous():
            return False
        again = seen.gradient is not None and seen.gradient() is gradient
        missing = seen.expected - (seen.times + 1 if again else 1)
        if not missing:
            if piece not in departure.awaited or len(departure.awaited) == 1:
                return False
            departure.waiting[piece] = seen
            departure.awaited.discard(piece)
            if departure.queue != device.caller_number():
                departure.written_in(device)
        elif missing < 0:
            return False
        # As `count`, in one function: this runs for most gradients that are sent.
        if self._changes != self._modes.changes:
            self._distrust()
        if seen.written is not None:
            self._again |= seen.written.sent
            seen.written = None
        self._fired += 1
        if again:
            seen.times += 1
        else:
            seen.times, seen.gradient = 1, weakref.ref(gradient)
        return True

    def _gather_waiting(self, departure: Departure) -> bool:
        """Gather the gradients that wait in a subgroup for the last one; return whether it is complete."""
        staging, gathered = departure.staging, departure.gathered
        unchanged = are_unchanged([piece.record for piece in departure.waiting])
        each = [(piece, seen, piece.record.parameter.grad) for piece, seen in departure.waiting.items()]
        # User code may have dropped or replaced it, or written to the parameter, while it waited.
        here = [(p, seen, g) for p, seen, g in each if g is not None and seen.gradient and seen.gradient() is g]
        if len(here) < len(each):
            departure.awaited.update(departure.waiting.keys() - {piece for piece, _, _ in here})
        tokens = Token.of_plain([gradient for _, _, gradient in here], [piece.record.form for piece, _, _ in here])
        for (piece, seen, gradient), written in zip(here, tokens, strict=True):
            record, seen.written = piece.record, written
            # As `_look` does for others, in one function: this runs for most gradients that are sent.
            usable = seen.times == seen.expected and seen.untouched and not (record.stand_in or record.written_late)
            usable = usable and staging.dtype == gradient.dtype and (unchanged or not record.changed())
            # A copy into another layout, and a sum of bits, would have to wait for the queue in which it was written.
            if not usable or written.negated or gradient.requires_grad or not gradient.is_contiguous():
                departure.awaited.add(piece)
            else:
                gathered[piece] = gradient, written
        departure.waiting = {}
        return not departure.awaited

    def _look(
        self, record: ParameterRecord, seen: _Seen, gradient: Tensor, *, here: bool = True
    ) -> tuple[Tensor, Token] | None:
        """Return a gradient in the order of the record's memory, with its token; None if it would be sent in vain.

        here: as for `Token`.
        """
        # Before the copy is issued, because the step compares with the gradient as the copy reads it.
        written = seen.written = Token(gradient, here=here, like=record.form)
        if written.bits is not None:
            self._with_bits[record] = seen
        # Another micro-batch will add to it, or user code always changes it.
        if seen.times != seen.expected or not seen.untouched:
            return None
        if record.arena.incoming.tensor.dtype != gradient.dtype:
            return None
        if record.changed() or record.stand_in or record.written_late:
            return None  # the step first reads the parameter anew
        plain = type(gradient) is Tensor
        if (
            plain
            and record.layout is None
            and gradient.is_contiguous()
            and not (gradient.requires_grad or written.negated)
        ):
            return gradient.view(-1), written  # as below, with one call that lets go of Python's lock in place of four
        with torch.no_grad():
            return record.flat_gradient(gradient if plain else local(gradient)), written

    def count(self, record: ParameterRecord, gradient: Tensor | None = None) -> _Seen:
        """Count a gradient that backward has written. gradient: the tensor that has it, if not `p.grad`."""
        gradient = record.parameter.grad if gradient is None else gradient
        if self._changes != self._modes.changes:
            self._distrust()
        seen = self._seen.get(record)
        if seen is None:
            seen = self._seen[record] = _Seen()
        if seen.written is not None:
            self._again |= seen.written.sent
            seen.written = None
        if gradient is None:
            return seen
        self._fired += 1
        if seen.gradient is not None and seen.gradient() is gradient:
            seen.times += 1
        else:
            # Weak: user code releases a gradient by setting it to None, and its memory must be released then.
            seen.times, seen.gradient = 1, weakref.ref(gradient)
        return seen

    def _distrust(self) -> None:
        """Note that user code may have edited all gradients so far, under a mode that hides it from versions."""
        self._changes = self._modes.changes
        for record in self._seen:
            self.edited(record)

    def edited(self, record: ParameterRecord) -> None:
        """Note that user code may have edited the gradient, which no version need have counted."""
        seen = self._seen.get(record)
        if seen is not None and seen.written is not None:
            seen.written.rewritten = self._again = True

    def marked(self) -> list[tuple[Token, Tensor]]:
        """Return tokens and tensors of which no version counts writes; see `look_at_bits`."""
        marked = []
        for record, seen in self._with_bits.items():
            written, gradient = seen.written, record.gradient
            if written is not None and written.bits is not None and gradient is not None:
                marked.append((written, gradient))
        return marked

    def begin_step(self, writes: int | None) -> None:
        """Begin a step, successful or not.

        writes: the number of writes to every gradient since backward that changed no value (GradScaler's check for
            inf); None: values have changed.
        """
        self._writes, self._checked, self._whole = writes, {}, []
        if self._modes.now() or self._changes != self._modes.changes:
            self._distrust()

    def so_far(self) -> SoFar | None:
        """Return what `subject` has found since `begin_step`; None if it has looked at single gradients."""
        return None if self._checked else SoFar(self._departures, self._fired, self._whole)

    def goes_on(self, before: SoFar) -> bool:
        """Return whether `subject` would find the same as before this step, as long as no gradient has changed."""
        same = self._departures is before.departures and self._fired == before.fired and self._writes == 0
        if same and not self._again:
            self._whole = before.whole
            return True
        return False

    def _is_untouched(self, record: ParameterRecord, seen: _Seen) -> bool:
        """Return whether this step finds the gradient as backward has written it. Looks once."""
        found = self._checked.get(seen)
        if found is None:
            found = self._checked[seen] = seen.is_untouched(record.parameter.grad, self._writes)
        return found

    def subject(self, subgroup: Subgroup, update: SubgroupUpdate | None) -> Subject:
        """Return a subgroup in a step, with the transits of gradients that are still valid."""
        if update is None or update.offloaded:
            return Subject(subgroup, update, (), ())
        departure = self._departures.get(subgroup)
        # A wider staging may have replaced the one to which they were sent.
        if departure is None or not departure.sent or departure.staging is not subgroup.arena.incoming.tensor:
            return Subject(subgroup, update, (), None)
        if departure.whole is not None and self._is_whole(departure.whole[1], update):
            self._whole.append(departure)
            return Subject(subgroup, update, (departure.whole[0],), ())
        sent = self._sent(departure, update.items)
        holding = {piece: transit for piece, transit, known in sent if self._is_untouched(piece.record, known)}
        transits = {transit.number: transit for transit in holding.values()}
        late = [item for item in update.items if item[0] not in holding] if holding else update.items
        return Subject(subgroup, update, list(transits.values()), late)

    def _is_whole(self, tokens: Tokens, update: SubgroupUpdate) -> bool:
        """Return whether all gradients of an update are known to be as they were sent, asking all at once."""
        if self._again or self._writes is None or not update.whole:
            return False
        values, addresses, *_, forms = update.columns
        return tokens.unchanged(values, addresses, forms, self._writes)

    def _sent(self, departure: Departure, items: Sequence[Item]) -> list[tuple[Piece, Transit, _Seen]]:
        """Return the pieces whose last gradients were sent early, which may have changed since."""
        sent, seen = departure.sent, self._seen
        # The gradient that was sent may be of an earlier backward than the last one.
        return [
            (piece, sent[piece][0], seen[piece.record])
            for piece, _ in items
            if piece in sent and seen[piece.record].written is sent[piece][1]
        ]

    def finish(self) -> None:
        """End the iteration, whose step has used the gradients or was skipped; learn which gradients were changed."""
        fired = [(record, seen) for record, seen in self._seen.items() if seen.written is not None]
        waited = any(departure.waiting for departure in self._departures.values())
        checked = self._checked
        checked |= {self._seen[piece.record]: True for each in self._whole for piece in each.subgroup.pieces}
        all_changed = True
        for record, seen in fired:
            untouched = checked.get(seen)
            seen.untouched = self._is_untouched(record, seen) if untouched is None else untouched
            all_changed &= not seen.untouched
        for seen in self._seen.values():
            seen.expected = seen.times
        self._fired_last = self._fired
        self.forget()
        if fired and all_changed and not (waited or self._explained):
            self._explained = True
            logger.warning(
                "gradients change between backward and step(), so they cannot leave during backward, which is slower; "
                "clip with max_grad_norm= or optimizer.clip_grad_norm_() (or call dos.fold_clipping() once where the "
                "training loop is not yours), and let GradScaler.step() unscale"
            )

    def forget(self) -> None:
        """Forget all gradients seen so far, and refer to none of them."""
        for seen in self._seen.values():
            seen.times, seen.gradient, seen.written = 0, None, None
        self._departures, self._checked, self._with_bits, self._whole = {}, {}, {}, []
        self._fired, self._again = 0, False

    def forget_records(self, records: Iterable[ParameterRecord]) -> None:
        """Forget records whose parameters were replaced."""
        for record in records:
            self._seen.pop(record, None)
            self._with_bits.pop(record, None)

    def _awaited(self, subgroup: Subgroup) -> set[Piece]:
        """Return the pieces for which the subgroup waits: not those whose gradient was missing or changed last time."""
        known = self._seen
        return {
            piece
            for piece in subgroup.pieces
            if (seen := known.get(piece.record)) is not None
            and (seen.expected > 0 and seen.untouched and piece.record.parameter.requires_grad)
        }
