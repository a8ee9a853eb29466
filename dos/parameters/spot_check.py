"""Finds writes that raise no version on a device whose work is queued: of one parameter in each step.

Updates on the host read a copy of the parameter, or a master. To know before the update whether the parameter still is
the copy, step() would wait for the end of backward on the device, beside which the host updates. So the answer is read
one step later, when such a write is lost, and one parameter in turn is compared, which costs the same in every model.
Code that writes in this way writes to all parameters, or again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Caller, Device
from dos.devices.base import Mark
from dos.guard import warn
from dos.sharding.fingerprint import fingerprint
from dos.state.record import ParameterRecord

_TRIES = 8
"""Parameters that are considered in a step; of most no copy is read where the device has memory for their state."""


class _Answer(NamedTuple):
    """Whether a parameter has other bits, on the host once the device has reached a mark."""

    other: Tensor
    mark: Mark
    shape: tuple[int, ...]


class SpotCheck:
    """Compares the bits of one parameter after an update with those before the next; waits for nothing.

    record: of the parameter whose turn it is.
    """

    def __init__(self) -> None:
        self.record: ParameterRecord | None = None
        self._bits: tuple[Tensor, Caller] | None = None
        self._turn = 0
        self._answer: _Answer | None = None
        self._said = False

    def wrote(self, device: Device) -> None:
        """Note the bits of the parameter, whose update is ahead of the work that the caller queues from now on."""
        # Not of weights at home: the device may still write them.
        if self.record is not None and self._bits is None and not self.record.arena.streams:
            self._bits = fingerprint(self.record.local), device.caller()

    def look(
        self, records: Sequence[ParameterRecord], device: Device, reads_copy: Callable[[ParameterRecord], bool]
    ) -> None:
        """Compare the bits before the next update, choose the parameter after it, and warn of an earlier difference.

        records: all of the optimizer's. reads_copy: whether the next update may read a copy of one's parameter.
        """
        self._read()
        record, bits = self.record, self._bits
        self.record = self._bits = None
        if self._said:
            return
        if record is not None and bits is not None:
            before, queue = bits
            # In another queue the memory of the sums might be used before they are there. Where the update reads the
            # parameter itself, nothing is lost.
            if queue == device.caller() and _copied(record, reads_copy) and not record.changed():
                other = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=record.local.is_cuda)
                other.copy_((fingerprint(record.local) != before).any(), non_blocking=True)
                self._answer = _Answer(other, device.mark(), tuple(record.parameter.shape))
        for _ in range(min(_TRIES, len(records))):
            self._turn = (self._turn + 1) % len(records)
            record = records[self._turn]
            if _copied(record, reads_copy):
                self.record = record
                break

    def forget(self, gone: Collection[ParameterRecord]) -> None:
        """Refer to none of these, whose memory is released."""
        if self.record in gone:
            self.record = self._bits = None

    def _read(self) -> None:
        answer = self._answer
        if answer is None or answer.mark.at() is None:
            return
        self._answer = None
        if answer.other.item():
            self._said = True
            warn(
                f"a parameter of shape {answer.shape} was written to in a way that raises no version counter, "
                "as through .data or NumPy, and its update, which reads a copy of it, has overwritten the new values; "
                "write under torch.no_grad(), or call torch.autograd.graph.increment_version(parameters) after such "
                "writes"
            )


def _copied(record: ParameterRecord, reads_copy: Callable[[ParameterRecord], bool]) -> bool:
    """Return whether the next update may read a copy of a parameter on the device."""
    return not record.arena.streams and reads_copy(record)
