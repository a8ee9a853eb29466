"""Notices gradients that user code edits in place after `step()`, while the updates of an attached model read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from dos.sharding.local import version
from dos.state.record import ParameterRecord
from dos.torch_internals.tensors import version_counter

EDITED = (
    "user code wrote in place to gradients after step() ({}, the first of shape {}), as by p.grad.zero_(), while their "
    "updates could still read them; step() waits for its updates from now on: call optimizer.synchronize() before, or "
    "optimizer.zero_grad() instead"
)


class LateEdits:
    """The gradients that updates in flight read, each with its version as the step was issued, by record in `read`."""

    def __init__(self) -> None:
        # Weak: user code releases gradients, whose memory the next backward needs.
        self.read: dict[ParameterRecord, tuple[weakref.ref[Tensor], int]] = {}

    def watch(self, records: Iterable[ParameterRecord]) -> None:
        """Watch the gradients of these records, and no others, until `ended`."""
        self.read = {}
        for record in records:  # without a call for each: the caller waits
            g = record.leaf.grad
            if g is None:
                continue
            try:
                now = version_counter(g) if type(g) is Tensor else version(g)
            except RuntimeError:  # an inference tensor counts no writes
                now = 0
            self.read[record] = weakref.ref(g), now

    def ended(self, records: Iterable[ParameterRecord]) -> list[ParameterRecord]:
        """Watch these no more, as user code is behind their updates; return those whose gradient was edited."""
        found = []
        for record in records:
            read = self.read.pop(record, None)
            gradient = None if read is None else read[0]()
            if read is not None and gradient is not None and version(gradient) != read[1]:
                found.append(record)
        return found
