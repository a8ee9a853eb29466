"""Gradients that leave during backward: which have gone, and whether what went is what the step will use."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dos.devices import Copy, Job
from dos.subgroup import ParameterRecord, Piece, Subgroup

logger = logging.getLogger(__name__)

Send = Callable[[Subgroup, Sequence[Copy]], Job]
"""Starts gradients of a subgroup on their way to the host."""


@dataclass
class _Seen:
    """What the hooks saw of one parameter's gradient in this iteration, and what to expect of the next.

    gradient, version, address: of the gradient when backward last wrote to it.
    times: how often backward wrote to it; expected: how often in the last iteration (accumulation, micro-batches).
    untouched: whether the step found it as backward had left it. If not, sending it early was in vain.
    """

    gradient: weakref.ref[Tensor] | None = None
    version: int = -1
    address: int = -1
    times: int = 0
    expected: int = 1
    untouched: bool = True

    def still(self, gradient: Tensor | None, writes: int | None) -> bool:
        """Whether `gradient` is what backward left, but for `writes` writes that changed no value; None: it is not."""
        return (
            writes is not None
            and self.gradient is not None
            and gradient is not None
            and self.gradient() is gradient
            and self.version + writes == gradient._version
            and self.address == gradient.data_ptr()
        )


@dataclass
class _Departure:
    """The gradients of one subgroup on their way: pieces gathered until all that are expected are there, and jobs."""

    gathered: dict[Piece, tuple[Copy, int]] = field(default_factory=dict)
    sent: dict[Piece, tuple[Job, int]] = field(default_factory=dict)
    staging: Tensor | None = None


class Departures:
    """Watches gradients become final, one parameter after the other, and sends off those of whole subgroups.

    A gradient that changes after it was sent (clipping or unscaling in place, another backward) is noticed by its
    identity and version, and the step sends it again: always right, fast where nothing was touched. What was always
    changed is not sent early next time.
    """

    def __init__(self) -> None:
        self._seen: dict[ParameterRecord, _Seen] = {}
        self._departures: dict[Subgroup, _Departure] = {}
        self._fired = 0
        self._fired_last = 0
        self._explained = False

    @property
    def past_half(self) -> bool:
        """Whether backward has made half as many gradients as last time, so that it is past its peak of memory."""
        return 2 * self._fired > self._fired_last > 0

    def gradient_ready(self, record: ParameterRecord, wanted: Callable[[Subgroup], bool], send: Send) -> None:
        """Backward has written to the parameter's gradient. wanted: whether a subgroup's gradients go to the host."""
        gradient = record.parameter.grad
        if gradient is None:
            return
        self._fired += 1
        seen = self._seen.setdefault(record, _Seen())
        again = seen.gradient is not None and seen.gradient() is gradient
        seen.times = seen.times + 1 if again else 1
        seen.gradient, seen.version, seen.address = weakref.ref(gradient), gradient._version, gradient.data_ptr()
        staging = record.arena.gradient
        if seen.times != seen.expected or not seen.untouched or staging is None or staging.dtype != gradient.dtype:
            return
        if record.changed() or record.stand_in:
            return  # the step will read the parameter anew first
        flat = record.flat_gradient(gradient)
        for subgroup, piece in record.places:
            if wanted(subgroup):
                departure = self._departures.setdefault(subgroup, _Departure(staging=staging))
                copy = subgroup.gradient[piece.run], piece.of_parameter(flat)
                departure.gathered[piece] = copy, seen.version
                if all(self._gone_or_idle(other, departure) for other in subgroup.pieces):
                    job = send(subgroup, [copy for copy, _ in departure.gathered.values()])
                    departure.sent |= {p: (job, version) for p, (_, version) in departure.gathered.items()}
                    departure.gathered = {}

    def arriving(self, subgroup: Subgroup, pieces: Iterable[Piece], writes: int | None) -> tuple[set[Piece], list[Job]]:
        """Those of the pieces whose gradients went early and still hold, and the jobs that bring them.

        writes: how often every gradient was written since without changing a value (GradScaler's check for inf);
            None: values have changed.
        """
        departure = self._departures.get(subgroup)
        if departure is None or departure.staging is not subgroup.arena.gradient:  # which may have become wider since
            return set(), []
        holding = set()
        jobs = {}
        for piece in pieces:
            job, version = departure.sent.get(piece, (None, -1))
            seen = self._seen[piece.record] if piece.record in self._seen else _Seen()
            if job is not None and seen.version == version and seen.still(piece.record.parameter.grad, writes):
                holding.add(piece)
                jobs[id(job)] = job
        return holding, list(jobs.values())

    def finish(self, writes: int | None) -> None:
        """The step has used the gradients, or was skipped: learn from how they were found, and begin anew."""
        fired = [(record, seen) for record, seen in self._seen.items() if seen.times]
        for record, seen in self._seen.items():
            if seen.times:
                seen.untouched = seen.still(record.parameter.grad, writes)
            seen.expected, seen.times, seen.gradient = seen.times, 0, None
        self._departures = {}
        self._fired, self._fired_last = 0, self._fired
        if fired and not any(seen.untouched for _, seen in fired) and not self._explained:
            self._explained = True
            logger.info(
                "gradients change between backward and step(), so they cannot leave during backward; clip with "
                "max_grad_norm= or optimizer.clip_grad_norm_(), and let GradScaler.step() unscale, to overlap again"
            )

    def _gone_or_idle(self, piece: Piece, departure: _Departure) -> bool:
        """Whether the subgroup need not wait for this piece: it is gathered, gone, or was idle last time."""
        if piece in departure.gathered:
            return True
        seen = self._seen.get(piece.record)
        if seen is None or not seen.expected or not seen.untouched or not piece.record.parameter.requires_grad:
            return True
        return piece in departure.sent and departure.sent[piece][1] == seen.version
