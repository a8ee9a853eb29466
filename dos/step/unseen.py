"""Finds writes that raise no version to parameters of which the host updates a copy, on a device that is queued for.

The host updates staged parameters, or masters, while the device may still run backward. So the device compares the bits
of the parameters with those after their last update, behind the copy of their gradients, and whoever updates reads the
answer once that copy has ended, for which it waits in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from dos.devices import Device, Job
from dos.devices.base import Behind
from dos.state.bit_sums import BitSums, Summing
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from dos.step.work import SubgroupUpdate
from perfmodel import Op

_FIRST, _LAST = range(2)
"""The answers: behind the gradients, and behind all that user code has queued before `step()`."""

LOST = (
    "user code wrote to parameters ({}, the first of shape {}) in a way that raises no version counter, as through "
    ".data or NumPy, after their gradients had left, and their updates have overwritten the new values; write under "
    "torch.no_grad(), or call torch.autograd.graph.increment_version(parameters) after such writes, before step()"
)


class _Confirmation(NamedTuple):
    """A comparison of pieces whose answer no update waits for."""

    sums: BitSums
    pieces: Collection[Piece]
    job: Job


class UnseenWrites:
    """The writes to parameters that raise no version, subgroup by subgroup.

    Works on the caller's thread, on backward's, and on the CPU lane's, one subgroup at a time. Nothing of the last step
    may be in flight when a comparison begins.
    """

    # One subgroup, step by step: its new parameters are copied to the device, and the same job remembers their bits
    # (`remember`). Gradients are copied to the host, and the same job compares the bits (`compare`). The CPU lane has
    # waited for that job, asks what was written, and fetches that (`take_over`). What is sent before `step()` is
    # compared once more behind the caller's work (`confirm`), in case user code writes in between: that is known too
    # late for the update, which may run already, so it is said (`lost`), and such a parameter is not sent early again.
    # Offloaded gradients are compared at the first of them, all subgroups at once (`compare_early`).
    # An update on the device itself takes over what was written, also to whole masters, and forgets the sums.
    def __init__(self, device: Device) -> None:
        self._device = device
        self._sums: dict[Subgroup, BitSums] = {}
        self._confirmations: list[_Confirmation] = []
        self._taken: set[Piece] = set()
        """The pieces taken over in the last step."""
        self.early: Sequence[Job] = ()
        """The job of `compare_early`, until gradients of another step come."""

    def remember(self, update: SubgroupUpdate) -> Behind:
        """Return what queues sums of the parameters that were updated, behind the copies to them."""
        sums = self._sums.get(update.subgroup)
        if sums is not None and sums.current:
            return Summing(sums, update.pieces, None)
        return partial(self._remember_anew, update.subgroup, update.pieces, sums)

    def _remember_anew(self, subgroup: Subgroup, pieces: Collection[Piece], before: BitSums | None) -> None:
        # Within the job: what the stream of another queue releases, its work may still use.
        sums = self._sums[subgroup] = BitSums(subgroup.pieces, before)
        sums.remember(pieces)

    def compare(self, subgroup: Subgroup, pieces: Iterable[Piece]) -> Behind | None:
        """Return what queues a comparison of these pieces; None if the host has no copy of any that is in use."""
        sums = self._sums.get(subgroup)
        known = [] if sums is None else sums.comparable(pieces)
        if sums is None or not known:
            return None
        sums.compared.update(known)
        return Summing(sums, known, _FIRST)

    def compare_early(self, subgroups: Iterable[Subgroup]) -> None:
        """Compare all pieces behind the work of the caller so far, if that was not done since `begin`.

        For gradients that come to the host by ways of their own. Where user code once wrote too late for this, the
        subgroup is compared in the step.
        """
        if self.early:
            return
        compares = list[Behind]()
        for subgroup in subgroups:
            if subgroup in self._sums:
                self._sums[subgroup].compared.clear()
                if not any(piece.record.written_late for piece in subgroup.pieces):
                    compare = self.compare(subgroup, subgroup.pieces)
                    compares += [] if compare is None else [compare]

        def queue() -> None:
            for compare in compares:
                compare()

        self.early = [self._device.copy(Op.GRADIENT, 0, [], self._device.fence(), queue)]

    def begin(self) -> None:
        """Let the next gradient be the first one, for `compare_early`."""
        self.early = ()

    def compared_early(self, update: SubgroupUpdate) -> bool:
        """Return whether `compare_early` has compared all of an update that can be compared."""
        sums = self._sums.get(update.subgroup)
        known = [] if sums is None else sums.comparable(update.copied_pieces)
        return bool(self.early) and (sums is None or sums.compared.issuperset(known))

    def compare_late(self, number: int, update: SubgroupUpdate, after: Sequence[Job]) -> list[Job]:
        """Compare all pieces of an update that waits for the caller's work, `after`, in any case. Returns the job."""
        compare = self.compare(update.subgroup, update.copied_pieces)
        return [] if compare is None else [self._device.copy(Op.GRADIENT, number, [], after, compare)]

    def confirm(self, number: int, update: SubgroupUpdate, after: Sequence[Job]) -> Callable[[], Job] | None:
        """Return what compares pieces whose gradients were sent before once more, behind `after`, for `lost`.

        That returns the job, for which the copy to these parameters must wait. None: there are no such pieces.
        """
        sums = self._sums.get(update.subgroup)
        pieces = [] if sums is None else sums.comparable([p for p in update.copied_pieces if p in sums.compared])
        return None if sums is None or not pieces else partial(self._confirm, number, sums, pieces, after)

    def _confirm(self, number: int, sums: BitSums, pieces: Collection[Piece], after: Sequence[Job]) -> Job:
        job = self._device.copy(Op.GRADIENT, number, [], after, Summing(sums, pieces, _LAST))
        self._confirmations.append(_Confirmation(sums, pieces, job))
        return job

    def before_update(self, updates: Iterable[SubgroupUpdate]) -> Sequence[Job]:
        """Return jobs that must end before the device updates these parameters, whose bits are forgotten.

        The update itself takes over what user code has written.
        """
        found = [(sums, update.pieces) for update in updates if (sums := self._sums.get(update.subgroup)) is not None]
        vain = any(sums.compared for sums, _ in found)
        for sums, pieces in found:
            sums.forget(pieces)
        # Comparisons of gradients that were sent in vain read the parameters. An empty job ends after all of them.
        return [self._device.copy(Op.GRADIENT, 0, [])] if vain else ()

    def found(self, update: SubgroupUpdate) -> list[Piece]:
        """Return the pieces of the update to which user code may have written unseen, once the comparisons have ended.

        Those of which nothing is known are among them: to take these over changes nothing where nothing was written.
        """
        subgroup = update.subgroup
        copied, sums = update.copied_pieces, self._sums.get(subgroup)
        compared = set[Piece]() if sums is None else {*sums.comparable(sums.compared)}
        other = sums.other(compared, _FIRST) if sums is not None and compared else set()
        # Pieces without a gradient in this step have to be fetched in their next one, which compares them again.
        subgroup.newest.difference_update(other)
        # Not where user code has written to the master: only if the parameter was written to does that come first.
        kept = {*update.masters_written}
        return [piece for piece in copied if piece in other or (piece not in compared and piece not in kept)]

    def take_over(self, number: int, update: SubgroupUpdate, after: Sequence[Job]) -> None:
        """Fetch the parameters to which user code may have written, before the host updates. Blocks if there are any.

        after: the work that the caller has queued before the step.
        """
        found = self.found(update)
        if found:
            # Behind all of the caller's writes before step(); the host reads the copies below.
            self._device.copy(Op.GRADIENT, number, update.download_unseen(found), after).wait()
            update.take_over(found)
            self._taken.update(found)

    def lost(self) -> list[ParameterRecord]:
        """Return the records whose parameters were written to too late for an update that has ended. Blocks shortly."""
        confirmations, self._confirmations = self._confirmations, []
        taken, self._taken = self._taken, set()
        records: dict[ParameterRecord, None] = {}
        for sums, pieces, job in confirmations:
            job.wait()  # the host reads its answer
            records |= dict.fromkeys(piece.record for piece in sums.other(pieces, _LAST) - taken)
        return list(records)

    def forget(self, subgroup: Subgroup) -> None:
        """Forget a subgroup whose parameters are forgotten. Nothing may be in flight."""
        self._sums.pop(subgroup, None)
